"""Starts Ray on machines that are made of namespaces (``machines``), and ends it with them.

    with machines(2) as made, ray_nodes(made) as cluster:
        cluster.address                             # of the head, which is on the first machine
        cluster.kill(made[1])                       # ends Ray there, and what it has started

Each machine has files of Ray's own in a directory that it shares with no other one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.machines import Machine

_PORT = 6379
_START_S = 240.0
_STORE_BYTES = 100_000_000
#: Where they are not said, Ray's daemon waits for its helpers to say them, and gives up too soon
#: on a machine that is busy.
_PORTS = (
    "--dashboard-agent-grpc-port=52366",
    "--dashboard-agent-listen-port=52365",
    "--runtime-env-agent-port=52367",
    "--metrics-export-port=52368",
)
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_METRICS": "1",
    "RAY_raylet_start_wait_time_s": "200",
    "RAY_agent_register_timeout_ms": "200000",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "200",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Cluster:
    """A Ray cluster on machines; the first one is its head.

    directory: of what Ray writes; each machine has another one at this path.
    address: of the head, HOST:PORT.
    environment: of what is to find the cluster by itself.
    dashboard: whether jobs can be submitted to the head.
    """

    directory: Path
    address: str
    environment: dict[str, str]
    dashboard: bool = False
    _nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, machine: Machine, *, cpus: int = 1, head: bool = False) -> None:
        """Starts Ray on a machine; ``wait`` waits for it."""
        where = [f"--address={self.address}"]
        if head:
            where = ["--head", f"--port={_PORT}", f"--include-dashboard={self.dashboard}"]
            where += [f"--dashboard-host={machine.address}"] if self.dashboard else []
        own = Path(f"{self.directory}-{machine.name}")
        if own.exists():  # Ray was killed there
            machine.run(["umount", "--lazy", str(self.directory)])
            shutil.rmtree(own)
        own.mkdir()
        machine.run(["mount", "--bind", str(own), str(self.directory)])
        words = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where),
            *(f"--node-ip-address={machine.address}", f"--num-cpus={cpus}"),
            f"--object-store-memory={_STORE_BYTES}",
            *_PORTS,
        ]
        with open(f"{own}.log", "wb") as log:
            self._nodes[machine.name] = machine.start(
                words, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait(self, number: int) -> None:
        """Waits until so many nodes are alive. Fails with Ray's words when they do not come up."""
        until_s = time.monotonic() + _START_S
        while self.alive() != number:
            logs = [path.read_text() for path in self.directory.parent.glob("*.log")]
            assert time.monotonic() < until_s, "\n".join(logs)
            time.sleep(0.2)

    def alive(self) -> int:
        """Returns how many nodes the head believes to be alive; 0 while it does not answer."""
        from ray._raylet import GcsClient

        with contextlib.suppress(Exception):  # many kinds, while the head comes up
            nodes = GcsClient(address=self.address).get_all_node_info(timeout=2)
            return sum(node.state == 0 for node in nodes.values())
        return 0

    def kill(self, machine: Machine) -> None:
        """Ends Ray on a machine at once, with all that it has started there."""
        machine.run(["pkill", "-KILL", "-f", "ray/"], check=False)


@contextlib.contextmanager
def ray_nodes(
    machines: Sequence[Machine], *, cpus: int = 1, dashboard: bool = False
) -> Iterator[Cluster]:
    """Starts a Ray cluster on all machines. This process must be on the first one's network."""
    parent = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short: Ray makes sockets in it
    directory = parent / "r"
    directory.mkdir()
    environment = {**os.environ, **_SETTINGS, "RAY_TMPDIR": str(directory)}
    address = f"{machines[0].address}:{_PORT}"
    cluster = Cluster(directory, address, environment, dashboard)
    try:
        cluster.start(machines[0], cpus=cpus, head=True)
        cluster.wait(1)
        for machine in machines[1:]:
            cluster.start(machine, cpus=cpus)
        cluster.wait(len(machines))
        yield cluster
    finally:
        for node in cluster._nodes.values():
            with contextlib.suppress(ProcessLookupError):
                node.send_signal(signal.SIGTERM)
        for node in cluster._nodes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(10)
        shutil.rmtree(parent, ignore_errors=True)
