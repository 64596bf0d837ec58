"""Says which benchmarks there are, how each is run, and which files it measures.

A result is stale when one of these files is no longer as it was when the result was measured. The
digest of the files says so, and not the commit alone: it is the same after a rebase, in a clone
without history, and it changes with a file that is not committed yet.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

CORE = "gcore_core"
TORCH = ("plugins/gcore-torch/gcore_torch", "plugins/gcore-language/gcore_language")
ALGORITHMS = "plugins/gcore-algorithms/gcore_algorithms"
BALANCE = "plugins/gcore-balance/gcore_balance"
PLACEMENT = "plugins/gcore-placement/gcore_placement"
QUEUEING = "plugins/gcore-queueing/gcore_queueing"
SIM = "plugins/gcore-sim/gcore_sim"
GENERATORS = ("plugins/gcore-vllm/gcore_vllm", "plugins/gcore-sglang/gcore_sglang")
TRAINERS = ("plugins/gcore-megatron/gcore_megatron", "plugins/gcore-deepspeed/gcore_deepspeed")
QUICKSTART = ("recipes/quickstart.yaml", "recipes/quickstart", ALGORITHMS, *TORCH)

SCRIPT = "{python} benchmarks/{name}.py --out {out}"
ENGINES = "{python} tests/engines/suites.py --create"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A script whose result lies in ``benchmarks/results``.

    name: of the result; ``benchmarks/<name>.py`` is the script.
    measures: files and folders, from the root of the checkout; the script is always one of them.
    commands: run in this order; the last writes the result to ``{out}``.
    """

    name: str
    measures: tuple[str, ...]
    commands: tuple[str, ...] = (SCRIPT,)

    @property
    def paths(self) -> tuple[str, ...]:
        """Everything that makes the result what it is: the script and what it measures."""
        return (f"benchmarks/{self.name}.py", *self.measures)

    @property
    def result(self) -> Path:
        """Where the result lies."""
        return RESULTS / f"{self.name}.json"


BENCHMARKS = (
    Benchmark(name="house", measures=(CORE, "plugins")),
    Benchmark(name="startup", measures=(CORE,)),
    Benchmark(
        name="rewards",
        measures=("plugins/gcore-rewards/gcore_rewards", "benchmarks/math_verify_cases.json"),
    ),
    Benchmark(name="balance", measures=(BALANCE,)),
    Benchmark(name="handover", measures=(f"{CORE}/runtime",)),
    Benchmark(name="weight_push", measures=(f"{CORE}/runtime",)),
    Benchmark(name="swap", measures=(*TORCH, PLACEMENT, QUEUEING, SIM)),
    Benchmark(name="checkpoint", measures=(f"{CORE}/run", *TORCH)),
    Benchmark(name="placement_sim", measures=(PLACEMENT, QUEUEING, SIM, BALANCE)),
    Benchmark(name="protocol_sim", measures=(CORE, "benchmarks/protocol_mutants.py")),
    Benchmark(
        name="digits",
        measures=(
            CORE,
            "recipes/digits.yaml",
            "recipes/digits",
            "plugins/gcore-diffusion/gcore_diffusion",
        ),
    ),
    Benchmark(
        name="quickstart",
        measures=(CORE, *QUICKSTART, "benchmarks/trl_quickstart.py"),
        commands=("{python} -m tox run -e bench-trl -- --out {out}",),
    ),
    Benchmark(name="checkpoint_convergence", measures=(CORE, *QUICKSTART)),
    Benchmark(
        name="controllers",
        measures=(CORE, SIM, "benchmarks/verl_controller.py"),
        commands=("{python} -m tox run -e bench-verl -- --out {out}",),
    ),
    Benchmark(name="placement_emulated", measures=(CORE, PLACEMENT, QUEUEING, SIM)),
    Benchmark(
        name="engine_overhead",
        measures=(CORE, *TORCH, *GENERATORS, "benchmarks/bare_engines.py"),
        commands=(ENGINES, SCRIPT),
    ),
    Benchmark(
        name="engine_pairs",
        measures=(CORE, *QUICKSTART, *GENERATORS, *TRAINERS),
        commands=(ENGINES, SCRIPT),
    ),
)


def digest(paths: Iterable[str], root: Path = ROOT) -> str:
    """Returns what the tracked files under ``paths`` hash to, names included, as they lie there."""
    listing = _git(root, "ls-files", "-z", "--", *paths)
    names = sorted(name for name in listing.split("\0") if name and (root / name).is_file())
    total = hashlib.sha256()
    for name in names:
        blob = (root / name).read_bytes()
        total.update(hashlib.sha256(blob).digest())
        total.update(name.encode() + b"\0")
    return total.hexdigest()[:16]


def digest_at(commit: str, paths: Iterable[str], root: Path = ROOT) -> str:
    """Returns the digest that ``paths`` had at a commit; "" where the commit is not known."""
    try:
        listing = _git(root, "ls-tree", "-r", "-z", "--name-only", commit, "--", *paths)
    except subprocess.CalledProcessError:
        return ""
    total = hashlib.sha256()
    for name in sorted(name for name in listing.split("\0") if name):
        blob = subprocess.run(
            ["git", "show", f"{commit}:{name}"], cwd=root, capture_output=True, check=True
        ).stdout
        total.update(hashlib.sha256(blob).digest())
        total.update(name.encode() + b"\0")
    return total.hexdigest()[:16]


def uncommitted(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """Returns the tracked files under ``paths`` that differ from HEAD."""
    listing = _git(root, "diff", "--name-only", "HEAD", "--", *paths)
    return listing.splitlines()


def _git(root: Path, *words: str) -> str:
    """Returns what git prints in ``root``."""
    return subprocess.run(
        ["git", *words], cwd=root, capture_output=True, text=True, check=True
    ).stdout
