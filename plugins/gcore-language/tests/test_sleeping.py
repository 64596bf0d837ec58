from __future__ import annotations

import pytest
from gcore_language.inbox import WeightInbox
from gcore_language.sleeping import EngineSleeps, with_arguments

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, ContractError, WeightMismatch
from gcore_core.contract.generator import Finished
from gcore_core.contract.records import TensorSpec, WeightPlan

PLAN = WeightPlan(1, [TensorSpec("a", "F32", (1,), 4)])


class Engine:
    def __init__(self) -> None:
        self._inbox = WeightInbox("rollout", {"a": (1,)})
        self.calls: list[str] = []

    def step(self) -> list[Finished]:
        self.calls.append("step")
        return []

    def begin_weights(self, plan: WeightPlan) -> None:
        self._inbox.begin(plan)


class Sleeping(EngineSleeps, Engine):
    def release_memory(self) -> None:
        self.calls.append("release")

    def take_memory(self) -> None:
        self.calls.append("take")


def test_a_generator_samples_and_takes_weights_only_while_awake() -> None:
    generator = Sleeping()
    generator.wake()
    for _ in range(2):
        generator.sleep()
    for call in (generator.step, lambda: generator.begin_weights(PLAN)):
        with pytest.raises(ContractError, match=r"(?s)this generator sleeps.*Wake it first"):
            call()
    for _ in range(2):
        generator.wake()
    generator.step()
    assert generator.calls == ["release", "take", "step"]


def test_a_generator_refuses_to_sleep_during_a_push() -> None:
    generator = Sleeping()
    generator.begin_weights(PLAN)
    with pytest.raises(WeightMismatch, match="has begun and was not committed"):
        generator.sleep()
    assert generator.calls == []


def test_an_argument_that_sleep_needs_is_not_overridden_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    own = {"saves": True}
    for given in ({"size": 1}, {"size": 1, "saves": True}):
        context = WorkerContext(role="rollout", engine=given)
        assert with_arguments(context, own, "plain") == {"size": 1, "saves": True}
    context = WorkerContext(role="rollout", engine={"saves": False})
    with pytest.raises(ConfigError, match=r"engine\.saves: this provider needs True here"):
        with_arguments(context, own, "plain")
