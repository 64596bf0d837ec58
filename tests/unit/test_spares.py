"""What is kept ready, when, and what cannot be."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
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
    kept = Spares(Record(""))
    kept.prepare([(spec, os.getpid())])
    await asyncio.gather(*kept._preparing)
    return kept


def module(directory: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    (directory / "imported_ahead.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    return "imported_ahead"


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
    assert process.pid == server
    assert await process.wait() == 1
    os.close(lifeline)
    assert "scorer.0 ends" in (tmp_path / "scorer.0.log").read_text()
    await asyncio.gather(*kept._preparing)
    (successor,) = kept.pids().values()
    assert successor != server
    await kept.stop()


async def test_where_an_import_fails_nothing_is_kept_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = worker(tmp_path, module(tmp_path, "raise OSError('no device')\n", monkeypatch))
    kept = await prepared(tmp_path, spec)
    assert not kept.pids()
    assert await kept.start(spec) is None


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
