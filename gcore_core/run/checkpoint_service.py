"""The supervisor's part of checkpoints: where one is written, when it counts, which stay."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.config.plan import Plan
from gcore_core.contract.errors import CheckpointError
from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.launching import Site
from gcore_core.contract.records import Header
from gcore_core.run import carried_records
from gcore_core.run.checkpoints import CheckpointFacts, Checkpoints, Opened, Retention
from gcore_core.runtime.messages import (
    CARRIED,
    COMMIT_CHECKPOINT,
    OPEN_CHECKPOINT,
    Carried,
    CheckpointPlace,
    CommitCheckpoint,
    Nothing,
    OpenCheckpoint,
)
from gcore_core.runtime.process.launchers import AGENT
from gcore_core.runtime.rpc.gathering import Gathering
from gcore_core.runtime.rpc.service import Call, Service
from gcore_core.runtime.store.client import StoreReader, StoreWriter

STATE, CONFIG, TRAINER, SURPLUS = "state.json", "config.json", POLICY, "surplus"


class Keeper:
    """``told`` gets a line for a person: a save that failed ends no run."""

    def __init__(self, plan: Plan, directory: Path, told: Callable[[str], None]) -> None:
        self._plan, self._told = plan, told
        self._checkpoints = Checkpoints(directory)
        self._once = Gathering(1)  # the lead asks again when an answer was lost
        self._carried: dict[
            tuple[int, int], list[Header]
        ] = {}  # by step and shard; of the latest step
        self._store: StoreReader | None = None

    def register(self, service: Service) -> None:
        service.add(CARRIED, self.carried)
        service.add(OPEN_CHECKPOINT, self.open)
        service.add(COMMIT_CHECKPOINT, self.commit)

    async def enter(self, site: Site, resumed: Resumed | None, shards: int) -> Resumed | None:
        """The run's store is there: puts the records into it that were kept for the step after the
        checkpoint.
        """
        self._store = StoreReader(site.store, AGENT, site.secret, site.agent)
        if resumed is None or not (Path(resumed.path) / SURPLUS).is_dir():
            return resumed
        writer = StoreWriter(site.store, AGENT, site.secret, site.agent, "supervisor")
        found = await carried_records.restore(
            Path(resumed.path) / SURPLUS, writer, resumed.step, frozenset(range(shards))
        )
        await writer.close()
        return msgspec.structs.replace(resumed, carried=found)

    async def carried(self, request: Carried, call: Call) -> Nothing:
        self._carried = {key: told for key, told in self._carried.items() if key[0] >= request.step}
        self._carried[request.step, request.shard] = request.headers
        return Nothing()

    async def open(self, request: OpenCheckpoint, call: Call) -> CheckpointPlace:
        async def act(_: list[None]) -> CheckpointPlace:
            try:
                path = await asyncio.to_thread(self._checkpoints.begin, request.step)
                headers = [
                    h
                    for (step, _), part in sorted(self._carried.items())
                    for h in part
                    if step == request.step
                ]
                if (
                    headers and self._store is not None
                ):  # now: after the next step the store may have them no more
                    await carried_records.save(headers, self._store, path / SURPLUS)
                trainer = path / TRAINER
                trainer.mkdir()
            except (CheckpointError, OSError) as error:
                self._checkpoints.abandon(request.step)
                self._told(str(error))
                return CheckpointPlace("")
            return CheckpointPlace(str(trainer))

        place: CheckpointPlace = await self._once.join(("open", request.step), 0, None, act)
        return place

    async def commit(self, request: CommitCheckpoint, call: Call) -> Nothing:
        async def act(_: list[None]) -> None:
            await asyncio.to_thread(self._commit, request)

        await self._once.join(("commit", request.step), 0, None, act)
        return Nothing()

    def _commit(self, request: CommitCheckpoint) -> None:
        kept = self._plan.settings.checkpoint
        try:
            if request.failed:
                self._checkpoints.abandon(request.step)
                self._told(request.failed)
                return
            partial = Path(self._checkpoints.directory / f"step-{request.step:06d}.partial")
            (partial / STATE).write_bytes(msgspec.json.encode(request.state))
            (partial / CONFIG).write_bytes(msgspec.json.encode(self._plan.config))
            facts = CheckpointFacts(
                run=self._plan.name,
                lock={item["distribution"]: item["version"] for item in self._plan.lock},
                config_hash=hashlib.sha256(
                    msgspec.json.encode(self._plan.config, order="sorted")
                ).hexdigest(),
                metrics=request.metrics,
            )
            self._checkpoints.commit(request.step, facts)
            self._checkpoints.keep(
                Retention(
                    last=kept.last,
                    every=kept.keep_every,
                    best=kept.best or "",
                    best_is=kept.best_is,
                )
            )
        except (CheckpointError, OSError) as error:
            self._checkpoints.abandon(request.step)
            self._told(str(error))


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """What a run goes on from."""

    step: int
    path: str
    state: dict[str, Any]
    notes: tuple[str, ...] = ()
    carried: list[Header] = []


def newest(directory: Path, step: int | None = None) -> Resumed:
    """The state in the newest whole checkpoint of a run, or in that of a step. Raises
    CheckpointError without one.
    """
    opened: Opened = Checkpoints(directory).open(step)
    state = msgspec.json.decode((opened.path / STATE).read_bytes(), type=dict[str, Any])
    return Resumed(
        step=opened.manifest.step, path=str(opened.path), state=state, notes=opened.notes
    )
