"""Sleep and wake of generators whose engine can do both by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.generator import Finished
from gcore_core.contract.records import WeightPlan
from gcore_language.inbox import WeightInbox


class EngineSleeps:
    """Stands before an engine's generator among the bases; see
    ``gcore_core.contract.generator.Sleeps``.

    The class has ``release_memory`` and ``take_memory``, in the engine's terms. That the weights
    are the same after a
    wake is seen as after a push: by their log-probs.
    """

    _inbox: WeightInbox
    _asleep = False

    def release_memory(self) -> None:
        raise NotImplementedError

    def take_memory(self) -> None:
        raise NotImplementedError

    def sleep(self) -> None:
        self._inbox.check_idle()
        if not self._asleep:
            self.release_memory()
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self.take_memory()
            self._asleep = False

    def step(self) -> list[Finished]:
        self._check_awake()
        return super().step()  # type: ignore[misc, no-any-return]

    def begin_weights(self, plan: WeightPlan) -> None:
        self._check_awake()
        super().begin_weights(plan)  # type: ignore[misc]

    def _check_awake(self) -> None:
        if self._asleep:
            raise ContractError("this generator sleeps.", where="generator", todo="Wake it first.")


def with_arguments(
    context: WorkerContext, arguments: Mapping[str, Any], plain: str
) -> dict[str, Any]:
    """The role's ``engine:`` with those that switch sleep on. Raises ConfigError without CUDA,
    naming the provider that does without.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "this engine can sleep only with CUDA, which is not available here.",
            where=f"roles.{context.role}.use",
            todo=f"Use {plain}.",
        )
    return {**context.engine, **arguments}
