"""Lets generators sleep and wake whose engine can do both by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.generator import Finished
from gcore_core.contract.records import WeightPlan
from gcore_language.engine_arguments import with_own
from gcore_language.inbox import WeightInbox


class EngineSleeps:
    """Adds sleep to an engine's generator; see ``gcore_core.contract.generator.Sleeps``.

    It stands before the generator among the bases of a class, which defines ``release_memory`` and
    ``take_memory``. Whether the weights are the same after a wake shows as after a push: by their
    log-probs.
    """

    _inbox: WeightInbox
    _asleep = False

    def release_memory(self) -> None:
        """Makes the engine give back its device memory."""
        raise NotImplementedError

    def take_memory(self) -> None:
        """Makes the engine take its device memory again."""
        raise NotImplementedError

    def sleep(self) -> None:
        """See ``Sleeps.sleep``. Raises WeightMismatch while a push is open."""
        self._inbox.check_idle()
        if not self._asleep:
            self.release_memory()
            self._asleep = True

    def wake(self) -> None:
        """See ``Sleeps.wake``."""
        if self._asleep:
            self.take_memory()
            self._asleep = False

    def step(self) -> list[Finished]:
        """See ``Generator.step``. Raises ContractError while the generator sleeps."""
        self._check_awake()
        return super().step()  # type: ignore[misc, no-any-return]

    def begin_weights(self, plan: WeightPlan) -> None:
        """See ``ReceivesWeights.begin_weights``.

        Raises ContractError while the generator sleeps.
        """
        self._check_awake()
        super().begin_weights(plan)  # type: ignore[misc]

    def _check_awake(self) -> None:
        if self._asleep:
            raise ContractError("this generator sleeps.", where="generator", todo="Wake it first.")


def with_arguments(
    context: WorkerContext, arguments: Mapping[str, Any], plain: str
) -> dict[str, Any]:
    """Returns the role's ``engine:`` with the arguments that switch sleep on.

    plain: the provider to use where there is no CUDA.

    Raises ConfigError without CUDA, and where ``engine:`` has another value of one of them.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "this engine can sleep only with CUDA, which is not available here.",
            where=f"roles.{context.role}.use",
            todo=f"Use {plain}.",
        )
    return with_own(context.engine, arguments, context.role)
