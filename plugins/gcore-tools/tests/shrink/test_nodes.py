"""A small job on several nodes is the same run as on one, and leaves nothing on the machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from gcore_testing import LauncherContract
from gcore_tools.shrink import gcore_check, namespaces
from gcore_tools.shrink.commands import read_job, shrink
from gcore_tools.shrink.config import NamespacesConfig
from gcore_tools.shrink.launcher import NamespacesLauncher
from gcore_tools.shrink.shrinking import Shrinking

from gcore_core.contract.errors import ConfigError

RECIPES = Path(__file__).parents[4] / "recipes"
LONG_S = 240.0


@pytest.fixture(autouse=True)
def no_engine_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are on torch, also where this machine has an interpreter with the recipe's engine."""
    monkeypatch.setenv("G_CORE_VENVS", str(tmp_path / "no-interpreters"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def small_job(directory: Path, recipe: str, nodes: int) -> dict[str, Any]:
    small = Shrinking(
        job=read_job(RECIPES / f"{recipe}.yaml", []),
        directory=directory,
        steps=2,
        slots=2,
        engine="torch",
        nodes=nodes,
    )
    small.run()
    return small.job


def test_the_devices_of_a_job_are_shared_out_among_its_nodes(tmp_path: Path) -> None:
    job = small_job(tmp_path, "gsm8k_ray", 3)
    assert job["roles"]["policy"]["slots"] == job["roles"]["rollout"]["slots"] == 2
    assert job["launcher"] == {
        "use": "shrink/namespaces",
        "config": {"nodes": 3, "devices": 2},
    }
    assert job["cluster"] == {"devices": 6}
    assert "launcher" not in small_job(tmp_path, "gsm8k_ray", 1)


def test_nodes_are_refused_before_anything_is_made_where_there_can_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(RECIPES / "quickstart.yaml"), "-o", str(tmp_path / "small.yaml"), "--nodes"]
    with pytest.raises(ConfigError, match="must be from 1 to 64, is 0"):
        shrink([*words, "0"])
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="no nodes of namespaces") as error:
        shrink([*words, "2"])
    assert "only root may make them" in str(error.value)
    assert "leave --nodes out" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_check_says_what_nodes_lack_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "ip" else tool)
    (problem,) = gcore_check({"launcher": {"use": "shrink/namespaces"}})
    assert problem.startswith("launcher.use: there can be no nodes of namespaces here: ip is")
    assert not list(gcore_check({"launcher": {"use": "core/local"}}))


def test_settings_of_nodes_are_refused_with_their_name() -> None:
    with pytest.raises(ValueError, match="nodes must be from 1 to 64, not 65"):
        NamespacesConfig(nodes=65)
    with pytest.raises(ValueError, match="shm_mib must be positive, not 0"):
        NamespacesConfig(nodes=2, shm_mib=0)
    with pytest.raises(ValueError, match="address and private are those of the network"):
        NamespacesConfig(nodes=2, private=["10.0.0.0/8"])


def test_a_network_is_taken_in_which_this_machine_has_no_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert namespaces.free_network().startswith("10.213.")
    (own, *_) = psutil.net_if_addrs()["lo"]
    taken = own._replace(family=socket.AF_INET, address="10.213.0.254")
    monkeypatch.setattr(namespaces.psutil, "net_if_addrs", lambda: {"gcore1": [taken]})
    assert namespaces.free_network() == "10.213.1.0/24"
    launcher = NamespacesLauncher(NamespacesConfig(nodes=2, devices=1))
    assert launcher._config.address == "10.213.1.0/24"
    assert launcher._config.private == ["10.213.1.0/24"]
    assert launcher._config.devices == 1


@pytest.mark.slow
class TestNamespaces(LauncherContract):
    provider = "shrink/namespaces"
    config = {"nodes": 2}


def run_command(job: Path) -> list[str]:
    return [sys.executable, "-u", "-m", "gcore_core", "run", str(job)]


def written(directory: Path, nodes: int) -> Path:
    """Writes a small job whose run repeats bit for bit."""
    job = small_job(directory / "twins", "gsm8k_ray", nodes)
    job["run"]["deterministic"] = True
    job["plugins"] = {}
    file = directory / f"nodes{nodes}.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


def hash_of(job: Path) -> str:
    done = subprocess.run(
        run_command(job),
        cwd=job.parent,
        timeout=LONG_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("weights_sha256")]
    return line.split()[1]


def left() -> set[str]:
    """Returns the links of this machine that lead to nodes, and the processes that hold nodes."""
    links = [name for name in psutil.net_if_addrs() if name.startswith("gcore")]
    holders = [
        f"{process.pid} {' '.join(process.info['cmdline'])}"
        for process in psutil.process_iter(["cmdline"])
        if "--kill-child" in (process.info["cmdline"] or ())
    ]
    return {*links, *holders}


@pytest.mark.slow
def test_a_run_on_two_nodes_makes_the_weights_of_one_node_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    before = left()
    two = written(tmp_path, 2)
    assert hash_of(two) == hash_of(written(tmp_path, 1))
    logs = {log.name for log in (tmp_path / "runs" / "nodes2" / "001" / "logs").glob("agent*")}
    assert {"agent.0.log", "agent.1.log"} <= logs
    assert left() <= before


@pytest.mark.slow
def test_a_run_that_is_killed_takes_its_nodes_with_it(tmp_path: Path) -> None:
    before = left()
    job = written(tmp_path, 2)
    with subprocess.Popen(
        run_command(job), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        else:
            pytest.fail("the run ended before its first step")
        assert left() - before
        process.send_signal(signal.SIGKILL)
    ends_s = time.monotonic() + LONG_S
    while left() - before:
        assert time.monotonic() < ends_s, left()
        time.sleep(0.1)
