"""The launcher on a real Ray cluster, on machines that have only files and a network in common."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gcore_nodes.ray.config import RayConfig
from gcore_nodes.ray.launcher import RayLauncher
from gcore_nodes.ray.link import COMMAND
from gcore_testing.contracts.launcher import LauncherContract

from gcore_core.contract.errors import ConfigError, WorkerDied
from gcore_core.contract.launching import Site
from gcore_core.runtime.messages import EXITS, USAGE, Nothing
from gcore_core.wire.service import Service
from tests.support.machines import Machine, machines
from tests.support.ray_nodes import Cluster, ray_nodes

pytestmark = [pytest.mark.engine]

ROOT = Path(__file__).parents[4]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
PATIENCE_S = 10.0
#: For what takes long only on a machine that is busy.
LONG_S = 90.0

Two = tuple[Machine, Machine, Cluster]


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    """Two Ray nodes. This process is on the first one's network, so the first one is home."""
    with machines(2, shm_mib=600) as (first, second), first.network():
        with ray_nodes([first, second]) as cluster:
            yield first, second, cluster


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    directory.mkdir()
    return directory


def launcher(two: Two, **settings: Any) -> RayLauncher:
    """Returns a launcher whose process that speaks with Ray is on the first machine, with Ray."""
    return launcher_on(two[0], two[2], **settings)


def launcher_on(first: Machine, cluster: Cluster, /, **settings: Any) -> RayLauncher:
    tmpdir = f"RAY_TMPDIR={cluster.environment['RAY_TMPDIR']}"
    command = first.command(["env", tmpdir, *COMMAND])
    config = RayConfig(**{"patience_s": PATIENCE_S, "start_s": LONG_S, **settings})
    return RayLauncher(config, command)


def visit(launcher: RayLauncher, logs: Path, look: Callable[[Site], Awaitable[None]]) -> list[str]:
    """Opens a site, looks at it and closes it; returns the names of its nodes."""

    async def go() -> list[str]:
        nodes = [node.name for node in await launcher.nodes("auto")]
        where = {f"rollout.{rank}": name for rank, name in enumerate(nodes)}
        async with launcher.site(where, Service("supervisor"), logs) as site:
            await look(site)
        return nodes

    return asyncio.run(go())


def ours_on(machine: Machine) -> list[str]:
    """Returns what a run has left on a machine: processes, and shared memory that is not Ray's."""
    # Ray's dashboard has paths of ours among its words, where we are installed from a checkout.
    ours = ("-m gcore_", "ray::Keeper")
    processes = [line for line in machine.processes() if any(mark in line for mark in ours)]
    memory = machine.run(["ls", "/dev/shm"]).stdout.split()
    return processes + [name for name in memory if name.startswith("g-core")]


def assert_nothing_of_ours(*machines: Machine) -> None:
    """Waits until a run has left nothing on machines. Fails with what is left after a while."""
    ends_s = time.monotonic() + LONG_S
    while left := {machine.name: ours_on(machine) for machine in machines if ours_on(machine)}:
        assert time.monotonic() < ends_s, f"left after {LONG_S:g} s: {left}"
        time.sleep(0.1)


def test_without_a_cluster_the_way_to_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError) as error:
        asyncio.run(RayLauncher(RayConfig()).nodes("auto"))
    assert error.value.what == "this machine is a node of no Ray cluster"
    assert error.value.where == "launcher.config.cluster"
    assert "ray start --head" in error.value.todo


@pytest.mark.slow
class TestRayNodes(LauncherContract):
    @pytest.fixture
    def launcher(self, two: Two) -> Any:
        return launcher(two)


@pytest.mark.slow
def test_nothing_is_left_and_nothing_secret_shows(two: Two, logs: Path) -> None:
    """Neither the secret nor the key is in an argument, an environment, a log or a file of Ray."""
    first, second, cluster = two
    key = b""
    secret = b""

    async def look(site: Site) -> None:
        nonlocal key, secret
        secret = site.secret
        key = next(line for line in site.identity.splitlines() if b"-----" not in line)
        for node in site.nodes.values():
            await node.agent.call(USAGE, Nothing(), deadline_s=LONG_S)
        n_agents = 0
        for process in [path for path in Path("/proc").iterdir() if path.name.isdigit()]:
            for name in ("cmdline", "environ"):
                with contextlib.suppress(OSError):
                    told = (process / name).read_bytes()
                    n_agents += b"gcore_nodes.agent" in told
                    for hidden in (site.secret, site.secret.hex().encode(), key):
                        assert hidden not in told, f"{name} of {process}"
        assert n_agents >= 2, "the agents were not looked at"
        for machine in (first, second):  # what Ray holds in shared memory, and has written
            assert not holds(machine, "/dev/shm", key), "shared memory"
            assert not holds(machine, str(cluster.directory), key), "files of Ray"

    assert visit(launcher(two), logs, look) == ["agent.0", "agent.1"]
    assert_nothing_of_ours(first, second)
    for path in logs.rglob("*"):
        assert key not in path.read_bytes(), path
    assert [path.name for path in logs.iterdir() if path.suffix == ".json"] == []


def holds(machine: Machine, directory: str, content: bytes) -> bool:
    """Whether a file below a directory of a machine holds some content."""
    words = ["grep", "-rlF", "--devices=skip", content.decode(), directory]
    return machine.run(words, check=False).stdout != ""


@pytest.mark.slow
def test_an_address_in_place_of_auto(two: Two) -> None:
    nodes = asyncio.run(launcher(two, cluster=two[2].address).nodes("auto"))
    assert [node.host for node in nodes] == ["10.77.0.1", "10.77.0.2"]


@pytest.mark.slow
def test_more_than_the_cluster_has_is_told_and_given_up(
    two: Two, capfd: pytest.CaptureFixture[str]
) -> None:
    wish = launcher(two, nodes=2, resources={"GPU": 1.0}, wait_s=4.0)
    with pytest.raises(ConfigError) as error:
        asyncio.run(wish.nodes("auto"))
    assert error.value.what == "Ray has no such machines after 4 s"
    assert error.value.why == (
        "2 nodes with GPU 1 free are asked for; Ray has 0; "
        "10.77.0.1 has GPU 0 of 1; 10.77.0.2 has GPU 0 of 1"
    )


@pytest.mark.slow
def test_an_interpreter_without_the_core_is_told_with_its_node(two: Two) -> None:
    with pytest.raises(ConfigError) as error:
        asyncio.run(launcher(two, python="/usr/bin/false").nodes("auto"))
    assert error.value.what == "10.77.0.1 cannot be used"
    assert "ended with 1" in error.value.why


@pytest.mark.slow
def test_a_keeper_that_is_killed_takes_its_agent_with_it(two: Two, logs: Path) -> None:
    async def look(site: Site) -> None:
        agent = site.nodes["agent.1"].agent
        await agent.call(USAGE, Nothing(), deadline_s=LONG_S)
        two[1].run(["pkill", "-KILL", "-f", "ray::Keeper"])
        with pytest.raises(WorkerDied):
            async for _ in agent.stream(EXITS, Nothing()):
                pass
        await asyncio.to_thread(assert_nothing_of_ours, two[1])

    visit(launcher(two), logs, look)


# -- whole runs ------------------------------------------------------------------------------------


def run_words(*overrides: str) -> list[str]:
    short = ("run.steps=2", "evaluation.every=2", "controller.config.prompts=8", "plugins=[]")
    words = [sys.executable, "-u", "-m", "gcore_core", "run", str(RECIPE)]
    return [*words, *short, "placement.use=placement/split", "run.deterministic=true", *overrides]


ON_RAY = ("launcher.use=ray", f"launcher.config.patience_s={PATIENCE_S}")


def hash_of(output: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith("weights_sha256")]
    return line.split()[1]


@pytest.mark.slow
def test_the_quickstart_learns_the_same_on_ray(two: Two, tmp_path: Path) -> None:
    """Its trainer and its generator are on two Ray nodes; the weights equal those of one machine,
    bit for bit.
    """
    first, second, cluster = two
    environment = {**cluster.environment, "OMP_NUM_THREADS": "1"}
    done = first.run(run_words(*ON_RAY), cwd=tmp_path, env=environment, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = tmp_path / "runs" / "quickstart" / "001" / "logs"
    assert "policy.0 is started" in (logs / "agent.0.log").read_text()
    assert "rollout.0 is started" in (logs / "agent.1.log").read_text()
    assert_nothing_of_ours(first, second)
    alone = subprocess.run(
        run_words("cluster.devices=2"),
        cwd=tmp_path,
        env=environment,
        timeout=400,
        check=True,
        capture_output=True,
        text=True,
    )
    assert hash_of(done.stdout) == hash_of(alone.stdout)


@pytest.mark.slow
def test_a_ray_node_that_is_lost_is_survived_and_one_that_is_added_is_taken(
    tmp_path: Path,
) -> None:
    """Ray dies on a machine with a generator, and everything of the run there with it. The run goes
    on from its newest checkpoint, without that machine or, if Ray is there again, with it.
    """
    with machines(2, shm_mib=600) as (first, second), first.network():
        with ray_nodes([first, second]) as cluster:
            overrides = (
                *("run.steps=6", "checkpoint.every=1", "checkpoint.restarts=4"),
                *("evaluation.every=0", "cluster.wait_s=400", "launcher.config.start_s=40"),
            )
            with first.start(
                run_words(*ON_RAY, *overrides),
                cwd=tmp_path,
                env={**cluster.environment, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as run:
                assert run.stdout is not None
                lines = []
                for line in run.stdout:
                    lines.append(line)
                    if sum("  reward " in one for one in lines) == 2 and "  reward " in line:
                        cluster.kill(second)
                        cluster.start(second)
                assert run.wait() == 0, "".join(lines)
            text = "".join(lines)
            assert "the run goes on from step" in text, text
            assert_nothing_of_ours(first, second)


@pytest.mark.slow
def test_an_autoscaler_adds_a_node_for_a_run_that_waits(logs: Path) -> None:
    """Ray runs on one machine, and its autoscaler may start it on another one. It does so for a
    run that asks for two, not for one that asks for one, and agents are on both then.
    """
    with machines(2, shm_mib=600) as (first, second), first.network():
        with ray_nodes([first], others=[second]) as cluster:
            one = launcher_on(first, cluster, nodes=1, resources={"CPU": 1.0})
            assert len(asyncio.run(one.nodes("auto"))) == 1
            assert "raylet" not in "".join(second.processes())
            wish = launcher_on(first, cluster, nodes=2, resources={"CPU": 1.0}, wait_s=400.0)
            hosts = []

            async def look(site: Site) -> None:
                for node in site.nodes.values():
                    await node.agent.call(USAGE, Nothing(), deadline_s=LONG_S)
                hosts.append(len(site.nodes))

            assert visit(wish, logs, look) == ["agent.0", "agent.1"]
            assert hosts == [2]
            assert "raylet" in "".join(second.processes())
            assert_nothing_of_ours(first, second)


@pytest.mark.slow
def test_a_job_that_is_submitted_to_ray(tmp_path: Path) -> None:
    with machines(2, shm_mib=600) as (first, second), first.network():
        with ray_nodes([first, second], dashboard=True) as cluster:
            ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit"]
            address = f"--address=http://{first.address}:8265"
            done = first.run(
                [*ray, address, "--", *run_words(*ON_RAY, f"run.dir={tmp_path}/on-ray")],
                env={**cluster.environment, "OMP_NUM_THREADS": "1"},
                timeout=500,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "weights_sha256" in done.stdout
            assert (tmp_path / "on-ray" / "summary.md").is_file()
            assert_nothing_of_ours(first, second)
