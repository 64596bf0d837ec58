"""Step programs with one fault each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from gcore_testing import ControllerContract

from gcore_core.builtin.filters import KeepAll
from gcore_core.contract.controller import Controller
from gcore_core.contract.launching import Peer
from gcore_core.contract.providers import CALLS, ControllerProvider
from gcore_core.contract.records import Header
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.publishing import Publishing
from gcore_core.controllers.synchronous import SynchronousController
from gcore_core.runtime.messages import PUBLISHED, Published
from gcore_core.wire.retry import insist


class CleanController(ControllerContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    provider = "core/sync"
    config: ClassVar[Mapping[str, Any]] = {"prompts": 4, "push_bucket_bytes": 1}
    Program: ClassVar[type[SynchronousController]] = SynchronousController

    def program(self, context: ControllerContext) -> Controller:
        return self.Program(SyncConfig(**self.config), context)


class SaysLessThanItCalls(CleanController):
    caught_by = ("test_it_calls_what_it_says",)
    provider = ControllerProvider(
        summary="-",
        factory="gcore_core.controllers.synchronous:SynchronousController",
        config=SyncConfig,
        calls={**CALLS, "annotator": frozenset()},
    )


class ReportsAnotherStep(CleanController):
    caught_by = (
        "test_every_step_is_reported_once",
        "test_a_resumed_run_goes_on_with_the_next_step",
        "test_it_ends_when_it_is_told_to_stop",
    )

    class Program(SynchronousController):
        def __init__(self, config: SyncConfig, context: ControllerContext) -> None:
            super().__init__(config, context)
            end = self.reporting.end

            async def late(version: int, *rest: Any) -> None:
                await end(version + 1, *rest)

            self.reporting.end = late  # type: ignore[method-assign]


class First:
    """Placement, as if one replica were all."""

    def __init__(self, placement: PlacementShard) -> None:
        self._placement = placement

    @property
    def replicas(self) -> list[Peer]:
        return self._placement.replicas[:1]


class PushesOnlyToTheFirst(CleanController):
    caught_by = ("test_every_generator_confirms_every_push",)

    class Program(SynchronousController):
        def __init__(self, config: SyncConfig, context: ControllerContext) -> None:
            super().__init__(config, context)
            first: Any = First(self.placement)
            self.publishing = Publishing(context, config, first)


class TrainsOnWhatIsFiltered(CleanController):
    caught_by = ("test_only_what_passed_the_filter_is_trained_on",)

    class Program(SynchronousController):
        def __init__(self, config: SyncConfig, context: ControllerContext) -> None:
            object.__setattr__(context, "filter", KeepAll(None))
            super().__init__(config, context)


class ForgetsWhereItWas(CleanController):
    caught_by = (
        "test_a_resumed_run_goes_on_with_the_next_step",
        "test_every_ordinal_has_one_verdict",
        "test_only_what_passed_the_filter_is_trained_on",
    )

    class Program(SynchronousController):
        def state(self) -> dict[str, Any]:
            state = super().state()
            return {**state, "ledger": {**state["ledger"], "next_ordinal": 0}}


class GoesOn(CleanController):
    caught_by = ("test_it_ends_when_it_is_told_to_stop",)

    class Program(SynchronousController):
        def __init__(self, config: SyncConfig, context: ControllerContext) -> None:
            object.__setattr__(context, "stopping", asyncio.Event())
            super().__init__(config, context)


class LosesASample(CleanController):
    """The last sample of every group stays behind."""

    caught_by = ("test_groups_are_whole",)

    class Program(SynchronousController):
        def __init__(self, config: SyncConfig, context: ControllerContext) -> None:
            super().__init__(config, context)
            take = self.producer.take

            async def fewer(step: int) -> Any:
                taken = await take(step)
                groups: list[list[Header]] = [group[:-1] for group in taken.groups]
                return replace(taken, groups=groups)

            self.producer.take = fewer  # type: ignore[method-assign]


class TrainsAgainOnTheStepBefore(CleanController):
    """Every step's groups, and a group of the step before."""

    caught_by = (
        "test_no_ordinal_is_trained_on_twice",
        "test_every_ordinal_has_one_verdict",
        "test_a_resumed_run_goes_on_with_the_next_step",
    )

    class Program(SynchronousController):
        def __init__(self, config: SyncConfig, context: ControllerContext) -> None:
            super().__init__(config, context)
            take = self.producer.take
            before: list[list[Header]] = []

            async def more(step: int) -> Any:
                taken = await take(step)
                groups = [*before, *taken.groups]
                before[:] = taken.groups[:1]
                return replace(taken, groups=groups, oldest=step - 1)

            self.producer.take = more  # type: ignore[method-assign]


class PublishesEveryVersionTwice(CleanController):
    """The version before once more, after each."""

    caught_by = ("test_every_version_is_published_in_its_turn",)

    class Program(SynchronousController):
        def __init__(self, config: SyncConfig, context: ControllerContext) -> None:
            super().__init__(config, context)
            publish = self.publishing.publish

            async def off_by_one(version: int, release_before: int) -> bool:
                ends = await publish(version, release_before)
                if context.agree.lead:
                    await insist(context.supervisor, PUBLISHED, Published(max(0, version - 1)))
                return ends

            self.publishing.publish = off_by_one  # type: ignore[method-assign]
