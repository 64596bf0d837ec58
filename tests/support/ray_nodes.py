"""Starts Ray on machines that are made of namespaces (``machines``), and ends it with them.

    with machines(2) as made, ray_nodes(made) as cluster:
        cluster.address                             # of the head, which is on the first machine
        cluster.kill(made[1])                       # kills Ray's daemons there

Each machine has files of Ray's own in a directory that it shares with no other one. Ray need not be
in this interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.machines import SHELL, Machine

_PORT = 6379
_START_S = 80.0
_TRIES = 3
_CPUS = 1  # of each machine, and so its devices
_ALIVE = str(Path(__file__).with_name("ray_alive.py"))
#: Where they are not said, Ray's daemon waits for its helpers to say them, and gives up too soon
#: on a machine that is busy.
_PORTS = (
    "--dashboard-agent-grpc-port=52366",
    "--dashboard-agent-listen-port=52365",
    "--runtime-env-agent-port=52367",
    "--metrics-export-port=52368",
)
#: The command lines of Ray's daemons, and of none of a run's processes: venvs have names, too.
_DAEMONS = r"site-packages/ray/|ray\.scripts|ray::(DashboardAgent|RuntimeEnvAgent)"
_PROVIDER = {
    "type": "external",
    "module": "tests.support.ray_provider.MachinesProvider",
    "disable_node_updaters": True,  # they would enter new nodes by ssh
    "disable_launch_config_check": True,
}
_AUTOSCALING: dict[str, Any] = {
    "cluster_name": "machines",
    "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 60,
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}
_AUTOSCALER = {
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_METRICS": "1",
    "RAY_raylet_start_wait_time_s": "200",
    "RAY_agent_register_timeout_ms": "200000",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "200",
    "RAY_worker_niceness": "0",  # Ray's default is 15, which whatever keepers start inherits
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Cluster:
    """A Ray cluster on machines; the first one is its head.

    directory: of what Ray writes; each machine has another one at this path.
    address: of the head, HOST:PORT.
    environment: of what is to find the cluster by itself.
    python: the interpreter with Ray.
    store_bytes: of each machine's object store.
    dashboard: whether jobs can be submitted to the head.
    """

    directory: Path
    address: str
    environment: dict[str, str]
    python: str
    store_bytes: int
    dashboard: bool = False
    _nodes: dict[str, tuple[Machine, subprocess.Popen[bytes]]] = field(default_factory=dict)

    def start(
        self,
        machine: Machine,
        *,
        head: bool = False,
        others: Sequence[Machine] = (),
    ) -> None:
        """Starts Ray on a machine, and waits for nothing.

        others: for the head: machines on which an autoscaler starts Ray when they are asked for.
        """
        own = self._prepare(machine)
        environment = self.environment
        words = self._words(machine, head)
        if others:
            words.append(f"--autoscaling-config={self._autoscaling(others)}")
            environment = environment | _AUTOSCALER
        with open(f"{own}.log", "wb") as log:
            process = machine.start(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._nodes[machine.name] = machine, process

    def _prepare(self, machine: Machine) -> Path:
        """Gives a machine an empty directory of its own for Ray's files."""
        own = Path(f"{self.directory}-{machine.name}")
        if own.exists():  # Ray was killed there
            machine.run(["umount", "--lazy", str(self.directory)])
            shutil.rmtree(own)
        own.mkdir()
        machine.run(["mount", "--bind", str(own), str(self.directory)])
        return own

    def _words(self, machine: Machine, head: bool) -> list[str]:
        """Returns the command that starts Ray on a machine."""
        where = [f"--address={self.address}"]
        if head:
            where = ["--head", f"--port={_PORT}", f"--include-dashboard={self.dashboard}"]
            where += [f"--dashboard-host={machine.address}"] if self.dashboard else []
        return [
            *(self.python, "-m", "ray.scripts.scripts", "start", "--block", *where),
            *(f"--node-ip-address={machine.address}", f"--num-cpus={_CPUS}"),
            f"--object-store-memory={self.store_bytes}",
            *_PORTS,
        ]

    def _autoscaling(self, others: Sequence[Machine]) -> Path:
        """Writes the configuration of an autoscaler that has these machines; returns the file."""
        settings = {**_SETTINGS, "RAY_TMPDIR": str(self.directory)}
        variables = [f"{name}={value}" for name, value in settings.items()]
        commands = []
        for machine in others:
            shell = [*shlex.split(SHELL), machine.address]
            start = ["env", *variables, *self._words(machine, head=False)]
            commands.append([shell, start, f"{self._prepare(machine)}.log"])
        node = {"resources": {"CPU": _CPUS}, "node_config": {}}
        config = {
            **_AUTOSCALING,
            "max_workers": len(others),
            "provider": _PROVIDER | {"gcs_address": self.address, "commands": commands},
            "available_node_types": {
                "ray.head.default": {**node, "max_workers": 0},
                "machine": {**node, "min_workers": 0, "max_workers": len(others)},
            },
        }
        path = self.directory.with_name("autoscaling.json")  # YAML, too
        path.write_text(json.dumps(config))
        return path

    def bring_up(
        self, machine: Machine, number: int, on: Machine, *, others: Sequence[Machine] = ()
    ) -> None:
        """Starts Ray on a machine and waits on another one until so many nodes are alive.

        Ray's daemon gives up when its helpers are not up within 15 s, for which there is no
        setting. On a machine that is busy they are not, so it is started again. Fails with Ray's
        words where that does not help.
        """
        words = [self.python, _ALIVE, self.address, f"{number}", f"{_START_S}"]
        for _ in range(_TRIES):
            self.start(machine, head=machine is on, others=others)
            done = on.run(words, env=self.environment, check=False, timeout=3 * _START_S)
            if done.returncode == 0:
                return
            self._end_on(machine)
        logs = [path.read_text() for path in self.directory.parent.glob("*.log")]
        raise RuntimeError("\n".join([f"Ray does not start on {machine.name}", *logs]))

    def kill(self, machine: Machine) -> None:
        """Kills Ray's daemons on a machine at once. What they have started has to end by itself."""
        machine.run(["pkill", "-KILL", "-f", _DAEMONS], check=False)

    def end(self) -> None:
        """Ends Ray on all machines, with all that is Ray's."""
        for machine, _ in list(self._nodes.values()):
            self._end_on(machine)

    def _end_on(self, machine: Machine) -> None:
        _, process = self._nodes.pop(machine.name)
        with contextlib.suppress(subprocess.TimeoutExpired):
            machine.run(["pkill", "-KILL", "-f", f"{_DAEMONS}|^ray::"], check=False)
            process.wait(10)


@contextlib.contextmanager
def ray_nodes(
    machines: Sequence[Machine],
    *,
    dashboard: bool = False,
    python: str = sys.executable,
    store_bytes: int = 100_000_000,
    others: Sequence[Machine] = (),
) -> Iterator[Cluster]:
    """Starts a Ray cluster on all machines, and ends it.

    python: an interpreter that has Ray.
    others: machines on which Ray's autoscaler starts Ray when they are asked for.
    """
    parent = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short: Ray makes sockets in it
    directory = parent / "r"
    directory.mkdir()
    environment = {**os.environ, **_SETTINGS, "RAY_TMPDIR": str(directory)}
    address = f"{machines[0].address}:{_PORT}"
    cluster = Cluster(directory, address, environment, python, store_bytes, dashboard)
    try:
        for number, machine in enumerate(machines, 1):
            cluster.bring_up(machine, number, machines[0], others=() if number > 1 else others)
        yield cluster
    finally:
        cluster.end()
        for machine in (*machines, *others):
            machine.run(["umount", "--lazy", str(directory)], check=False)
        shutil.rmtree(parent, ignore_errors=True)
