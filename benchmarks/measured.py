"""Says which benchmarks there are, how each is run, and which files it measures.

A result is stale when one of these files is no longer as it was when the result was measured, but
for comments and docstrings. The digest of the files says so, and not the commit alone: it is the
same after a rebase, in a clone without history, and it changes with a file that is not committed
yet.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

#: What a run is made of. Contracts and fakes for tests, calls from Python and other commands than
#: `g-core run` change no result.
CORE = tuple(
    f"gcore_core/{part}"
    for part in (
        "builtin",
        "cli/run.py",
        "config",
        "contract",
        "controllers",
        "kits",
        "run",
        "runtime",
    )
)
TORCH = ("plugins/gcore-torch/gcore_torch", "plugins/gcore-language/gcore_language")
ALGORITHMS = "plugins/gcore-algorithms/gcore_algorithms"
BALANCE = "plugins/gcore-balance/gcore_balance"
PLACEMENT = "plugins/gcore-placement/gcore_placement"
QUEUEING = "plugins/gcore-queueing/gcore_queueing"
SIM = "plugins/gcore-sim/gcore_sim"
SENTINEL = "plugins/gcore-sentinel/gcore_sentinel"
CONTEXT = "plugins/gcore-context/gcore_context"
MUSEUM = "plugins/gcore-museum/gcore_museum"
TEACHER = "plugins/gcore-teacher/gcore_teacher"
NODES = "plugins/gcore-nodes/gcore_nodes"
GENERATORS = ("plugins/gcore-vllm/gcore_vllm", "plugins/gcore-sglang/gcore_sglang")
TRAINERS = ("plugins/gcore-megatron/gcore_megatron", "plugins/gcore-deepspeed/gcore_deepspeed")
QUICKSTART = ("recipes/quickstart.yaml", "recipes/quickstart", ALGORITHMS, *TORCH)
QUICKSTART_RUNS = "benchmarks/quickstart_runs.py"
OFFLINE = (
    "plugins/gcore-offline/gcore_offline",
    "recipes/chain/answers.py",
    "benchmarks/offline_runs.py",
    QUICKSTART_RUNS,
)
REAL = (
    *CORE,
    *TORCH,
    PLACEMENT,
    QUEUEING,
    "plugins/gcore-genrm/gcore_genrm",
    "benchmarks/countdown.py",
)

SCRIPT = "{python} benchmarks/{script}.py --out {out}"
VERL = "{python} -m tox run -e bench-verl -- --out {out} --parts"
ENGINES = "{python} tests/engines/suites.py --create"


#: Benchmarks whose parts ``parts.py`` runs.
_OF_PARTS = ("asynchronous", "large", "roles")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A script whose result lies in ``benchmarks/results``.

    name: of the result.
    of: ``benchmarks/<of>.py`` is the script; "": it has the result's name. Parts of a long one that
        are measured each by itself have results of their own.
    measures: files and folders, from the root of the checkout; the script is always one of them.
    commands: run in this order; the last writes the result to ``{out}``.
    minutes: about how long it takes on two quiet cores; only used until a result says it.
    timed: a busy machine would change what it says; others may run beside one another.
    on_gpu: it is left alone on machines without a GPU.
    """

    name: str
    of: str = ""
    measures: tuple[str, ...]
    commands: tuple[str, ...] = (SCRIPT,)
    minutes: float = 1.0
    timed: bool = True
    on_gpu: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """Everything that makes the result what it is: the script and what it measures."""
        parts = ("benchmarks/parts.py",) if self.of in _OF_PARTS else ()
        return (f"benchmarks/{self.script}.py", *parts, *self.measures)

    @property
    def script(self) -> str:
        """The name of the script, without its ending."""
        return self.of or self.name

    @property
    def result(self) -> Path:
        """Where the result lies."""
        return RESULTS / f"{self.name}.json"

    @property
    def last_s(self) -> float | None:
        """The seconds that it took last time; None: no result says it."""
        if not self.result.exists():
            return None
        took_s = json.loads(self.result.read_text()).get("took_s")
        return None if took_s is None else float(took_s)

    @property
    def expected_s(self) -> float:
        """The seconds that it takes: those of the last time, or else about so many."""
        return self.minutes * 60 if self.last_s is None else self.last_s


BENCHMARKS = (
    Benchmark(name="house", measures=("gcore_core", "plugins"), minutes=0.5),
    Benchmark(
        name="asynchronous_emulated",
        of="asynchronous",
        measures=(
            *CORE,
            "benchmarks/asynchronous_emulated.py",
            "benchmarks/windowed_fifo.py",
            "plugins/gcore-async/gcore_async",
            "plugins/gcore-sim/gcore_sim",
        ),
        commands=(f"{SCRIPT} --parts emulated",),
        minutes=15,
    ),
    Benchmark(
        name="asynchronous_moving",
        of="asynchronous",
        measures=(
            *CORE,
            PLACEMENT,
            QUEUEING,
            SIM,
            "benchmarks/asynchronous_moving.py",
            "benchmarks/placement_emulated.py",
            "plugins/gcore-async/gcore_async",
        ),
        commands=(f"{SCRIPT} --parts moving",),
        minutes=10,
        timed=False,
    ),
    Benchmark(
        name="asynchronous_canaries",
        of="asynchronous",
        measures=(
            *CORE,
            "benchmarks/asynchronous_canaries.py",
            "tests/support/stale_replicas.py",
            "plugins/gcore-async/gcore_async",
            "plugins/gcore-sentinel/gcore_sentinel",
        ),
        commands=(f"{SCRIPT} --parts canaries",),
        minutes=3,
        timed=False,
    ),
    Benchmark(
        name="asynchronous_quickstart",
        of="asynchronous",
        measures=(
            *CORE,
            *QUICKSTART,
            QUICKSTART_RUNS,
            "benchmarks/asynchronous_quickstart.py",
            "plugins/gcore-async/gcore_async",
        ),
        commands=(f"{SCRIPT} --parts quickstart",),
        minutes=30,
    ),
    Benchmark(
        name="report_page",
        measures=(
            "plugins/gcore-report/gcore_report",
            "gcore_core/contract/run_files.py",
            "tests/support/chromium.py",
            "tests/support/page_runs.py",
        ),
        minutes=3,
    ),
    Benchmark(
        name="roles_lora",
        of="roles",
        measures=(
            *CORE,
            *QUICKSTART,
            QUICKSTART_RUNS,
            "benchmarks/roles_lora.py",
            "gcore_core/testing/contracts/agreement.py",
            "gcore_core/testing/contracts/weights.py",
        ),
        commands=(f"{SCRIPT} --parts lora",),
        minutes=8,
        timed=False,
    ),
    Benchmark(
        name="large_plan",
        of="large",
        measures=("plugins/gcore-language", "plugins/gcore-torch", "benchmarks/large_plan.py"),
        commands=(f"{SCRIPT} --parts plan",),
        minutes=2,
        timed=False,
    ),
    Benchmark(name="startup", measures=("gcore_core",), minutes=0.5),
    Benchmark(name="back_to_work", measures=(*CORE, *QUICKSTART), minutes=11),
    Benchmark(
        name="machines",
        measures=(
            *CORE,
            NODES,
            *QUICKSTART,
            QUICKSTART_RUNS,
            "benchmarks/machines_inside.py",
            "benchmarks/bulk_rates.py",
            "benchmarks/weight_push.py",
            "tests/support/machines.py",
            "tests/support/remote_shell.py",
        ),
        minutes=29,
    ),
    Benchmark(
        name="machines_ray",
        of="machines",
        measures=(
            *CORE,
            NODES,
            "plugins/gcore-ray/gcore_ray",
            *QUICKSTART,
            QUICKSTART_RUNS,
            "benchmarks/machines_ray.py",
            "benchmarks/machines_ray_inside.py",
            "tests/support/machines.py",
            "tests/support/ray_alive.py",
            "tests/support/ray_nodes.py",
            "tests/support/remote_shell.py",
        ),
        commands=(f"{ENGINES} --engines ray", f"{SCRIPT} --parts ray object_store"),
        minutes=20,
    ),
    Benchmark(
        name="roles_refined",
        of="roles",
        measures=(
            *CORE,
            *QUICKSTART,
            QUICKSTART_RUNS,
            "plugins/gcore-refine/gcore_refine",
            "benchmarks/roles_refined.py",
        ),
        commands=(f"{SCRIPT} --parts refined",),
        minutes=12,
        timed=False,
    ),
    Benchmark(
        name="rewards",
        measures=(
            "plugins/gcore-rewards/gcore_rewards",
            "gcore_core/kits/answers.py",
            "gcore_core/kits/number_words.py",
            "gcore_core/kits/numbers.py",
            "benchmarks/math_verify_cases.json",
            "tests/unit/number_spellings.jsonl",
        ),
        minutes=1,
    ),
    Benchmark(
        name="balance",
        measures=(BALANCE, "plugins/gcore-language/gcore_language/lockstep.py"),
        minutes=1,
    ),
    Benchmark(name="handover", measures=("gcore_core/runtime",), minutes=0.3),
    Benchmark(name="weight_push", measures=("gcore_core/runtime",), minutes=3),
    Benchmark(
        name="gpu",
        measures=(*TORCH, "benchmarks/gpu_large.py", "recipes/quickstart.yaml"),
        minutes=12,
        on_gpu=True,
    ),
    Benchmark(name="swap", measures=(*TORCH, PLACEMENT, QUEUEING, SIM), minutes=6),
    Benchmark(name="checkpoint", measures=("gcore_core/run", *TORCH), minutes=7),
    Benchmark(
        name="placement_sim",
        measures=(PLACEMENT, QUEUEING, SIM, BALANCE, "benchmarks/vllm_steps.json"),
        minutes=12,
        timed=False,
    ),
    Benchmark(
        name="lending",
        measures=(
            SIM,
            "gcore_core/controllers/placement/lending.py",
            "gcore_core/controllers/window/deadlines.py",
            "gcore_core/controllers/window/dealing.py",
        ),
        minutes=1.5,
        timed=False,
    ),
    Benchmark(
        name="protocol_sim",
        measures=(*CORE, "gcore_core/testing", "benchmarks/protocol_mutants.py"),
        minutes=8.5,
    ),
    Benchmark(
        name="protocol_async",
        measures=(
            *CORE,
            "gcore_core/testing",
            "plugins/gcore-async/gcore_async",
            "benchmarks/protocol_sim.py",
            "benchmarks/protocol_mutants.py",
            "benchmarks/protocol_async_mutants.py",
        ),
        minutes=16,
    ),
    Benchmark(
        name="digits",
        measures=(
            *CORE,
            "recipes/digits.yaml",
            "recipes/digits",
            "plugins/gcore-diffusion/gcore_diffusion",
        ),
        minutes=3,
    ),
    Benchmark(
        name="quickstart",
        measures=(*CORE, *QUICKSTART, QUICKSTART_RUNS, "benchmarks/trl_quickstart.py"),
        commands=("{python} -m tox run -e bench-trl -- --out {out}",),
        minutes=10,
    ),
    Benchmark(
        name="real_model",
        measures=(
            *CORE,
            *TORCH,
            ALGORITHMS,
            "plugins/gcore-offline/gcore_offline",
            "recipes/smollm2",
            QUICKSTART_RUNS,
            "benchmarks/decode_real.py",
            "benchmarks/trl_real_model.py",
            "benchmarks/plain_real_model.py",
        ),
        commands=(
            "{python} -m tox run -e bench-trl --notest",
            f"{SCRIPT} --trl-python .tox/bench-trl/bin/python",
        ),
        minutes=40,
    ),
    Benchmark(
        name="checkpoint_convergence", measures=(*CORE, *QUICKSTART, QUICKSTART_RUNS), minutes=6
    ),
    Benchmark(
        name="controllers",
        measures=(*CORE, SIM),
        commands=(f"{SCRIPT} --parts payloads sizes numbers skew",),
        minutes=6.5,
    ),
    Benchmark(
        name="controllers_readers",
        of="controllers",
        measures=(
            *CORE,
            SIM,
            "benchmarks/verl_controller.py",
            "benchmarks/verl_rival.py",
            "benchmarks/verl_transferqueue.py",
        ),
        commands=(f"{VERL} readers",),
        minutes=11,
    ),
    Benchmark(
        name="controllers_saturation",
        of="controllers",
        measures=(
            *CORE,
            SIM,
            "benchmarks/saturation.py",
            "benchmarks/strangers.py",
            "benchmarks/user_code.py",
        ),
        commands=(f"{SCRIPT} --parts saturation",),
        minutes=25,
    ),
    *(
        Benchmark(
            name=f"proved_{part}",
            of="proved",
            measures=(*CORE, *QUICKSTART, QUICKSTART_RUNS),
            commands=(f"{SCRIPT} --parts {part}",),
            minutes=minutes,
            timed=part == "time",
        )
        for part, minutes in (("hashes", 60), ("time", 15))
    ),
    Benchmark(
        name="proved_sentinel",
        of="proved",
        measures=(
            "gcore_core/contract/sentinel.py",
            "gcore_core/controllers/watching.py",
            "plugins/gcore-sentinel/gcore_sentinel",
            GENERATORS[0],
            *QUICKSTART,
            QUICKSTART_RUNS,
            "benchmarks/bf16_pair.py",
            "benchmarks/sentinel_trials.py",
        ),
        commands=(f"{ENGINES} --engines vllm", f"{SCRIPT} --parts sentinel"),
        minutes=11,
    ),
    Benchmark(
        name="proved_engines",
        of="proved",
        measures=(
            *CORE,
            *QUICKSTART,
            QUICKSTART_RUNS,
            *GENERATORS,
            *TRAINERS,
            "benchmarks/same_bits.py",
        ),
        commands=(ENGINES, f"{SCRIPT} --parts engines"),
        minutes=20,
        timed=False,
    ),
    Benchmark(
        name="proved_museum",
        of="proved",
        measures=(*CORE, ALGORITHMS, *TORCH, SENTINEL, MUSEUM),
        commands=(f"{SCRIPT} --parts museum",),
        minutes=5,
        timed=False,
    ),
    Benchmark(
        name="roles_distilled",
        of="roles",
        measures=(*CORE, TEACHER, *QUICKSTART, QUICKSTART_RUNS, "benchmarks/roles_distilled.py"),
        commands=(f"{SCRIPT} --parts distilled",),
        minutes=8,
        timed=False,
    ),
    Benchmark(name="placement_emulated", measures=(*CORE, PLACEMENT, QUEUEING, SIM), minutes=8),
    Benchmark(name="placement_real", measures=REAL, minutes=18),
    Benchmark(
        name="placement_real_vllm",
        measures=("benchmarks/placement_real.py", *REAL, GENERATORS[0]),
        commands=(f"{ENGINES} --engines vllm", SCRIPT),
        minutes=20,
    ),
    Benchmark(
        name="engine_overhead",
        measures=(*CORE, *TORCH, *GENERATORS, "benchmarks/bare_engines.py"),
        commands=(f"{ENGINES} --engines vllm sglang", SCRIPT),
        minutes=6,
    ),
    Benchmark(
        name="engine_pairs",
        measures=(*CORE, *QUICKSTART, *GENERATORS, *TRAINERS),
        commands=(ENGINES, SCRIPT),
        minutes=6,
    ),
    Benchmark(
        name="roles_ppo",
        of="roles",
        measures=(
            *CORE,
            *QUICKSTART,
            QUICKSTART_RUNS,
            "benchmarks/roles_ppo.py",
            "plugins/gcore-critic/gcore_critic",
        ),
        commands=(f"{SCRIPT} --parts ppo",),
        minutes=10,
        timed=False,
    ),
    Benchmark(
        name="roles_dpo",
        of="roles",
        measures=(
            *CORE,
            *QUICKSTART,
            *OFFLINE,
            "benchmarks/roles_dpo.py",
        ),
        commands=(f"{SCRIPT} --parts dpo",),
        minutes=8,
        timed=False,
    ),
    Benchmark(
        name="roles_reward_model",
        of="roles",
        measures=(
            *CORE,
            *QUICKSTART,
            *OFFLINE,
            "benchmarks/roles_reward_model.py",
        ),
        commands=(f"{SCRIPT} --parts reward_model",),
        minutes=9,
        timed=False,
    ),
    Benchmark(
        name="roles_sft",
        of="roles",
        measures=(
            *CORE,
            *QUICKSTART,
            *OFFLINE,
            "benchmarks/roles_sft.py",
            "benchmarks/trl_sft.py",
        ),
        commands=(
            "{python} -m tox run -e bench-trl --notest",
            f"{SCRIPT} --parts sft --trl-python .tox/bench-trl/bin/python",
        ),
        minutes=8,
    ),
    Benchmark(
        name="large_load",
        of="large",
        measures=(
            *CORE,
            *TORCH,
            "benchmarks/anonymous_memory.py",
            "benchmarks/large_load.py",
        ),
        commands=(f"{SCRIPT} --parts load",),
        minutes=8,
    ),
    Benchmark(
        name="large_logprobs",
        of="large",
        measures=(
            *CORE,
            *TORCH,
            "benchmarks/anonymous_memory.py",
            "benchmarks/large_logprobs.py",
        ),
        commands=(f"{SCRIPT} --parts logprobs",),
        minutes=1,
        timed=False,
    ),
    Benchmark(
        name="large_sleep",
        of="large",
        measures=(
            *CORE,
            *TORCH,
            "benchmarks/anonymous_memory.py",
            "benchmarks/large_load.py",
            "benchmarks/large_sleep.py",
        ),
        commands=(f"{SCRIPT} --parts sleep",),
        minutes=4,
    ),
    Benchmark(
        name="large_context",
        of="large",
        measures=(
            CONTEXT,
            "plugins/gcore-language/gcore_language/policy.py",
            "plugins/gcore-language/gcore_language/packing.py",
            "benchmarks/anonymous_memory.py",
            "benchmarks/large_context.py",
        ),
        commands=(f"{SCRIPT} --parts context",),
        minutes=8,
    ),
    Benchmark(
        name="large_whole",
        of="large",
        measures=(
            *CORE,
            ALGORITHMS,
            *TORCH,
            QUICKSTART_RUNS,
            "benchmarks/large_whole.py",
        ),
        commands=(f"{SCRIPT} --parts whole",),
        minutes=10,
    ),
    Benchmark(
        name="large_moe",
        of="large",
        measures=(*TORCH, "benchmarks/large_moe.py"),
        commands=(f"{SCRIPT} --parts moe",),
        minutes=4,
        timed=False,
    ),
)


def digest(paths: Iterable[str], root: Path = ROOT) -> str:
    """Returns what the tracked files under ``paths`` hash to, names included, as they lie there.

    Of Python only what runs is hashed: another comment, docstring or line break changes nothing.
    """
    listing = _git(root, "ls-files", "-z", "--", *paths)
    names = sorted(name for name in listing.split("\0") if name and (root / name).is_file())
    total = hashlib.sha256()
    for name in names:
        content = (root / name).read_bytes()
        hashed = what_runs(content) if name.endswith(".py") else content
        total.update(hashlib.sha256(hashed).digest())
        total.update(name.encode() + b"\0")
    return total.hexdigest()[:16]


@lru_cache(maxsize=4096)
def what_runs(source: bytes) -> bytes:
    """Returns Python's source without comments, docstrings and layout; as it is if it has none.

    A string that stands alone in a statement runs nothing; where it was all of a block, ``pass``
    stands for it.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not _is_text(line)] or [ast.Pass()]
    return ast.unparse(tree).encode()


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a string and nothing else."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def uncommitted(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """Returns the tracked files under ``paths`` that differ from HEAD."""
    listing = _git(root, "diff", "--name-only", "HEAD", "--", *paths)
    return listing.splitlines()


def _git(root: Path, *words: str) -> str:
    """Returns what git prints in ``root``."""
    return subprocess.run(
        ["git", *words], cwd=root, capture_output=True, text=True, check=True
    ).stdout
