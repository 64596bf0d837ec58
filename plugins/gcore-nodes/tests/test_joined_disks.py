"""What workers write on a disk that is not home's comes home: each byte once, and nothing is lost
on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gcore_nodes import joined_disks as module
from gcore_nodes.joined_disks import MARKERS, JoinedDisks, same_disks
from gcore_nodes.messages import LIST_FILES, READ_GROWN

from gcore_core.contract.errors import CheckpointError, ConfigError, DataError, WorkerDied
from gcore_core.run.checkpoint_service import CheckpointService, Resumed
from gcore_core.runtime.messages import OpenCheckpoint
from gcore_core.wire.service import Call
from tests.support.disks import DiskSite, disks

APART = {"agent.0": "home", "agent.1": "one", "agent.2": "two"}


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def append(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(content)


def run_on(site: DiskSite, node: str) -> Path:
    return site.roots[node] / "run"


@contextlib.asynccontextmanager
async def opened(site: DiskSite) -> AsyncIterator[JoinedDisks]:
    for node in site.nodes:
        run_on(site, node).mkdir(exist_ok=True)
    assert isinstance(site.files, JoinedDisks)
    async with site.files.follow(run_on(site, "agent.0")):
        yield site.files


@pytest.mark.parametrize(
    ("sights", "groups"),
    [
        ({"a": set(), "b": set()}, [{"a"}, {"b"}]),
        ({"a": {"a"}, "b": {"a", "b"}}, [{"a", "b"}]),
        ({"a": {"c"}, "b": {"b"}, "c": {"c"}}, [{"b"}, {"a", "c"}]),
        ({"a": {"a"}, "b": {"b"}, "c": {"a", "b"}}, [{"a", "b", "c"}]),
    ],
)
def test_of_two_that_share_a_disk_it_is_enough_that_one_sees_the_other(
    sights: dict[str, set[str]], groups: list[set[str]]
) -> None:
    assert sorted(map(sorted, same_disks(sights))) == sorted(map(sorted, groups))


async def test_on_a_shared_disk_nothing_is_done_and_nothing_is_left(tmp_path: Path) -> None:
    with disks(tmp_path, {"agent.0": "home", "agent.1": "home"}) as site:
        async with opened(site) as files:
            log = write(run_on(site, "agent.1") / "logs" / "rollout.0.log", "a line\n")
            await files.collect_all()
            assert log.read_text() == "a line\n"
            assert READ_GROWN.name not in site.peers["agent.1"].asked
        assert [path.name for path in run_on(site, "agent.0").iterdir()] == ["logs"]


async def test_what_is_appended_comes_home_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    with disks(tmp_path, APART) as site:
        async with opened(site):
            home = run_on(site, "agent.0")
            one = run_on(site, "agent.1") / "logs" / "rollout.0.log"
            append(one, "first\n")
            append(run_on(site, "agent.2") / "trace" / "controller.1.jsonl", "{}\n")
            await comes(lambda: (home / "trace" / "controller.1.jsonl").exists())
            append(one, "second\n")
            at_home = home / "logs" / "rollout.0.log"
            await comes(lambda: at_home.exists() and at_home.read_text().endswith("second\n"))
        assert at_home.read_text() == "first\nsecond\n"


async def comes(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


async def test_what_a_full_disk_did_not_take_whole_comes_once(tmp_path: Path) -> None:
    lines = "a line\n" * 1000
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with disks(tmp_path, APART) as site:
        async with opened(site) as files:
            append(run_on(site, "agent.1") / "logs" / "rollout.0.log", lines)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            try:
                assert not await files.drain()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert await files.drain()
            assert (run_on(site, "agent.0") / "logs" / "rollout.0.log").read_text() == lines


async def test_what_is_written_last_comes_when_the_site_is_closed(tmp_path: Path) -> None:
    """Also by workers that write while they are ended."""
    with disks(tmp_path, APART) as site:
        log = run_on(site, "agent.1") / "logs" / "rollout.0.log"
        call = site.peers["agent.1"].call

        async def ended(endpoint: Any, request: Any, **settings: Any) -> Any:
            if endpoint.name == "end_workers":
                append(log, "it ends\n")
            return await call(endpoint, request, **settings)

        site.peers["agent.1"].call = ended  # type: ignore[method-assign]
        async with opened(site):
            append(log, "it began\n")
        at_home = run_on(site, "agent.0") / "logs" / "rollout.0.log"
        assert at_home.read_text() == "it began\nit ends\n"


async def test_nodes_that_share_a_disk_with_each_other_bring_it_once(tmp_path: Path) -> None:
    with disks(tmp_path, {"agent.0": "home", "agent.1": "far", "agent.2": "far"}) as site:
        async with opened(site) as files:
            append(run_on(site, "agent.2") / "logs" / "rollout.1.log", "a line\n")
            append(run_on(site, "agent.2") / "logs" / "controller.0.log", "")
            await files.drain()
        assert (run_on(site, "agent.0") / "logs" / "controller.0.log").read_text() == ""
        at_home = run_on(site, "agent.0") / "logs" / "rollout.1.log"
        assert at_home.read_text() == "a line\n"


async def test_what_was_there_before_is_no_news(tmp_path: Path) -> None:
    """A run that goes on has the lines of its first part at home already."""
    with disks(tmp_path, APART) as site:
        log = run_on(site, "agent.1") / "logs" / "rollout.0.log"
        write(run_on(site, "agent.0") / "logs" / "rollout.0.log", "old\n")
        append(log, "old\n")
        write(run_on(site, "agent.1") / "weights" / "old", "old")
        async with opened(site) as files:
            append(log, "new\n")
            await files.collect_all()
        home = run_on(site, "agent.0")
        assert (home / "logs" / "rollout.0.log").read_text() == "old\nnew\n"
        assert not (home / "weights").exists()
        assert log.exists(), "a directory with files of before is not removed"


async def test_a_journal_that_went_back_at_home_gets_no_line_again(tmp_path: Path) -> None:
    """Home's file is shortened when the run goes back to a checkpoint; the node's is not."""
    with disks(tmp_path, APART) as site:
        journal = run_on(site, "agent.1") / "tensors.jsonl"
        at_home = run_on(site, "agent.0") / "tensors.jsonl"
        async with opened(site) as files:
            append(journal, "1\n2\n3\n")
            await files.drain()
            at_home.write_text("1\n")
            append(journal, "2 again\n")
            await files.drain()
            assert at_home.read_text() == "1\n2 again\n"


async def test_at_the_end_all_is_home_and_the_nodes_are_as_before(tmp_path: Path) -> None:
    with disks(tmp_path, APART) as site:
        write(run_on(site, "agent.0") / "weights" / "model", "of the run before")
        async with opened(site) as files:
            write(run_on(site, "agent.1") / "weights" / "model", "weights")
            write(run_on(site, "agent.2") / "sentinel" / "step.npz", "numbers")
            write(run_on(site, "agent.2") / "logs" / "processes.agent.2.json", "its own")
            write(run_on(site, "agent.2") / "checkpoints" / "x" / "part", "saved elsewhere")
            await files.collect_all()
        home = run_on(site, "agent.0")
        assert files_below(home) == {"weights/model", "sentinel/step.npz"}
        assert (home / "weights" / "model").read_text() == "weights"
        assert not run_on(site, "agent.1").exists()
        assert not run_on(site, "agent.2").exists()


async def test_weights_that_find_no_place_at_home_stay_and_the_error_says_where(
    tmp_path: Path,
) -> None:
    with disks(tmp_path, APART) as site:
        async with opened(site) as files:
            weights = write(run_on(site, "agent.1") / "weights" / "model", "weights")
            (run_on(site, "agent.0") / "weights").write_text("a file where a directory should be")
            with pytest.raises(DataError) as caught:
                await files.collect_all()
        told = f"stay on agent.1, in {run_on(site, 'agent.0')}"
        assert told in caught.value.todo and weights.read_text() == "weights"


async def test_a_run_that_fails_leaves_on_the_nodes_what_did_not_come_home(tmp_path: Path) -> None:
    with disks(tmp_path, APART) as site:
        async with opened(site):
            dump = write(run_on(site, "agent.1") / "dump", "of an error")
        assert dump.exists()
        assert not (run_on(site, "agent.1") / MARKERS).exists()


async def test_what_an_attempt_that_is_lost_has_written_comes_home_from_the_disks_that_are_left(
    tmp_path: Path,
) -> None:
    """The next attempt finds them as the first one did, so all that it writes comes home, too."""
    with disks(tmp_path, APART) as site:
        with pytest.raises(WorkerDied):
            async with opened(site):
                write(run_on(site, "agent.1") / "sentinel" / "step.npz", "numbers")
                lost = write(run_on(site, "agent.2") / "dump", "of a lost machine")
                call = site.peers["agent.2"].call

                async def gone(endpoint: Any, request: Any, **settings: Any) -> Any:
                    if endpoint is LIST_FILES:
                        raise WorkerDied("the process is gone", where="agent.2")
                    return await call(endpoint, request, **settings)

                site.peers["agent.2"].call = gone  # type: ignore[method-assign]
                raise WorkerDied("ended with signal SIGKILL", where="policy.0")
        assert files_below(run_on(site, "agent.0")) == {"sentinel/step.npz"}
        assert not run_on(site, "agent.1").exists()
        assert lost.exists()


async def test_parts_of_a_checkpoint_come_home_and_go_where_the_trainer_is(tmp_path: Path) -> None:
    with disks(tmp_path, APART, {"policy.0": "agent.1", "policy.1": "agent.2"}) as site:
        home = run_on(site, "agent.0")
        parts = Path("checkpoints", "step-000002.partial", "policy")
        async with opened(site) as files:
            (home / parts).mkdir(parents=True)
            await files.make(home / parts)
            write(run_on(site, "agent.1") / parts / "rank0", "0")
            write(run_on(site, "agent.1") / parts / "both", "same")
            write(run_on(site, "agent.2") / parts / ".rank1", "1")
            write(run_on(site, "agent.2") / parts / "both", "same")
            append(run_on(site, "agent.2") / "tensors.jsonl", "of the step\n")
            await files.collect(home / parts.parent)
            assert (home / "tensors.jsonl").read_text() == "of the step\n"
            assert {path.name for path in (home / parts).iterdir()} == {"rank0", ".rank1", "both"}
            assert not (run_on(site, "agent.1") / parts.parent).exists()
            stale = write(run_on(site, "agent.1") / "checkpoints" / "step-000001" / "x", "stale")
            await files.send({home / parts: ["policy.0"]})
            sent = run_on(site, "agent.1") / parts
            assert {path.name for path in sent.iterdir()} == {"rank0", ".rank1", "both"}
            assert not stale.exists()
            assert not (run_on(site, "agent.2") / "checkpoints" / parts.parent.name).exists()


async def test_a_run_that_goes_on_sends_each_trainer_its_part(tmp_path: Path) -> None:
    """Also two trainers on one disk, and one that has ranks on two."""
    where = {"policy.0": "agent.1", "critic.0": "agent.1", "critic.1": "agent.2"}
    roles = {"policy": None, "rollout": None, "critic": None}
    kinds = {"policy": "trainer", "rollout": "generator", "critic": "trainer"}
    plan: Any = SimpleNamespace(
        settings=SimpleNamespace(roles=roles, checkpoint=SimpleNamespace(best="")),
        provided={f"roles.{role}": SimpleNamespace(kind=kind) for role, kind in kinds.items()},
    )
    with disks(tmp_path, APART, where) as site:
        home = run_on(site, "agent.0")
        site.secret = b"s" * 32
        site.nodes["agent.0"].store = tmp_path
        for role in ("policy", "critic"):
            write(home / "checkpoints" / "step-000002" / role / "weights", role)
        for node in ("agent.1", "agent.2"):
            write(run_on(site, node) / "checkpoints" / "step-000002" / "critic" / "stale", "")
            write(run_on(site, node) / "checkpoints" / "step-000003.partial" / "critic" / "x", "")
        path = str(home / "checkpoints" / "step-000002")
        async with opened(site):
            service = CheckpointService(plan, home, print)
            resumed = Resumed(step=2, path=path, state={})
            await service.enter(site, resumed, 1)  # type: ignore[arg-type]
            assert files_below(run_on(site, "agent.1") / "checkpoints") == {
                "step-000002/policy/weights",
                "step-000002/critic/weights",
            }
            assert files_below(run_on(site, "agent.2") / "checkpoints") == {
                "step-000002/critic/weights"
            }


async def test_parts_of_a_lost_attempt_stay_on_no_disk(tmp_path: Path) -> None:
    """It was lost in its first save. Where there is no checkpoint, the run begins anew."""
    plan: Any = SimpleNamespace(
        settings=SimpleNamespace(
            roles={"policy": None}, checkpoint=SimpleNamespace(allow_unsigned=False, best="")
        ),
        provided={"roles.policy": SimpleNamespace(kind="trainer")},
    )
    with disks(tmp_path, APART, {"policy.0": "agent.0", "policy.1": "agent.1"}) as site:
        home = run_on(site, "agent.0")
        site.secret = b"s" * 32
        site.nodes["agent.0"].store = tmp_path
        partial = Path("checkpoints", "step-000003.partial", "policy")
        stale = write(run_on(site, "agent.1") / partial / "state-00003", "of a third rank")
        async with opened(site):
            service = CheckpointService(plan, home, print)
            await service.enter(site, None, 1)  # type: ignore[arg-type]
            place = await service.open(OpenCheckpoint(3), Call(lambda: None))
            assert place.path == str((home / partial).parent)
            assert (run_on(site, "agent.1") / partial).is_dir() and not stale.exists()


async def test_a_host_that_only_generates_now_keeps_no_part_of_before(tmp_path: Path) -> None:
    with disks(tmp_path, APART, {"policy.0": "agent.0"}) as site:
        home = run_on(site, "agent.0")
        part = write(home / "checkpoints" / "step-000002" / "policy" / "weights", "").parent
        stale = run_on(site, "agent.1") / "checkpoints" / "step-000003.partial"
        async with opened(site) as files:
            write(stale / "policy" / "x", "")
            await files.send({part: ["policy.0"]})
            assert not stale.exists() and (part / "weights").exists()


def files_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


async def test_parts_that_two_machines_wrote_differently_are_no_checkpoint(tmp_path: Path) -> None:
    with disks(tmp_path, APART) as site:
        home = run_on(site, "agent.0")
        async with opened(site) as files:
            (home / "parts").mkdir()
            write(home / "parts" / "meta", "of home")
            written = write(run_on(site, "agent.1") / "parts" / "meta", "of node1")
            with pytest.raises(CheckpointError, match="saved meta differently"):
                await files.collect(home / "parts")
            assert (home / "parts" / "meta").read_text() == "of home"
            assert written.exists()


async def test_nothing_is_removed_on_a_disk_that_proves_to_be_homes(tmp_path: Path) -> None:
    """Such as one that shows new files to other machines late."""
    with disks(tmp_path, APART, {"policy.0": "agent.1"}) as site:
        async with opened(site) as files:
            marker = next((run_on(site, "agent.0") / MARKERS).glob("*.agent.0"))
            write(run_on(site, "agent.1") / MARKERS / marker.name, "")
            parts = write(run_on(site, "agent.1") / "parts" / "x", "1")
            await files.remove(run_on(site, "agent.0") / "parts")
            assert parts.exists()


async def test_a_run_directory_that_cannot_be_made_on_a_node_is_told(tmp_path: Path) -> None:
    with disks(tmp_path, APART) as site:
        write(site.roots["agent.1"] / "run", "a file")
        run_on(site, "agent.0").mkdir()
        with pytest.raises(ConfigError, match=r"cannot be written on agent\.1") as error:
            async with site.files.follow(run_on(site, "agent.0")):
                pass
        assert error.value.where == str(run_on(site, "agent.0"))
