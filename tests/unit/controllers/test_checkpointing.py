"""What the lead asks of trainers while a checkpoint is saved."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gcore_core.contract.errors import CheckpointError
from gcore_core.controllers.checkpointing import Checkpointing
from gcore_core.runtime.messages import CheckpointPlace, Nothing, SavedState


class Rank:
    """Saves in the background; ``error`` is what its save raises at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_saving = False
        self._error = error

    async def call(self, endpoint: Any, request: Any, **_: Any) -> Any:
        if endpoint.name == "finish_save":
            self.is_saving = False
            return SavedState()
        if self._error is not None:
            raise self._error
        assert not self.is_saving, "a save is under way"
        self.is_saving = True
        return Nothing()


class Supervisor:
    def __init__(self) -> None:
        self.failed: list[str] = []

    async def call(self, endpoint: Any, request: Any, **_: Any) -> Any:
        if endpoint.name == "open_checkpoint":
            return CheckpointPlace("/run/checkpoint")
        if endpoint.name == "commit_checkpoint":
            self.failed.append(request.failed)
        return Nothing()


def lead(policy: Rank, critic: Rank, supervisor: Supervisor) -> Checkpointing:
    facts = SimpleNamespace(start_step=0, state=None, checkpoint=SimpleNamespace(every=1), shard=0)
    context: Any = SimpleNamespace(
        facts=facts,
        agree=SimpleNamespace(lead=True),
        stopping=asyncio.Event(),
        saving=asyncio.Event(),
        supervisor=supervisor,
        trained={"critic": [[critic]], "policy": [[policy]]},
        workers_of=lambda role: [critic] if role == "critic" else [policy],
    )
    return Checkpointing(context, {})


def test_what_others_began_of_a_save_that_failed_is_ended() -> None:
    """Otherwise a trainer that saves in the background could not begin the next one."""

    async def run() -> None:
        policy, supervisor = Rank(), Supervisor()
        saves = lead(policy, Rank(CheckpointError("no space")), supervisor)
        for step in (1, 2):
            await saves.at(step, {}, {}, last=False)
            assert not policy.is_saving
        assert len(supervisor.failed) == 2 and "no space" in supervisor.failed[0]

    asyncio.run(run())
