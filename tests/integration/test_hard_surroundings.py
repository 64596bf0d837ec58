"""Runs on machines whose link, clock, disk or version is not what one would like."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gcore_nodes.command_launcher import CommandLauncher
from gcore_nodes.config import CommandConfig

from gcore_core import __version__
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.run_files import Stage, read_trace
from tests.support.machines import SHELL, Machine, machines
from tests.support.node_runs import ENVIRONMENT, alone, hash_of, left_on, on, words

SHORT = ("run.steps=2",)
HERE = f"{SHELL} {{host}}"
OTHER_TIME = Path(__file__).parents[1] / "support" / "other_time.c"


@pytest.fixture
def two() -> Iterator[tuple[Machine, Machine]]:
    with machines(2) as (first, second):
        yield first, second


def ran(machine: Machine, directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Runs the quickstart from a machine, whatever comes of it."""
    directory.mkdir()
    settings = {"cwd": directory, "env": ENVIRONMENT, "timeout": 600, "check": False}
    return machine.run(words(*overrides), **settings)


@pytest.mark.slow
def test_a_slow_and_far_link_costs_time_only(two: tuple[Machine, Machine], tmp_path: Path) -> None:
    """0.1 s each way, and 8 Mbit/s: nothing is taken for lost, and the weights are the same."""
    first, second = two
    second.slow(8)
    with second.far(0.1):
        done = ran(first, tmp_path / "far", *on(two), *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "started again" not in done.stdout and "goes on from" not in done.stdout
    assert left_on(first) == left_on(second) == []
    assert hash_of(done.stdout) == alone(tmp_path / "alone", *SHORT)


@pytest.mark.slow
def test_clocks_an_hour_apart_change_nothing(two: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Nothing compares times of day of two machines: certificates, deadlines and traces hold."""
    library = tmp_path / "other_time.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, OTHER_TIME, "-ldl"], check=True)
    shifted = f"{HERE} env LD_PRELOAD={library}"
    first, second = two
    began_s = time.time()
    done = ran(first, tmp_path / "shifted", *on(two, shifted), *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "shifted" / "runs" / "quickstart" / "001"
    stages = [line for line in read_trace(run) if isinstance(line, Stage)]
    assert {stage.shard for stage in stages} == {0, 1}  # the second controller is over there
    assert all(began_s < stage.start_s < stage.end_s < time.time() for stage in stages)
    log = (run / "logs" / "agent.1.log").read_text().splitlines()
    assert time.strptime(log[0][:19], "%Y-%m-%d %H:%M:%S") > time.localtime(began_s + 3500)
    assert hash_of(done.stdout) == alone(tmp_path / "alone", *SHORT)


@pytest.mark.slow
def test_a_full_disk_on_one_machine_is_told_with_its_name(
    two: tuple[Machine, Machine], tmp_path: Path
) -> None:
    first, second = two
    spill = tmp_path / "spill"
    spill.mkdir()
    second.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(spill)])
    full = ("launcher.config.store_gib=0.00002", f"launcher.config.spill_dir={spill}")
    patience = ("launcher.config.spill_after_s=0.5",)
    done = ran(first, tmp_path / "full", *on(two), *full, *patience, *SHORT)
    assert done.returncode not in (0, 130), done.stdout
    assert f"{spill}" in done.stderr and "on node2: no slab of" in done.stderr, done.stderr
    assert "No space left on device" in done.stderr, done.stderr
    assert left_on(first) == left_on(second) == []


def test_another_version_on_one_machine_is_told_with_its_name(
    two: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """A run that begins is refused; one that goes on goes on without the machine."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "sitecustomize.py").write_text(
        "import gcore_core\ngcore_core.__version__ = '0.0.9'\n"
    )
    way = tmp_path / "way"
    way.write_text(
        "#!/bin/sh\nhost=$1; shift\n"
        f'test $host = 10.77.0.2 && set -- env PYTHONPATH={tmp_path}/old:$PYTHONPATH "$@"\n'
        f'exec {SHELL} $host "$@"\n'
    )
    first, second = two
    hosts = [machine.address for machine in two]
    config = CommandConfig(hosts=hosts, command=f"sh {shlex.quote(str(way))} {{host}}", devices=1)
    why = f"it has gcore-core 0.0.9 ({sys.executable}), here it is {__version__}"
    with first.network():
        with pytest.raises(ConfigError, match=r"10\.77\.0\.2 cannot be used") as error:
            asyncio.run(CommandLauncher(config).find_nodes("auto", again=False))
        found = asyncio.run(CommandLauncher(config).find_nodes("auto", again=True))
    assert error.value.why == why
    assert found.missing == {"10.77.0.2": why}
    assert [node.host for node in found.nodes] == ["10.77.0.1"]
