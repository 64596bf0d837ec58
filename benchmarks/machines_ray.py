"""Measures the parts of machines.py that need Ray; nothing by itself. See there.

They run by an interpreter with Ray, which machines.py is told or finds among the venvs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
from quickstart_runs import finished_rows, wall_s
from report import Claim, median_ratio, repeated

from gcore_core.config import venvs
from gcore_core.run.export import weights_sha256
from tests.support.machines import SHELL, Machine
from tests.support.ray_nodes import Cluster, ray_nodes

INSIDE = str(Path(__file__).with_name("machines_ray_inside.py"))
STEPS = 40
SHORT_STEPS = 2
IDLE_S = 10.0
PAYLOAD_BYTES = 1_000_000_000
PARTS = 8
NETWORK = "10.77.0.0/24"
_HAS_ALL = "import ray, gcore_ray, gcore_nodes"


class RayNodes(Protocol):
    """What is needed of ``machines.Nodes``."""

    all: list[Machine]
    folder: Path
    sockets: Path
    logs: Path
    ray_python: str
    tell: Callable[[str], None]

    def overrides(self) -> list[str]: ...

    def run_words(self, directory: Path, *overrides: str, python: str) -> list[str]: ...


def interpreter(given: str) -> str:
    """Returns an interpreter with Ray and our plugins for it. Ends where there is none.

    given: what ``--ray`` says; "": the venv ``ray`` among those of ``g-core venv``.
    """
    python = given or venvs.resolve("venv:ray", where="--ray")
    try:
        done = subprocess.run([python, "-c", _HAS_ALL], capture_output=True, text=True, check=False)
        why = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    except OSError as error:
        why = f"{error}"
    if why:
        sys.exit(
            f"the parts with Ray cannot be measured by {python}: {why}\n"
            "make the venv by: python tests/engines/suites.py --create --engines ray; or name an "
            "interpreter that has Ray, gcore-ray and gcore-nodes by --ray"
        )
    return python


def version_of_ray(nodes: RayNodes) -> str:
    """Returns the version of Ray, for the units of claims: it is not in this interpreter."""
    words = [nodes.ray_python, "-c", "import ray; print(ray.__version__)"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def cluster_on(nodes: RayNodes, number: int, store_bytes: int) -> Iterator[Cluster]:
    """Starts Ray on the first nodes."""
    began_s = time.monotonic()
    with ray_nodes(nodes.all[:number], python=nodes.ray_python, store_bytes=store_bytes) as cluster:
        nodes.tell(f"Ray runs on {number} nodes after {time.monotonic() - began_s:.0f} s")
        yield cluster


# -- the quickstart --------------------------------------------------------------------------------


def processes_of(machine: Machine) -> Iterator[psutil.Process]:
    """Yields the processes of a node."""
    namespace = machine.namespace()
    for process in psutil.process_iter():
        try:
            if os.stat(f"/proc/{process.pid}/ns/pid").st_ino == namespace:
                yield process
        except OSError:  # it has ended
            continue


def cpu_s_of(machines: Sequence[Machine]) -> float:
    """Returns the CPU seconds that all processes of these nodes have used so far."""
    total_s = 0.0
    for machine in machines:
        for process in processes_of(machine):
            with suppress(psutil.Error):  # it has ended
                times = process.cpu_times()
                total_s += times.user + times.system
    return total_s


def idle_cores(nodes: RayNodes, seconds: float) -> float:
    """Returns how many cores all that is on the nodes takes while nothing runs."""
    before_s = cpu_s_of(nodes.all)
    time.sleep(seconds)
    return (cpu_s_of(nodes.all) - before_s) / seconds


def measure_ray(nodes: RayNodes, short: bool) -> list[Claim]:
    """See machines.py: the same run, with its agents started by Ray and by a command."""
    steps = SHORT_STEPS if short else STEPS
    ways = {
        "ray": ["launcher.use=ray", f"launcher.config.socket_dir={nodes.sockets}"],
        "command": nodes.overrides(),
    }
    pairs = []
    with cluster_on(nodes, len(nodes.all), 100_000_000) as cluster:
        cores = idle_cores(nodes, 1.0 if short else IDLE_S)
        for number in range(1 if short else 5):
            step_s, hashes = {}, {}
            # The second of two is not always the same one: what the first has warmed helps it.
            for way in sorted(ways, reverse=bool(number % 2)):
                directory = nodes.folder / f"{way}-ray-{number}"
                rows = _trained(nodes, cluster, directory, steps, number, short, *ways[way])
                hashes[way] = weights_sha256(directory / "weights")
                step_s[way] = wall_s(rows) / (steps - 1)
                load = os.getloadavg()[0]
                nodes.tell(f"ray {number}, {way}: {step_s[way]:.3f} s a step; load {load:.1f}")
            if len(set(hashes.values())) != 1:
                sys.exit(f"Ray's agents and those of a command made different weights: {hashes}")
            pairs.append((step_s["ray"], step_s["command"]))
    unit = f"ratio, Ray {version_of_ray(nodes)}"
    return [
        repeated("ray_time_over_nodes", pairs, median_ratio, unit, 1.1, "<="),
        *(
            repeated(f"{name}_step_s", values, statistics.median, "s")
            for name, values in zip(("ray", "nodes_command"), zip(*pairs, strict=True), strict=True)
        ),
        Claim("ray_weights_compared", len(pairs), "pairs of runs, equal in every bit"),
        Claim("ray_idle_cores_four_nodes", cores, "cores"),
    ]


def _trained(
    nodes: RayNodes,
    cluster: Cluster,
    directory: Path,
    steps: int,
    seed: int,
    short: bool,
    *overrides: str,
) -> list[dict[str, Any]]:
    """Runs the quickstart from the first node; returns its metrics, step by step."""
    small = ("controller.config.prompts=8",) if short else ()
    words = nodes.run_words(
        directory,
        *(f"run.steps={steps}", f"run.seed={seed}", "evaluation.every=0", *small, *overrides),
        python=nodes.ray_python,
    )
    done = nodes.all[0].run(words, env=cluster.environment, check=False, timeout=None)
    if done.returncode:
        sys.exit(f"the run in {directory} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return finished_rows(directory, steps)


# -- payload ---------------------------------------------------------------------------------------


def measure_object_store(nodes: RayNodes, short: bool) -> list[Claim]:
    """See machines.py: payload from one node to another, by agents and by Ray's object store."""
    nbytes = 12_000_000 if short else PAYLOAD_BYTES
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "ours_tls": ("ours", {"parts": PARTS}),
        "ours_plain": ("ours", {"parts": PARTS, "private": [NETWORK]}),
        "ray_parts": ("ray", {"parts": PARTS}),
        "ray_one_object": ("ray", {"parts": 1}),
    }
    rounds: dict[str, list[Sent]] = {way: [] for way in ways}
    # What is freed stays mapped in parts, so it needs room for more than one step.
    with cluster_on(nodes, 2, max(100_000_000, 3 * nbytes)) as cluster:
        for number in range(1 if short else 5):
            for way in sorted(ways, reverse=bool(number % 2)):
                what, settings = ways[way]
                steps = 1 if short else 3
                sent = _sent(nodes, cluster, what, nbytes=nbytes, steps=steps, **settings)
                rounds[way].append(sent)
                told = f"{sent.step_s:.3f} s and {sent.cpu_s:.2f} CPU seconds a step"
                nodes.tell(f"object store {number}, {way}: {told}; load {os.getloadavg()[0]:.1f}")
    return _claims_of(rounds, nbytes, f"ratio, Ray {version_of_ray(nodes)} in plain")


@dataclass(frozen=True)
class Sent:
    """What a step of one way takes.

    step_s: wall time, the median of the steps of a turn.
    cpu_s: CPU seconds of all processes of both nodes, the mean of these steps.
    """

    step_s: float
    cpu_s: float


def _sent(nodes: RayNodes, cluster: Cluster, what: str, *, steps: int, **settings: Any) -> Sent:
    """Sends payload in one way."""
    both = nodes.all[:2]
    order = {
        "hosts": [node.address for node in both],
        "command": f"{SHELL} {{host}}",
        "python": nodes.ray_python,
        "directory": str(nodes.logs),
        "sockets": str(nodes.sockets),
        "cluster": cluster.address,
        "steps": steps,
        **settings,
    }
    words = [nodes.ray_python, INSIDE, what]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with both[0].start(words, env=cluster.environment, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        spent_s = []
        line = msgspec.json.encode(order)
        for _ in range(2):
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            if process.stdout.readline() != b"pause\n":
                sys.exit(f"{what} failed; see what it wrote above")
            spent_s.append(cpu_s_of(both))
            line = b""
        output, _ = process.communicate(b"\n")
    if process.returncode:
        sys.exit(f"{what} ended with {process.returncode}; see what it wrote above")
    took_s = msgspec.json.decode(output, type=list[float])
    return Sent(statistics.median(took_s), (spent_s[1] - spent_s[0]) / steps)


def _claims_of(rounds: dict[str, list[Sent]], nbytes: int, unit: str) -> list[Claim]:
    name = "cross_node_step_time_ray_object_store_over_ours"
    step_s = {way: [sent.step_s for sent in turns] for way, turns in rounds.items()}
    cpu_s = {way: [sent.cpu_s for sent in turns] for way, turns in rounds.items()}
    best = min("ray_parts", "ray_one_object", key=lambda way: statistics.median(step_s[way]))

    def ratio(suffix: str, ray: str, ours: str) -> Claim:
        pairs = list(zip(step_s[ray], step_s[ours], strict=True))
        return repeated(f"{name}{suffix}", pairs, median_ratio, unit)

    return [
        ratio("", best, "ours_plain"),
        ratio("_tls", best, "ours_tls"),
        ratio("_one_object", "ray_one_object", "ours_plain"),
        ratio("_one_object_tls", "ray_one_object", "ours_tls"),
        *(
            repeated(f"cross_node_step_s_{way}", values, statistics.median, "s")
            for way, values in step_s.items()
        ),
        *(
            repeated(f"cross_node_cpu_s_{way}", values, statistics.median, "CPU-s, both nodes")
            for way, values in cpu_s.items()
        ),
        Claim("cross_node_payload_gb", nbytes / 1e9, "GB a step, each hashed and compared"),
    ]
