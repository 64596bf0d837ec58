"""``nodes/command`` on two machines that have nothing in common but files and a network."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gcore_nodes.command_launcher import CommandLauncher
from gcore_nodes.config import CommandConfig
from gcore_testing.contracts.launcher import LauncherContract

from gcore_core.contract.errors import ConfigError, WorkerDied, WorkerError
from gcore_core.contract.launching import Launcher, Site
from gcore_core.run.checkpoints import Checkpoints
from gcore_core.runtime.messages import EXITS, USAGE, Nothing
from gcore_core.wire.service import Service
from tests.support.machines import SHELL, Machine, assert_in_no_process, machines

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
PATIENCE_S = 8.0
#: For what takes long only on a machine that is busy.
LONG_S = 60.0


@pytest.fixture
def two() -> Iterator[tuple[Machine, Machine]]:
    """Two machines. This process is on the first one's network, so the first one is home."""
    with machines(2) as (first, second), first.network():
        yield first, second


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    directory.mkdir()
    return directory


def launcher(*machines: Machine, **settings: Any) -> CommandLauncher:
    hosts = [machine.address for machine in machines]
    command = f"{SHELL} {{host}}"
    changed = {"devices": 1, "patience_s": PATIENCE_S, **settings}
    return CommandLauncher(CommandConfig(hosts=hosts, command=command, **changed))


def visit(launcher: Launcher, logs: Path, look: Callable[[Site], Awaitable[None]]) -> list[str]:
    """Opens a site, looks at it and closes it; returns the names of its nodes."""

    async def go() -> list[str]:
        nodes = [node.name for node in await launcher.nodes("auto")]
        where = {f"rollout.{rank}": name for rank, name in enumerate(nodes)}
        async with launcher.site(where, Service("supervisor"), logs) as site:
            await look(site)
        return nodes

    return asyncio.run(go())


def left_on(machine: Machine) -> list[str]:
    """Returns the processes and the shared memory that a run has left on a machine."""
    return machine.processes() + machine.run(["ls", "/dev/shm"]).stdout.split()


def wait_until(holds: Callable[[], bool], within_s: float = LONG_S) -> float:
    """Waits until something holds; returns the seconds. Fails when it does not come to hold."""
    started_s = time.monotonic()
    while not holds():
        assert time.monotonic() - started_s < within_s, "it never came to hold"
        time.sleep(0.02)
    return time.monotonic() - started_s


class TestTwoNodes(LauncherContract):
    @pytest.fixture
    def launcher(self, two: tuple[Machine, Machine]) -> Any:
        return launcher(*two)


def test_what_is_secret_is_in_no_argument_environment_or_log(
    two: tuple[Machine, Machine], logs: Path
) -> None:
    key = b""

    async def look(site: Site) -> None:
        nonlocal key
        key = next(line for line in site.identity.splitlines() if b"-----" not in line)
        n_agents = assert_in_no_process(
            [site.secret, site.secret.hex().encode(), key], b"gcore_nodes.agent"
        )
        assert n_agents >= 3, "the agents, and the command that leads to one, were not looked at"

    visit(launcher(*two), logs, look)
    assert key
    for path in logs.rglob("*"):
        assert key not in path.read_bytes(), path


def test_closing_leaves_nothing_on_any_machine(two: tuple[Machine, Machine], logs: Path) -> None:
    meetings: list[Path] = []

    async def look(site: Site) -> None:
        for node in site.nodes.values():
            meetings.append(node.meeting)
            await node.agent.call(USAGE, Nothing(), deadline_s=LONG_S)
        assert two[1].run(["ls", "/dev/shm"]).stdout.split() == [meetings[1].name]
        assert meetings[1].stat().st_mode & 0o777 == 0o700

    assert visit(launcher(*two), logs, look) == ["agent.0", "agent.1"]
    assert left_on(two[1]) == []
    assert not any(meeting.exists() for meeting in meetings)
    assert [path.name for path in logs.iterdir() if path.suffix == ".json"] == []


def test_a_killed_agent_leaves_nothing_on_its_machine(
    two: tuple[Machine, Machine], logs: Path
) -> None:
    """The site goes on without it, so nobody comes to that machine again."""
    second = two[1]
    record = logs / "processes.agent.1.json"

    async def look(site: Site) -> None:
        meeting = site.nodes["agent.1"].meeting
        assert meeting.exists() and record.exists() and left_on(second)
        second.run(["pkill", "-KILL", "-f", "gcore_nodes.agent"])
        is_clear = lambda: not (meeting.exists() or record.exists() or left_on(second))  # noqa: E731
        await asyncio.to_thread(wait_until, is_clear)

    visit(launcher(*two), logs, look)


def test_home_need_not_be_a_host(two: tuple[Machine, Machine], logs: Path) -> None:
    async def look(site: Site) -> None:
        assert site.home == "agent.1"
        assert site.views["agent.0"]["supervisor"].startswith("tls:10.77.0.1:")
        await site.nodes["agent.0"].agent.call(USAGE, Nothing(), deadline_s=LONG_S)

    assert visit(launcher(two[1]), logs, look) == ["agent.0", "agent.1"]
    nodes = asyncio.run(launcher(two[1]).nodes("auto"))
    assert [(node.host, len(node.devices)) for node in nodes] == [("10.77.0.2", 1), ("", 0)]


def test_a_single_machine_listens_on_no_network(two: tuple[Machine, Machine], logs: Path) -> None:
    async def look(site: Site) -> None:
        assert (site.public, site.identity) == ({}, b"")
        listening = two[0].run(["ss", "-Hltn"]).stdout
        assert "294" not in listening, listening

    assert visit(launcher(two[0]), logs, look) == ["agent.0"]


@pytest.mark.protects
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(Machine.link_down, id="both", marks=pytest.mark.slow),
        pytest.param(Machine.deafen, id="one way"),
    ],
)
def test_a_cut_link_ends_the_agent_though_its_input_stays_open(
    two: tuple[Machine, Machine], logs: Path, cut: Callable[[Machine], None]
) -> None:
    """Both sides notice within ``patience_s``: the agent ends, and the supervisor is told."""

    async def look(site: Site) -> None:
        agent = site.nodes["agent.1"].agent
        await agent.call(USAGE, Nothing(), deadline_s=LONG_S)
        cut(two[1])
        started_s = time.monotonic()
        with pytest.raises(WorkerDied, match="gone"):
            async for _ in agent.stream(EXITS, Nothing()):
                pass
        assert time.monotonic() - started_s < PATIENCE_S
        await asyncio.to_thread(wait_until, lambda: not agents_on(two[1]))
        assert time.monotonic() - started_s < PATIENCE_S

    visit(launcher(*two), logs, look)
    assert [line for line in two[1].processes() if "gcore_core" in line] == []
    assert two[1].run(["ls", "/dev/shm"]).stdout == ""


def agents_on(machine: Machine) -> list[str]:
    return [line for line in machine.processes() if "gcore_nodes.agent" in line]


def test_a_short_cut_ends_nothing(two: tuple[Machine, Machine], logs: Path) -> None:
    async def look(site: Site) -> None:
        agent = site.nodes["agent.1"].agent
        await agent.call(USAGE, Nothing(), deadline_s=LONG_S)
        two[1].link_down()
        asked = asyncio.ensure_future(agent.call(USAGE, Nothing(), deadline_s=LONG_S))
        await asyncio.sleep(PATIENCE_S / 6)  # how long the link is cut
        assert not asked.done()
        two[1].link_up()
        assert "agent.1" in (await asked).memory_mib

    visit(launcher(*two), logs, look)


def test_an_agent_that_is_stopped_is_woken_to_end(two: tuple[Machine, Machine], logs: Path) -> None:
    async def look(site: Site) -> None:
        node = site.nodes["agent.1"]
        await node.agent.call(USAGE, Nothing(), deadline_s=LONG_S)
        (pid,) = two[1].run(["pgrep", "-f", "gcore_nodes.agent"]).stdout.split()
        two[1].run(["kill", "-STOP", pid])
        assert node.end_agent is not None
        await node.end_agent()
        await asyncio.to_thread(wait_until, lambda: not agents_on(two[1]))

    visit(launcher(*two), logs, look)
    assert left_on(two[1]) == []


def test_an_agent_that_cannot_start_is_told_with_its_command_and_log(
    two: tuple[Machine, Machine], logs: Path
) -> None:
    taken = (
        "import socket, sys; s = socket.create_server(('', 29400)); print(1, flush=True); input()"
    )

    async def never(site: Site) -> None:
        raise AssertionError("the site is open")

    with two[1].start(
        [sys.executable, "-c", taken], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        with pytest.raises(WorkerError) as error:
            visit(launcher(*two), logs, never)
    assert error.value.where == "10.77.0.2"
    assert error.value.what == "its node agent ended with 1 before it was up"
    assert "the address is in use" in error.value.why
    assert f"{logs}/agent.1.log" in error.value.todo
    assert "remote_shell.py 10.77.0.2" in error.value.todo
    assert left_on(two[1]) == []


def test_a_host_that_is_not_there_is_named(two: tuple[Machine, Machine]) -> None:
    two[1].link_down()
    with pytest.raises(ConfigError) as error:
        asyncio.run(launcher(*two).nodes("auto"))
    assert error.value.what == "10.77.0.2 cannot be used"
    assert "connect to host 10.77.0.2" in error.value.why
    assert shlex.join([*shlex.split(SHELL), "10.77.0.2", sys.executable]) in error.value.todo


def test_one_machine_under_two_names(two: tuple[Machine, Machine]) -> None:
    config = CommandConfig(hosts=["10.77.0.1", "127.0.0.1"], command=f"{SHELL} {{host}}")
    with pytest.raises(ConfigError, match=r"10\.77\.0\.1 and 127\.0\.0\.1 are one machine"):
        asyncio.run(CommandLauncher(config).nodes("auto"))


def test_devices_are_those_of_the_first_hosts(two: tuple[Machine, Machine]) -> None:
    nodes = asyncio.run(launcher(*two, devices=2).nodes(3))
    assert [[device.index for device in node.devices] for node in nodes] == [[0, 1], [0]]
    with pytest.raises(ConfigError, match="its hosts have 4") as error:
        asyncio.run(launcher(*two, devices=2).nodes(5))
    assert error.value.why == "10.77.0.1 has 2, 10.77.0.2 has 2"


# -- whole runs ------------------------------------------------------------------------------------


def run_words(*overrides: str) -> list[str]:
    short = ("run.steps=2", "evaluation.every=2", "controller.config.prompts=8", "plugins=[]")
    words = [sys.executable, "-u", "-m", "gcore_core", "run", str(RECIPE)]
    return [*words, *short, "placement.use=placement/split", "run.deterministic=true", *overrides]


def on(*machines: Machine) -> list[str]:
    hosts = ",".join(machine.address for machine in machines)
    return [
        "launcher.use=nodes/command",
        f"launcher.config.hosts=[{hosts}]",
        f"launcher.config.command={SHELL} {{host}}",
        "launcher.config.devices=1",
        f"launcher.config.patience_s={PATIENCE_S}",
    ]


def hash_of(output: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith("weights_sha256")]
    return line.split()[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Returns what gives the hash of the final weights on one machine; each job runs once."""
    hashes: dict[tuple[str, ...], str] = {}

    def run(*overrides: str) -> str:
        if overrides not in hashes:
            done = subprocess.run(
                run_words(*overrides, "cluster.devices=2"),
                cwd=tmp_path_factory.mktemp("alone"),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                timeout=400,
                check=True,
                capture_output=True,
                text=True,
            )
            hashes[overrides] = hash_of(done.stdout)
        return hashes[overrides]

    return run


#: Ranks of the trainer and replicas of the generator on both machines.
ON_BOTH = ("placement.use=core/even", "roles.policy.slots=2", "roles.rollout.slots=2")


@pytest.mark.parametrize(
    ("overrides", "started"),
    [
        pytest.param(
            (),
            {"agent.0": ["policy.0"], "agent.1": ["rollout.0"]},
            id="apart",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ON_BOTH,
            {"agent.0": ["policy.0", "rollout.0"], "agent.1": ["policy.1", "rollout.1"]},
            id="both on both",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_quickstart_learns_the_same_on_two_machines(
    two: tuple[Machine, Machine],
    tmp_path: Path,
    alone: Callable[..., str],
    overrides: tuple[str, ...],
    started: dict[str, list[str]],
) -> None:
    """Trainer and generator apart, or both on both: the weights equal those of one machine, bit for
    bit.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first, second = two
    private = "launcher.config.private=[10.77.0.0/24]"
    words = run_words(*overrides, *on(first, second), private)
    done = first.run(words, cwd=tmp_path, env=environment, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = tmp_path / "runs" / "quickstart" / "001" / "logs"
    for agent, workers in started.items():
        told = (logs / f"{agent}.log").read_text()
        assert all(f"{worker} is started" in told for worker in workers), told
    assert left_on(first) == left_on(second) == []
    assert hash_of(done.stdout) == alone(*overrides)


@pytest.mark.slow
def test_a_killed_supervisor_leaves_nothing_on_any_machine(
    two: tuple[Machine, Machine], tmp_path: Path
) -> None:
    first, second = two
    words = run_words(*on(first, second), "run.steps=1000")
    with first.start(
        words,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if "  reward " in line:  # a step has ended
                break
        assert any("node.worker" in line for line in second.processes())
        first.run(["pkill", "-KILL", "-f", "gcore_core run"])
        wait_until(lambda: not left_on(first) and not left_on(second))


# -- machines that share no disk -------------------------------------------------------------------


@pytest.fixture
def disk(two: tuple[Machine, Machine], tmp_path: Path) -> Path:
    """A directory that is another one on the second machine, with the job's data on the first."""
    directory = tmp_path / "disk"
    (directory / "data").mkdir(parents=True)
    shutil.copy(RECIPE.with_name("quickstart") / "train.jsonl", directory / "data")
    two[1].own_disk(directory)
    return directory


def words_apart(two: tuple[Machine, Machine], disk: Path, *overrides: str) -> list[str]:
    """Returns the command of a run whose trainer is on the second machine, which is not home."""
    data = f"data.config.path={disk}/data/train.jsonl"
    return run_words(*on(two[1], two[0]), data, "checkpoint.every=1", *overrides)


def run_apart(two: tuple[Machine, Machine], disk: Path, *words: str) -> tuple[int, str]:
    """Runs a command on the first machine; returns its exit code and all that it wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    settings: dict[str, Any] = {"env": environment, "timeout": 400, "check": False}
    done = two[0].run(words, cwd=disk, **settings)
    return done.returncode, done.stdout + done.stderr


def sums(machine: Machine, directory: Path) -> str:
    """Returns the names and hashes of all files that a machine has below a directory."""
    script = 'find "$1" -type f | sort | xargs -r sha256sum'
    return machine.run(["sh", "-c", script, "sh", str(directory)]).stdout


@pytest.mark.protects
def test_the_quickstart_learns_the_same_without_a_shared_disk(
    two: tuple[Machine, Machine], disk: Path, alone: Callable[..., str]
) -> None:
    """The trainer's machine has neither the data nor the run's directory. It gets the one, and what
    it writes into the other comes home: logs, the trace, parts of checkpoints and the weights.
    """
    code, output = run_apart(two, disk, *words_apart(two, disk))
    assert code == 0, output
    assert "copying 1 file to 10.77.0.2" in output
    assert hash_of(output) == alone()
    assert sums(two[1], disk) == sums(two[0], disk / "data")
    run = disk / "runs" / "quickstart" / "001"
    told = [line for line in (run / "logs" / "policy.0.log").read_text().splitlines() if line]
    assert len(told) == len(set(told)) > 0
    logs = {path.stem for path in (run / "logs").glob("*.log")}
    workers = {"policy.0", "rollout.0", "scorer.0", "controller.0", "controller.1"}
    assert logs == {"supervisor", "agent.0", "agent.1", *workers}
    assert {path.stem for path in (run / "trace").iterdir()} == {"controller.0", "controller.1"}
    checkpoints = Checkpoints(run)
    assert [checkpoints.verify(step) for step in checkpoints.steps()] == [[], []]
    assert left_on(two[0]) == left_on(two[1]) == []


@pytest.mark.slow
def test_a_run_without_a_shared_disk_goes_on_from_its_checkpoint(
    two: tuple[Machine, Machine], disk: Path, alone: Callable[..., str]
) -> None:
    """It was killed with its supervisor, and its second machine has lost its disk since."""
    first, second = two
    constant = "roles.policy.config.schedule=constant"  # else it depends on the number of steps
    with first.start(
        words_apart(two, disk, "run.steps=1000", constant),
        cwd=disk,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        directory = disk / "runs" / "quickstart" / "001"
        for _ in run.stdout:
            if Checkpoints(directory).steps():
                break
        first.run(["pkill", "-KILL", "-f", "gcore_core run"])
        wait_until(lambda: not left_on(first) and not left_on(second))
    second.own_disk(disk)
    step = Checkpoints(directory).steps()[-1] + 2
    words = [sys.executable, "-m", "gcore_core", "resume", str(directory), f"run.steps={step}"]
    code, output = run_apart(two, disk, *words)
    assert code == 0, output
    assert hash_of(output) == alone(f"run.steps={step}", constant)


@pytest.mark.slow
def test_ranks_on_two_disks_save_one_checkpoint(two: tuple[Machine, Machine], disk: Path) -> None:
    """And it is loaded by ranks on two disks."""
    private = "launcher.config.private=[10.77.0.0/24]"
    code, output = run_apart(two, disk, *words_apart(two, disk, *ON_BOTH, private))
    assert code == 0, output
    run = disk / "runs" / "quickstart" / "001"
    assert Checkpoints(run).verify(2) == []
    words = [sys.executable, "-m", "gcore_core", "resume", str(run), "run.steps=3"]
    code, output = run_apart(two, disk, *words)
    assert code == 0, output
    assert Checkpoints(run).verify(3) == []


@pytest.mark.slow
def test_a_file_that_differs_on_a_machine_refuses_the_run(
    two: tuple[Machine, Machine], disk: Path
) -> None:
    data = disk / "data" / "train.jsonl"
    two[1].run(["sh", "-c", f"mkdir {data.parent}; echo of its own > {data}"])
    code, output = run_apart(two, disk, *words_apart(two, disk))
    assert code == 2
    assert f"10.77.0.2: {data}: differs: 11 bytes, at home {data.stat().st_size}" in output
    assert two[1].run(["cat", str(data)]).stdout == "of its own\n"
    assert left_on(two[0]) == left_on(two[1]) == []
    logs = disk / "runs" / "quickstart" / "001" / "logs"
    assert not list(logs.glob("policy.*")), "a worker was started"


@pytest.mark.slow
def test_logs_of_other_machines_are_followed(two: tuple[Machine, Machine], disk: Path) -> None:
    first, _ = two
    with first.start(
        words_apart(two, disk, "run.steps=4"),
        cwd=disk,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        directory = disk / "runs" / "quickstart" / "001"
        wait_until(lambda: (directory / "logs" / "policy.0.log").exists())
        assert run.poll() is None
        words = [sys.executable, "-m", "gcore_core", "logs", str(directory), "policy", "-f"]
        followed = first.run(words, timeout=400).stdout.splitlines()
        assert run.wait(LONG_S) == 0
    whole = (directory / "logs" / "policy.0.log").read_text().splitlines()
    assert [line.removeprefix("policy.0: ") for line in followed] == whole
