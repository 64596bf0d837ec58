"""Real processes: many workers in few hosts, controllers apart, and a host that dies."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from gcore_testing import fake

from gcore_core.contract.errors import WorkerDied, WorkerError
from gcore_core.contract.factories import build
from gcore_core.run.display import Display, open_display
from gcore_core.run.jobs import Job, worker_specs
from gcore_core.run.restart_supervisor import Start
from gcore_core.run.start import prepare
from gcore_core.run.supervisor import Supervisor
from gcore_core.runtime.messages import (
    EXITS,
    HELLO,
    SPAWN,
    USAGE,
    Hello,
    Nothing,
    SpawnRequest,
)
from gcore_core.wire.service import Call, Service

pytestmark = pytest.mark.rest

Prepared = tuple[Job, Display]


@pytest.fixture
def prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_job: Callable[..., Path]
) -> Iterator[Callable[..., Prepared]]:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as until_end:
        yield lambda **sections: prepare(
            Start(file=write_job(**sections)),
            lambda steps: open_display(steps, io.StringIO()),
            until_end=until_end,
        )


def hosts() -> list[int]:
    """Pids of the hosts that this process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended meanwhile
        if parent == os.getpid() and b"gcore_placement.sim.host" in command:
            found.append(int(stat.parent.name))
    return found


async def test_64_workers_in_2_hosts_have_64_sockets_and_controllers_their_own_processes(
    prepared: Callable[..., Prepared],
) -> None:
    job, _ = prepared(
        controller={"shards": 3}, roles={"policy": {"slots": 16}, "rollout": {"slots": 48}}
    )
    pids: dict[str, int] = {}
    everybody = asyncio.Event()

    async def hello(request: Hello, call: Call) -> Nothing:
        pids[request.name] = request.pid
        if pids.keys() == set(job.names()):
            everybody.set()
        await asyncio.Event().wait()  # nobody begins
        return Nothing()

    service = Service("supervisor")
    service.add(HELLO, hello)
    launcher = build(job.plan.factory("launcher"))
    async with launcher.site(job.where(), service, job.directory / "logs") as site:
        exits = aiter(site.home_node.agent.stream(EXITS, Nothing()))
        gone = asyncio.ensure_future(anext(exits))
        await site.home_node.agent.call(SPAWN, SpawnRequest(worker_specs(job, site)))
        await asyncio.wait(
            {gone, asyncio.ensure_future(everybody.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        assert not gone.done(), gone.result().tail
        crowd = {pid for name, pid in pids.items() if name.startswith(("policy.", "rollout."))}
        others = [pid for name, pid in pids.items() if name.startswith(("controller.", "scorer."))]
        assert crowd == set(hosts()) and len(crowd) == 2
        assert len(set(others)) == 3 + 1 and not crowd & set(others)
        sockets = {path.name for path in site.home_node.meeting.iterdir() if path.is_socket()}
        assert len([name for name in sockets if name.startswith(("policy.", "rollout."))]) == 64
        usage = await site.home_node.agent.call(USAGE, Nothing())
        assert {
            "host.0",
            "host.1",
            "controller.0",
            "scorer.0",
            "agent.0",
        } <= usage.memory_mib.keys()
        os.kill(hosts()[0], signal.SIGKILL)
        assert (await gone).code == -signal.SIGKILL
        await exits.aclose()
    assert hosts() == [], "a host outlived its site"


async def test_a_host_that_dies_ends_the_run_with_its_cause(
    prepared: Callable[..., Prepared],
) -> None:
    job, display = prepared(
        roles={"policy": {"slots": 2}, "rollout": {"slots": 4, "config": {"weights_gb": 0.0}}},
        data={"config": {"answer_tokens": [60_000]}},
    )
    run = asyncio.ensure_future(Supervisor(job, display).run())
    metrics = job.directory / "metrics.jsonl"
    while not (
        run.done() or (metrics.exists() and metrics.read_text())
    ):  # the first push is over, answers take long
        await asyncio.sleep(0.01)
    (victim, _) = hosts()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(
        WorkerDied,
        match=r"(?s)host\.[01]: ended with signal SIGKILL.*its log: .*/logs/host\.[01]\.log",
    ):
        await run
    assert hosts() == []


BROKEN = """
import sys
from pathlib import Path
from gcore_core import hookimpl
from gcore_core.contract import providers
from gcore_testing.fake import FakeDataConfig, FakeDataset

class Broken(FakeDataset):
    def __init__(self, config):
        super().__init__(config)
        if Path(sys.argv[0]).name == "host.py":
            raise RuntimeError("no such disk")

@hookimpl
def gcore_datasets():
    yield providers.DatasetProvider(summary="-", factory="broken:Broken", config=FakeDataConfig)
"""


async def test_a_worker_that_fails_in_a_host_reports_its_error(
    prepared: Callable[..., Prepared], tmp_path: Path
) -> None:
    """Its own error is the cause of the run's end, not that its host ended."""
    (tmp_path / "broken.py").write_text(BROKEN)
    job, display = prepared(
        data={"use": "broken", "config": {"rows": 8}}, local=[fake.__file__, "broken.py"]
    )
    with pytest.raises(WorkerError, match=r"rollout\.0: RuntimeError: no such disk"):
        await Supervisor(job, display).run()
    assert hosts() == []
