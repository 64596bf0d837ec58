"""Measures a run on four nodes: what it costs, how soon it starts, and what a lost node does.

    python benchmarks/machines.py [--json] [--check] [--parts start quickstart ...] [--short]

The nodes are namespaces of this machine, made by tests/support/machines.py: each has its own
network, shared memory, host name and processes, and all share its cores. This needs root, iproute2
and util-linux; without them it says so and ends.

start: ``nodes/command`` opens a site on four nodes, from asking the hosts until all four agents
    have answered.
quickstart: the quickstart with its policy on one node and a generator on each of three, against the
    same workers by ``core/local`` on one node, in turns. CPU seconds are those of all processes of
    a run, supervisor and agents included, from the end of the first step to the end of the last,
    as the runs' metrics have them. Both runs are deterministic, and the benchmark ends where their
    final weights differ in a bit.
bulk: bulk_rates.py, sender and reader on two nodes: the rate at which an agent pulls content into
    an empty store over that of a bare socket with TLS; the same into a store that is full, as a
    run's is once its copies fill its budget; CPU seconds for one GB.
calls: the median of small calls over TLS from one node to another, one after the other.
push: bytes that the network interface of the trainer's node sends in a push to four generators on
    one other node, over the bytes of the model. Every generator hashes what it holds then.
faults: the quickstart on four nodes with a checkpoint after every step. First the agent of a node
    is killed, with which the node's workers end: the time until the next step is made. Then the
    link of another node is cut: the time until the run's log says that the node is lost
    (link_cut_noticed_s), until the run prints it (link_cut_printed_s), and until no process and no
    shared memory of the run is left on that node (link_cut_ended_s). At the end the run is killed.

At the end of each part, and after up to a minute of waiting, what is left on all nodes is counted:
processes, files in shared memory, listening sockets, the run's directories of sockets and of its
store on disk, and its records of processes. ``left_behind_on_any_node`` is the sum over all parts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bulk_rates
import msgspec
from gcore_nodes.identity import make_identity
from quickstart_runs import RECIPE, finished_rows
from report import Claim, add_options, median_ratio, publish, repeated

from gcore_core.run.saved_weights import weights_sha256

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


from tests.support.machines import SHELL, Machine, machines  # noqa: E402

INSIDE = str(Path(__file__).with_name("machines_inside.py"))
NODES = 4
SHM_MIB = 4096  # for each node, at most: nothing is taken before it is used
STEPS = 120
SHORT_STEPS = 2
SMALL = ("controller.config.prompts=8", "evaluation.every=0")
WAIT_S = 300.0  # for a line of a run, on a busy machine
LEFT_S = 60.0  # what ends a run may take so long
SHELL_PORT = ":2222"  # of what stands for ssh
DISTRIBUTIONS = ["gcore-core", "gcore-nodes", "gcore-torch", "torch"]

_STEP = re.compile(r"^step +(\d+)/")
#: A node is lost; the run goes on from its newest checkpoint.
_LOST = re.compile(r"the workers of its node end with it")
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ")

Tell = Callable[[str], None]


class Nodes:
    """Four nodes, and what runs on them.

    folder: for everything that is written.
    tell: says how far it is.
    """

    def __init__(self, made: Sequence[Machine], folder: Path, tell: Tell) -> None:
        self.all = list(made)
        self.folder = folder
        self.tell = tell
        self.sockets = folder / "s"  # socket paths must be short
        self.sockets.mkdir()
        self.logs = folder / "logs"
        self.logs.mkdir()

    def inside(self, node: Machine, what: str, **order: Any) -> Any:
        """Returns what machines_inside.py has measured on a node; ends where it fails."""
        process = self.begin_inside(node, what, **order)
        output, _ = process.communicate()
        if process.returncode:
            sys.exit(f"{what} on {node.name} ended with {process.returncode}")
        return msgspec.json.decode(output)

    def begin_inside(self, node: Machine, what: str, **order: Any) -> subprocess.Popen[bytes]:
        """Starts machines_inside.py on a node, and gives it its order."""
        order = {"directory": str(self.logs), "sockets": str(self.sockets), **order}
        process: subprocess.Popen[bytes] = node.start(
            [sys.executable, INSIDE, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        return process

    def on_all(self) -> dict[str, Any]:
        """Returns the part of an order that names the nodes and the way to them."""
        return {"hosts": [node.address for node in self.all], "command": f"{SHELL} {{host}}"}

    def overrides(self) -> list[str]:
        """Returns the overrides of a recipe that is to run on all nodes."""
        hosts = ",".join(node.address for node in self.all)
        return [
            "launcher.use=nodes/command",
            f"launcher.config.hosts=[{hosts}]",
            f"launcher.config.command={SHELL} {{host}}",
            "launcher.config.devices=1",
            f"launcher.config.socket_dir={self.sockets}",
        ]

    def run_words(
        self, directory: Path, *overrides: str, python: str = sys.executable
    ) -> list[str]:
        """Returns the command of a quickstart with one policy and three generators."""
        return [
            *(python, "-u", "-m", "gcore_core", "run", str(RECIPE)),
            *("plugins=[]", "run.deterministic=true", f"run.dir={directory}"),
            *("placement.use=placement/split", f"roles.rollout.slots={NODES - 1}"),
            *overrides,
        ]

    def left(self) -> list[str]:
        """Returns what is left of runs on any node."""
        found = [str(path) for path in self.sockets.iterdir()]
        for files in ("spill-*", "processes*.json"):
            found += [str(path) for path in self.folder.rglob(files)]
        for node in self.all:
            found += [f"{node.name}: {thing}" for thing in (*left_on(node), *listening(node))]
        return found

    def left_behind(self) -> list[str]:
        """Waits until nothing is left, for a while; returns what is left then."""
        ends_s = time.monotonic() + LEFT_S
        while (left := self.left()) and time.monotonic() < ends_s:
            time.sleep(0.2)
        return left


def left_on(node: Machine) -> list[str]:
    """Returns processes and shared memory of a run on a node."""
    return node.processes() + node.run(["ls", "/dev/shm"]).stdout.split()


def listening(node: Machine) -> list[str]:
    """Returns the sockets in a node's network that somebody listens at."""
    lines = node.run(["ss", "-Hltnx"]).stdout.splitlines()
    return [line for line in lines if SHELL_PORT not in line]


# -- start, quickstart -----------------------------------------------------------------------------


def measure_start(nodes: Nodes, short: bool) -> list[Claim]:
    rounds = nodes.inside(nodes.all[0], "open", rounds=1 if short else 5, **nodes.on_all())
    return [repeated("start_four_nodes_s", rounds, statistics.median, "s", 10.0, "<=")]


def trained(nodes: Nodes, directory: Path, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """Runs a quickstart from the first node; returns its metrics, step by step."""
    words = nodes.run_words(directory, f"run.steps={steps}", *overrides)
    done = nodes.all[0].run(words, check=False, timeout=None)
    if done.returncode:
        sys.exit(f"the run in {directory} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return finished_rows(directory, steps)


def cpu_s(rows: Sequence[dict[str, Any]]) -> float:
    """Returns the CPU seconds of all processes from the end of the first step to the end."""
    first, last = rows[1]["metrics"], rows[-1]["metrics"]
    return float(last["cpu_seconds"] - first["cpu_seconds"])


def measure_quickstart(nodes: Nodes, short: bool) -> list[Claim]:
    steps = SHORT_STEPS if short else STEPS
    ways = {"four": nodes.overrides(), "one": [f"cluster.devices={NODES}"]}
    pairs, accuracy = [], []
    for number in range(1 if short else 3):
        spent_s = {}
        hashes = {}
        # The second of two is not always the same one: what the first has warmed helps it.
        for way in sorted(ways, reverse=bool(number % 2)):
            directory = nodes.folder / f"{way}-{number}"
            seed = (f"run.seed={number}", *(SMALL if short else ()))
            rows = trained(nodes, directory, steps, *ways[way], *seed)
            hashes[way] = weights_sha256(directory / "weights")
            spent_s[way] = cpu_s(rows)
            if way == "four" and not short:
                accuracy.append(rows[-1]["evaluation"]["greedy/exact"])
            nodes.tell(f"quickstart {number}, {way}: {spent_s[way]:.1f} CPU seconds")
        if len(set(hashes.values())) != 1:
            sys.exit(f"four nodes and one have made different weights: {hashes}")
        pairs.append((spent_s["four"], spent_s["one"]))
    name = "quickstart_four_nodes_over_one_cpu_seconds"
    claims = [
        repeated(name, pairs, median_ratio, "ratio", 1.25, "<="),
        Claim("quickstart_weights_compared", len(pairs), "pairs of runs, equal in every bit"),
    ]
    if accuracy:
        claims.append(Claim("accuracy_after_min", min(accuracy), "share, greedy", 0.9))
    return claims


# -- bytes between nodes ---------------------------------------------------------------------------

#: A way of bulk_rates.py -> what its claims are called.
_WAYS = {
    "new": "pull_tls",
    "pull": "pull_full_store_tls",
    "bare": "bare_tls",
}


def measure_bulk(nodes: Nodes, short: bool) -> list[Claim]:
    reader, sender = nodes.all[:2]
    # The sender takes the other node's network alone: both sides see one shared memory here.
    at = sender.network_command([])
    rounds = []
    for _ in range(1 if short else 5):
        with reader.network():
            rounds.append(
                bulk_rates.measure(
                    make_identity(),
                    sender.address,
                    at,
                    nbytes=(32 if short else 256) << 20,
                    n_rounds=1 if short else 3,
                )
            )
        nodes.tell(f"bulk: {rounds[-1]['pull_gb_per_s']:.2f} GB/s over TLS")

    def of(name: str, key: str, unit: str, bar: float | None = None) -> Claim:
        return repeated(name, [figures[key] for figures in rounds], statistics.median, unit, bar)

    return [
        of("pull_tls_over_raw_tls", "new_over_bare", "ratio", 0.8),
        of("pull_full_store_tls_over_raw_tls", "pull_over_bare", "ratio"),
        *(of(f"{name}_gb_per_second", f"{way}_gb_per_s", "GB/s") for way, name in _WAYS.items()),
        *(
            repeated(
                f"{name}_cpu_s_per_gb",
                [
                    figures[f"{way}_sender_cpu_s_per_gb"] + figures[f"{way}_reader_cpu_s_per_gb"]
                    for figures in rounds
                ],
                statistics.median,
                "CPU-s/GB, both sides",
            )
            for way, name in _WAYS.items()
        ),
    ]


def measure_calls(nodes: Nodes, short: bool) -> list[Claim]:
    asker, answerer = nodes.all[:2]
    order = {
        "address": f"tls:{answerer.address}:29500",
        "secret": secrets.token_bytes(32),
        "identity": make_identity(),
    }
    process = nodes.begin_inside(answerer, "answer", **order)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        sys.exit(f"nobody answers on {answerer.name}; see what it wrote above")
    rounds = nodes.inside(
        asker, "ask", rounds=1 if short else 5, calls=200 if short else 2000, **order
    )
    process.communicate()  # its standard input ends, and so does it
    medians = [median for median, _ in rounds]
    return [repeated("small_call_tls_ms", medians, statistics.median, "ms", 0.25, "<=")]


def measure_push(nodes: Nodes, short: bool) -> list[Claim]:
    nbytes = 20_000_000 if short else 100_000_000
    rounds = nodes.inside(
        nodes.all[0], "push", rounds=1 if short else 5, nbytes=nbytes, **nodes.on_all()
    )
    name = "push_bytes_per_node_over_model"
    return [
        repeated(name, rounds, median_ratio, "ratio", 1.02, "<="),
        Claim("push_receivers_verified", 4 * len(rounds), "receivers with the trainer's bytes"),
    ]


# -- faults ----------------------------------------------------------------------------------------


class Watched:
    """A quickstart on four nodes whose lines are read as they come.

    directory: the run's.
    step: the newest that it has made.
    """

    def __init__(self, nodes: Nodes, directory: Path, *overrides: str) -> None:
        self.directory = directory
        self.step = 0
        self._home = nodes.all[0]
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        self._printed: list[str] = []
        every = ("run.steps=100000", "checkpoint.every=1", "checkpoint.restarts=100")
        self.process: subprocess.Popen[str] = nodes.all[0].start(
            nodes.run_words(
                directory, *every, "evaluation.every=0", *nodes.overrides(), *overrides
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put((time.time(), line))
        self._lines.put((time.time(), ""))

    def line(self, told: re.Pattern[str]) -> float:
        """Waits for the next line that has this; returns when it came, unix time."""
        while True:
            try:
                came_s, line = self._lines.get(timeout=WAIT_S)
            except queue.Empty:
                line = ""
            if not line:
                sys.exit(f"the run ended or hangs:\n{''.join(self._printed[-20:])}")
            self._printed.append(line)
            if found := _STEP.match(line):
                self.step = int(found[1])
            if told.search(line):
                return came_s

    def next_step(self) -> float:
        """Waits for a step that was not made before; returns when it was told, unix time."""
        before = self.step
        while True:
            came_s = self.line(_STEP)
            if self.step > before:
                return came_s

    def logged(self, since_s: float) -> float:
        """Returns when the supervisor's log first told of a lost node after a moment, unix time."""
        at_s = 0.0
        for line in (self.directory / "logs" / "supervisor.log").read_text().splitlines():
            if stamp := _STAMP.match(line):
                whole_s = time.mktime(time.strptime(stamp[1], "%Y-%m-%d %H:%M:%S"))
                at_s = whole_s + int(stamp[2]) / 1000
            if at_s >= since_s and _LOST.search(line):
                return at_s
        sys.exit(f"the log of {self.directory} does not say that a node is lost")

    def kill(self) -> None:
        """Kills the run's own processes on its node; all others are to end with them."""
        self._home.run(["pkill", "-KILL", "-f", "gcore_core run"], check=False)
        self.process.wait()
        self._reader.join()


def measure_faults(nodes: Nodes, short: bool) -> list[Claim]:
    again_s, noticed_s, printed_s, ended_s = [], [], [], []
    for number in range(1 if short else 3):
        run = Watched(nodes, nodes.folder / f"faults-{number}", *(SMALL if short else ()))
        run.next_step()
        run.next_step()
        killed, cut = nodes.all[3], nodes.all[2]
        began_s = time.time()
        killed.run(["pkill", "-KILL", "-f", "gcore_nodes.agent"])
        run.line(_LOST)
        again_s.append(run.next_step() - began_s)
        nodes.tell(f"round {number}: the agent killed, {again_s[-1]:.1f} s to the next step")
        run.next_step()
        cut.link_down()
        began_s = time.time()
        while left := left_on(cut):
            if time.time() > began_s + LEFT_S:
                sys.exit(f"{cut.name} is cut off, and these do not end: {left}")
            time.sleep(0.1)
        ended_s.append(time.time() - began_s)
        printed_s.append(run.line(_LOST) - began_s)
        noticed_s.append(run.logged(began_s) - began_s)
        cut.link_up()
        run.kill()
        nodes.tell(
            f"round {number}: the link cut, noticed after {noticed_s[-1]:.1f} s, printed after "
            f"{printed_s[-1]:.1f} s, ended there after {ended_s[-1]:.1f} s"
        )

    def median(name: str, values: list[float], bar: float | None = None) -> Claim:
        return repeated(name, values, statistics.median, "s", bar, "<=")

    return [
        median("link_cut_noticed_s", noticed_s, 15.0),
        median("link_cut_ended_s", ended_s, 15.0),
        median("link_cut_printed_s", printed_s),
        median("node_killed_to_training_again_s", again_s),
    ]


# -- all of it -------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Nodes, bool], list[Claim]]] = {
    "start": measure_start,
    "bulk": measure_bulk,
    "calls": measure_calls,
    "push": measure_push,
    "quickstart": measure_quickstart,
    "faults": measure_faults,
}


@contextlib.contextmanager
def nodes_of(tell: Tell) -> Iterator[Nodes]:
    """Makes the nodes and a folder, and removes both. Ends where they cannot be made."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    # All processes of the nodes inherit these: the model of ``push`` lies beside this file.
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with contextlib.ExitStack() as stack:
        place = tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(place))
        try:
            made = stack.enter_context(machines(NODES, shm_mib=SHM_MIB))
        except RuntimeError as error:
            sys.exit(f"this cannot be measured here: {error}")
        yield Nodes(made, folder, tell)


def measure(parts: Sequence[str], short: bool) -> list[Claim]:
    """Returns the claims of these parts, and what they have left behind."""
    began_s = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - began_s:4.0f} s] {text}", file=sys.stderr, flush=True)

    claims: list[Claim] = []
    n_left = 0
    with nodes_of(tell) as nodes:
        for part in parts:
            claims += PARTS[part](nodes, short)
            left = nodes.left_behind()
            n_left += len(left)
            tell(f"{part} is measured; left behind: {left or 'nothing'}")
    name = "left_behind_on_any_node"
    claims.append(Claim(name, n_left, "processes, files, sockets", 0, "<="))
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--short", action="store_true", help="one round of everything, and small")
    args = parser.parse_args()
    return publish("machines", measure(args.parts, args.short), args, DISTRIBUTIONS)


if __name__ == "__main__":
    sys.exit(main())
