"""The final weights are whole at their place or not there, and are tried until they are."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from gcore_core.contract.errors import CheckpointError, ContractError, GcoreError
from gcore_core.controllers import publishing
from gcore_core.controllers.checkpointing import Stopped
from gcore_core.controllers.config import SyncConfig
from gcore_core.runtime.messages import PLACE_WEIGHTS, SAVE_PRETRAINED, UNSAVED_WEIGHTS
from gcore_core.wire.retry import RetryPolicy
from gcore_core.wire.service import Service
from gcore_core.workers import final_weights


def write(directory: Path, text: str) -> None:
    fresh = final_weights.partial(directory)
    (fresh / "adapter").mkdir(parents=True)
    (fresh / "adapter" / "model.safetensors").write_text(text)


def text_of(directory: Path) -> str:
    return (directory / "adapter" / "model.safetensors").read_text()


# -- on the disk -----------------------------------------------------------------------------------


def test_weights_have_their_place_when_they_are_whole_and_nothing_else_is_left(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "weights"
    write(directory, "first")
    assert not directory.exists()
    final_weights.place(directory)
    assert text_of(directory) == "first"
    write(directory, "second")
    final_weights.place(directory)
    final_weights.place(directory)  # another rank of the same disk
    assert text_of(directory) == "second"
    assert os.listdir(tmp_path) == ["weights"]


def test_weights_that_are_not_whole_are_removed_and_those_before_stay(tmp_path: Path) -> None:
    directory = tmp_path / "weights"
    write(directory, "first")
    final_weights.place(directory)
    write(directory, "half")
    final_weights.discard(directory)
    assert text_of(directory) == "first" and os.listdir(tmp_path) == ["weights"]


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "f"), True),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "f"), True),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "f"), False),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "f"), False),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "f"), False),
        (SafetensorError("I/O error: No space left on device (os error 28)"), True),
        (SafetensorError("I/O error: Disk quota exceeded (os error 122)"), True),
        (SafetensorError("I/O error: Read-only file system (os error 30)"), False),
        (shutil.Error([("a", "b", "[Errno 28] No space left on device")]), True),
    ],
)
def test_what_the_system_refuses_is_an_error_that_is_tried_again(
    error: Exception, is_full: bool
) -> None:
    with pytest.raises(CheckpointError, match="final weights could not be written") as caught:
        with final_weights.writing(Path("/run/weights")):
            raise error
    assert caught.value.facts == {"full_disk": is_full}
    assert ("free some space" in caught.value.todo) is is_full
    assert "the system says: " in caught.value.why


def test_another_error_of_a_trainer_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shared tensors"), final_weights.writing(Path("w")):
        raise RuntimeError("shared tensors")


# -- between processes -----------------------------------------------------------------------------


class Rank:
    """A trainer's rank that raises what it is given, in order, and then writes.

    calls: what was asked: "write", "place" or "remove".
    """

    def __init__(self, name: str, *errors: GcoreError | None) -> None:
        self.name = name
        self.calls: list[str] = []
        self._errors = list(errors)

    async def call(self, endpoint: Any, request: Any, *, deadline_s: float | None = None) -> None:
        if endpoint is SAVE_PRETRAINED:
            self.calls.append("write")
            error = self._errors.pop(0) if self._errors else None
            if error is not None:
                raise error
        elif endpoint is PLACE_WEIGHTS:
            self.calls.append("place" if request.whole else "remove")


class Teller:
    """The supervisor: keeps what it is told, and may stop the run then."""

    name = "supervisor"

    def __init__(self, stopping: asyncio.Event | None = None) -> None:
        self.told: list[str] = []
        self._stopping = stopping

    async def call(self, endpoint: Any, request: Any, *, deadline_s: float | None = None) -> None:
        assert endpoint is UNSAVED_WEIGHTS
        self.told.append(request.error)
        if self._stopping is not None:
            self._stopping.set()


class Alone:
    """The agreements of a run with one shard."""

    lead = True

    async def barrier(self, name: str, flag: bool = False) -> bool:
        return flag


def publisher(ranks: list[Rank], teller: Teller, stopping: asyncio.Event) -> Any:
    context: Any = SimpleNamespace(
        agree=Alone(),
        stopping=stopping,
        trained={"critic": [ranks[2:]], "policy": [ranks[:2]]},
        workers_of=lambda role: ranks[2:] if role == "critic" else ranks[:2],
        supervisor=teller,
        service=Service("controller.0"),
        facts=SimpleNamespace(output="/run/weights"),
    )
    placement: Any = SimpleNamespace()
    return publishing.Publishing(context, SyncConfig(), placement)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_SAVES", RetryPolicy(tries=1, first_pause_s=0.0))


def full() -> CheckpointError:
    return CheckpointError("no room.", where="/run/weights", full_disk=True)


async def test_weights_are_written_again_until_all_ranks_of_all_roles_have_written(
    no_pause: None,
) -> None:
    ranks = [Rank("policy.0", full()), Rank("policy.1"), Rank("critic.0", None, full())]
    teller = Teller()
    await publisher(ranks, teller, asyncio.Event()).save()
    failed = ["remove", "write", "remove"]
    for rank in ranks:
        assert rank.calls == [*failed, *failed, "remove", "write", "place"]
    assert [text.splitlines()[0] for text in teller.told] == [
        "policy.0, /run/weights: no room.",
        "critic.0, /run/weights: no room.",
    ]


async def test_a_run_that_is_stopped_while_it_waits_places_nothing_and_ends() -> None:
    stopping = asyncio.Event()
    ranks = [Rank("policy.0", *[full() for _ in range(9)])]
    with pytest.raises(Stopped):
        await publisher(ranks, Teller(stopping), stopping).save()
    assert ranks[0].calls == ["remove", "write", "remove"]


async def test_an_error_that_no_room_would_mend_ends_the_run_at_once(no_pause: None) -> None:
    ranks = [Rank("policy.0", full()), Rank("policy.1", ContractError("it is broken"))]
    teller = Teller()
    with pytest.raises(ContractError, match="it is broken"):
        await publisher(ranks, teller, asyncio.Event()).save()
    assert teller.told == []
