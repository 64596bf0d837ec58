"""What is kept ready, when, and what cannot be."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from gcore_core import __version__
from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.job_settings import Run
from gcore_core.contract.providers import RewardProvider
from gcore_core.runtime.messages import StorePlace, Versions, WorkerSpec
from gcore_core.runtime.process import spares
from gcore_core.runtime.process.leftovers import Record
from gcore_core.runtime.process.spares import Spares, free_bytes, kind_of
from gcore_core.runtime.worker_settings import ScorerSettings


def worker(directory: Path, *preload: str, keep: str = "always") -> WorkerSpec:
    """A scorer that knows nobody, so it ends with exit code 1 as soon as it runs."""
    return WorkerSpec(
        role="scorer",
        rank=0,
        ranks=1,
        peers={},
        factories={},
        secret=b"s" * 32,
        settings=ScorerSettings(run=Run(spares=keep), rewards={}),
        store=StorePlace(str(directory), "agent.0", "agent.0"),
        versions=Versions(sys.executable, __version__, {}),
        log=str(directory / "scorer.0.log"),
        preload=preload,
    )


async def prepared(directory: Path, spec: WorkerSpec) -> Spares:
    kept = Spares(Record(""), pays_after_s=0)
    kept.prepare([(spec, os.getpid())])
    await asyncio.gather(*kept._preparing)
    return kept


async def until(holds: Callable[[], object]) -> None:
    """Lets the loop run until a condition holds."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


def module(directory: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    (directory / "imported_ahead.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    return "imported_ahead"


def waiting_worker(directory: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerSpec:
    """A scorer that makes the file "waits", and ends with exit code 1 once there is a "go on"."""
    text = (
        "import os, time\n"
        "def wait(config):\n"
        f"    open({str(directory / 'waits')!r}, 'x').close()\n"
        f"    while not os.path.exists({str(directory / 'go on')!r}):\n"
        "        time.sleep(0.01)\n"
    )
    return msgspec.structs.replace(
        worker(directory, module(directory, text, monkeypatch)),
        factories={"dataset/train": FactorySpec("imported_ahead:wait")},
        peers={"agent.0": f"unix:{directory / 'agent'}"},
    )


async def test_several_workers_are_forked_by_one_server_and_their_exits_are_told(
    tmp_path: Path,
) -> None:
    spec = worker(tmp_path)
    kept = await prepared(tmp_path, spec)
    (server,) = kept.pids().values()
    pids = set()
    for _ in range(2):
        started = await kept.start(spec)
        assert started is not None
        process, lifeline = started
        assert await process.wait() == 1
        os.close(lifeline)
        pids.add(process.pid)
    assert len(pids | {server}) == 3
    assert (tmp_path / "scorer.0.log").read_text().count("scorer.0 ends") == 2
    await kept.stop()
    assert not kept.pids()


async def test_a_process_with_threads_is_not_forked_but_becomes_the_worker_and_has_a_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    spec = worker(tmp_path, module(tmp_path, text, monkeypatch))
    kept = await prepared(tmp_path, spec)
    (server,) = kept.pids().values()
    started = await kept.start(spec)
    assert started is not None
    process, lifeline = started
    kept.replaced(spec, process.pid)
    assert process.pid == server
    assert await process.wait() == 1
    os.close(lifeline)
    assert "scorer.0 ends" in (tmp_path / "scorer.0.log").read_text()
    await asyncio.gather(*kept._preparing)
    (successor,) = kept.pids().values()
    assert successor != server
    await kept.stop()


async def test_a_server_that_has_become_a_worker_leaves_no_error_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: failures.append(what))
    text = "import os\nends = os.pipe()\n"  # all children would share it
    spec = worker(tmp_path, module(tmp_path, text, monkeypatch))
    kept = await prepared(tmp_path, spec)
    (server,) = kept.pids().values()
    started = await kept.start(spec)
    assert started is not None
    assert started[0].pid == server
    assert await started[0].wait() == 1
    os.close(started[1])
    await until(lambda: len(asyncio.all_tasks()) == 1)
    del started, kept
    gc.collect()
    assert not failures


@pytest.mark.parametrize("why", ["'no device'", "'\u00fc' * 5000"], ids=["short", "long"])
async def test_where_an_import_fails_nothing_is_kept_ready(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = worker(tmp_path, module(tmp_path, f"raise OSError({why})\n", monkeypatch))
    kept = await prepared(tmp_path, spec)
    assert not kept.pids()
    assert await kept.start(spec) is None
    assert "imported_ahead does not import: OSError" in caplog.text


async def test_where_an_import_sets_a_time_limit_nothing_is_kept_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker imports it in the main thread, a process that is kept ready in another one."""
    source = (
        "import contextlib, signal\n"
        "with contextlib.suppress(ValueError):\n"
        "    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
    )
    spec = worker(tmp_path, module(tmp_path, source, monkeypatch))
    kept = await prepared(tmp_path, spec)
    assert not kept.pids()
    assert "no process is kept ready: a time limit by SIGALRM was set in the thread" in caplog.text


async def test_a_young_run_keeps_nothing_ready_unless_it_is_told_to(tmp_path: Path) -> None:
    """It would import every engine a second time, for a minute or less."""
    for keep, expected in (("auto", 0), ("always", 1)):
        spec = worker(tmp_path, keep=keep)
        kept = Spares(Record(""), pays_after_s=3600)
        kept.prepare([(spec, os.getpid())])
        await asyncio.wait(kept._preparing, timeout=0.5 if keep == "auto" else None)
        assert len(kept.pids()) == expected
        await kept.stop()


async def test_a_worker_that_is_lost_in_the_first_minute_leaves_its_kind_a_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = worker(tmp_path, keep="auto")
    second = worker(tmp_path, module(tmp_path, "", monkeypatch), keep="auto")
    lost = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    kept = Spares(Record(""), pays_after_s=0.2)
    kept.prepare([(first, os.getpid()), (second, lost.pid)])
    await asyncio.sleep(0)  # the preparing task has begun to wait
    lost.kill()
    lost.communicate()
    await asyncio.gather(*kept._preparing)
    assert kept._servers.keys() == {kind_of(first), kind_of(second)}
    await kept.stop()


async def test_nothing_is_kept_ready_where_that_is_switched_off_or_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not (await prepared(tmp_path, worker(tmp_path, keep="never"))).pids()
    monkeypatch.setattr(spares, "free_bytes", lambda: 1 << 20)
    assert not (await prepared(tmp_path, worker(tmp_path, keep="auto"))).pids()
    monkeypatch.setattr(spares, "free_bytes", lambda: 1 << 50)
    kept = await prepared(tmp_path, worker(tmp_path, keep="auto"))
    assert kept.pids()
    await kept.stop()


async def test_a_killed_server_is_no_obstacle_to_the_next_start(tmp_path: Path) -> None:
    spec = worker(tmp_path)
    kept = await prepared(tmp_path, spec)
    (server,) = kept.pids().values()
    os.kill(server, 9)
    assert await kept.start(spec) is None
    assert not kept.pids()


async def test_a_lost_server_is_forgotten_and_another_one_prepared_with_the_next_replacement(
    tmp_path: Path,
) -> None:
    spec = worker(tmp_path)
    kept = await prepared(tmp_path, spec)
    (server,) = kept.pids().values()
    os.kill(server, signal.SIGKILL)
    await until(lambda: not kept.pids())
    assert await kept.start(spec) is None
    kept.replaced(spec, os.getpid())
    await asyncio.gather(*kept._preparing)
    (successor,) = kept.pids().values()
    assert successor != server
    await kept.stop()


async def test_a_server_is_lost_when_it_ends_although_somebody_has_its_socket_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does each worker, until it has closed it."""
    text = "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\n"
    spec = worker(tmp_path, module(tmp_path, text, monkeypatch))
    kept = await prepared(tmp_path, spec)
    (server,) = kept.pids().values()
    (holder,) = psutil.Process(server).children()
    os.kill(server, signal.SIGKILL)
    async with asyncio.timeout(5):
        await until(lambda: not kept.pids())
        await kept.stop()
    holder.kill()


async def test_a_worker_that_ended_before_the_news_of_its_start_was_read_is_told_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = waiting_worker(tmp_path, monkeypatch)
    kept = await prepared(tmp_path, spec)
    (server,) = kept.pids().values()
    starting = asyncio.ensure_future(kept.start(spec))
    workers: list[psutil.Process] = []
    async with asyncio.timeout(60):
        while not workers:  # the loop runs only until the request has left
            await asyncio.sleep(0)
            workers = psutil.Process(server).children()
    (tmp_path / "go on").touch()
    while workers[0].is_running():  # the server has waited for it
        pass
    started = await starting
    assert started is not None
    assert started[0].pid == workers[0].pid
    async with asyncio.timeout(60):
        assert await started[0].wait() == 1
    os.close(started[1])
    await kept.stop()


@pytest.mark.parametrize("ends", ["by itself", "killed"])
async def test_the_exit_code_of_a_worker_is_known_although_its_server_is_lost(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a controller that ends well would count as killed, and the run would go back."""
    spec = waiting_worker(tmp_path, monkeypatch)
    kept = await prepared(tmp_path, spec)
    (server,) = kept.pids().values()
    started = await kept.start(spec)
    assert started is not None
    process, lifeline = started
    await until((tmp_path / "waits").exists)
    os.kill(server, signal.SIGKILL)
    await until(lambda: not kept.pids())
    if ends == "killed":
        os.kill(process.pid, signal.SIGKILL)
    (tmp_path / "go on").touch()
    async with asyncio.timeout(60):
        assert await process.wait() == (1 if ends == "by itself" else -signal.SIGKILL)
    os.close(lifeline)


async def test_a_kind_has_one_server_although_it_is_prepared_twice_at_a_time(
    tmp_path: Path,
) -> None:
    spec = worker(tmp_path)
    others = {child.pid for child in psutil.Process().children()}
    kept = Spares(Record(""))
    for _ in range(2):
        kept.prepare([(spec, os.getpid())])
    await asyncio.gather(*kept._preparing)
    servers = [
        child.pid
        for child in psutil.Process().children()
        if child.pid not in others and "gcore_core.runtime.process.fork_server" in child.cmdline()
    ]
    assert servers == list(kept.pids().values())
    await kept.stop()


async def test_a_thread_that_a_failed_import_leaves_does_not_hold_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "import threading\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "raise OSError('no device')\n"
    )
    spec = worker(tmp_path, module(tmp_path, text, monkeypatch))
    async with asyncio.timeout(60):
        kept = await prepared(tmp_path, spec)
    assert not kept.pids()


async def test_a_log_has_the_form_of_workers_whatever_an_import_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import logging\nlogging.basicConfig(format='its own form: %(message)s')\n"
    spec = worker(tmp_path, module(tmp_path, text, monkeypatch))
    kept = await prepared(tmp_path, spec)
    started = await kept.start(spec)
    assert started is not None
    assert await started[0].wait() == 1
    os.close(started[1])
    await kept.stop()
    assert " scorer.0 ERROR scorer.0 ends" in (tmp_path / "scorer.0.log").read_text()


def test_threads_of_an_import_run_at_the_priority_that_the_process_has() -> None:
    """A run that was started by ``nice`` is not hurried, and has its spares all the same."""
    text = (
        "import os, threading\n"
        "from gcore_core.runtime.process import fork_server\n"
        "os.nice(5)\n"
        "ready = threading.Event()\n"
        "def work():\n"
        "    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), level)\n"
        "    ready.set()\n"
        "    threading.Event().wait()\n"
        "level = os.getpriority(os.PRIO_PROCESS, 0)\n"
        "thread = threading.Thread(target=work, daemon=True)\n"
        "thread.start()\n"
        "ready.wait()\n"
        "fork_server._SETTLE_S = 0\n"
        "assert not fork_server._left_slow()\n"
        "assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == level\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pyarrow_starts_no_thread_in_a_worker_and_the_user_may_have_it_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process with a thread cannot be forked, so a fault costs the import of every engine."""
    pytest.importorskip("pyarrow")
    monkeypatch.delenv("JE_ARROW_MALLOC_CONF", raising=False)
    program = "import os, pyarrow; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=spares.environment_of(sys.executable) | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "1"
    monkeypatch.setenv("JE_ARROW_MALLOC_CONF", "mine")
    assert spares.environment_of(sys.executable)["JE_ARROW_MALLOC_CONF"] == "mine"


def test_threads_wait_as_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert spares.environment_of(sys.executable)["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert spares.environment_of(sys.executable)["GOMP_SPINCOUNT"] == "5"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in spares.environment_of(sys.executable)


def test_the_memory_of_a_container_bounds_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert free_bytes(tmp_path) == 650_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path) > 650_000


def test_workers_of_one_kind_import_the_same_and_files_of_the_project_are_not_among_it(
    tmp_path: Path,
) -> None:
    spec = worker(tmp_path, "json")
    found = kind_of(spec)
    assert "json" in found.modules
    assert "gcore_core.runtime.shells.scorer" in found.modules
    other = {"reward/a": FactorySpec(f"{tmp_path}/mine.py:score"), "b": FactorySpec("json:dumps")}
    assert kind_of(msgspec.structs.replace(spec, factories=other, rank=3)) == found


def test_a_module_name_that_cannot_be_one_is_a_problem_of_the_provider() -> None:
    provider = RewardProvider(summary="-", factory="a:b", preload=("torch", "no module"))
    assert provider.problems("mine") == ["preload 'no module' is not the name of a module"]
