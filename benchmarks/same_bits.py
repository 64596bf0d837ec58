"""What engines' own deterministic modes give, for ``proved.py --parts engines``.

    python benchmarks/same_bits.py GENERATOR MODEL MODE       # one generator, in its own venv

Every engine is tried with its mode off and on. A generator answers the same requests alone, beside
others, and beside the same others in reverse; then it is paired with the torch trainer, as a
trainer is with the torch generator, in short runs of the quickstart in float32. On means
``run.deterministic: true`` and the engine's own mode, where it has one. Nothing here runs on CUDA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_pairs import interpreter
from quickstart_runs import RECIPE, environment, finished_rows, overrides_of
from report import Claim

from gcore_core.run.export import weights_sha256

MODES = ("off", "on")
LIMIT_S = 600
#: Of several lengths.
PROMPTS = tuple(f"{'7+3+8+5+2'[: 1 + 2 * (i % 5)]}+{i}=" for i in range(20))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine and what turns its own mode on.

    role: "rollout" or "policy".
    variables: of the environment.
    repeating: the provider that repeats its bits; "": that of the engine's name, with its mode on.
    overrides: of the recipe, in either mode.
    """

    role: str
    variables: Mapping[str, str] = field(default_factory=dict)
    repeating: str = ""
    overrides: tuple[str, ...] = ()


GENERATORS = {
    "torch": Engine(role="rollout"),
    "vllm": Engine(
        role="rollout",
        variables={"VLLM_BATCH_INVARIANT": "1"},
        overrides=("roles.rollout.config.kv_cache_gib=0.1",),
    ),
    "sglang": Engine(role="rollout", repeating="sglang/deterministic"),
}
#: Megatron's mode follows run.deterministic; DeepSpeed has none.
TRAINERS = {name: Engine(role="policy") for name in ("torch", "megatron", "deepspeed")}


class Engines:
    """Measures engines, with runs in a folder.

    seed: of the runs, and of the model that they begin with.
    changes: overrides of every run.
    """

    def __init__(self, folder: Path, steps: int, seed: int, changes: Sequence[str]) -> None:
        self._folder = folder
        self._steps = steps
        self._seed = seed
        self._changes = changes

    def generator(self, name: str, mode: str, model: Path) -> list[Claim]:
        """Measures a generator in one mode. model: directory of the model that it loads."""
        engine = GENERATORS[name]
        title = f"{name}_generator_{mode}"
        python = sys.executable if name == "torch" else interpreter(name)
        variables = engine.variables if mode == "on" else {}
        process = subprocess.run(
            [python, __file__, name, str(model), mode],
            env={**environment(self._folder), **_sources(), **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        if process.returncode:
            return [_refused(title, process.stdout + process.stderr)]
        told = json.loads(process.stdout.splitlines()[-1])
        claims = [
            Claim(f"{title}_starts", 1, "of 1"),
            Claim(f"{title}_same_in_a_batch", told["batch"], "of samples"),
            Claim(f"{title}_same_in_another_place", told["place"], "of samples"),
            Claim(f"{title}_drawn_again", told["drawn"], "of samples"),
        ]
        if "gap" in told:
            claims.append(Claim(f"{title}_batch_gap", told["gap"], "nats"))
        layouts = {"1": (), "again": (), "2_replicas": ("roles.rollout.slots=2",)}
        return [*claims, *self._runs(title, name, "torch", mode, layouts)]

    def trainer(self, name: str, mode: str) -> list[Claim]:
        """Measures a trainer in one mode."""
        layouts = {"1": (), "again": (), "2_ranks": ("roles.policy.slots=2",)}
        return self._runs(f"{name}_trainer_{mode}", "torch", name, mode, layouts)

    def _runs(
        self,
        title: str,
        generator: str,
        trainer: str,
        mode: str,
        layouts: Mapping[str, tuple[str, ...]],
    ) -> list[Claim]:
        """Runs a pair in several layouts; returns how many hashes there were and the gap."""
        hashes: dict[str, str] = {}
        gaps: list[float] = []
        moved: list[int] = []
        for layout, changes in layouts.items():
            directory = self._folder / f"{title}-{layout}"
            problem = self._run(directory, generator, trainer, mode, changes)
            if problem:
                print(f"{title}, {layout}: {problem}", file=sys.stderr, flush=True)
                continue
            hashes[layout] = weights_sha256(directory / "weights")
            rows = finished_rows(directory, self._steps)
            trained = [row["metrics"] for row in rows[1:] if row["metrics"]]
            gaps += [metrics["logprob_gap_max"] for metrics in trained]
            moved.append(sum(metrics["grad_norm"] > 0 for metrics in trained))
            print(f"{hashes[layout]}  {title}, {layout}", file=sys.stderr, flush=True)
        claims = []
        (other,) = set(layouts) - {"1", "again"}
        for name, pair in (("two_runs", ("1", "again")), (other, ("1", other))):
            if all(layout in hashes for layout in pair):
                count = len({hashes[layout] for layout in pair})
                claims.append(Claim(f"{title}_hashes_{name}", count, "hashes"))
        if gaps:
            claims.append(Claim(f"{title}_logprob_gap_max", max(gaps), "nats"))
            claims.append(Claim(f"{title}_steps_that_moved", min(moved), f"of {self._steps}"))
        return claims

    def _run(
        self, directory: Path, generator: str, trainer: str, mode: str, changes: Sequence[str]
    ) -> str:
        """Runs a pair; returns the end of what it said where it failed, else nothing."""
        chosen = {"rollout": GENERATORS[generator], "policy": TRAINERS[trainer]}
        words = [
            *overrides_of(self._seed, directory),
            f"run.steps={self._steps}",
            f"run.deterministic={str(mode == 'on').lower()}",
            "plugins=[]",
            "cluster.devices=3",
            "evaluation.every=0",
            "controller.config.prompts=8",
            "advantage.config.group_size=4",
        ]
        variables: dict[str, str] = {}
        for role, name in (("rollout", generator), ("policy", trainer)):
            engine = chosen[role]
            use = engine.repeating if mode == "on" and engine.repeating else name
            words += [f"roles.{role}.use={use}", *engine.overrides]
            if name != "torch":
                words.append(f"roles.{role}.python=venv:{name}")
            if mode == "on":
                variables |= engine.variables
        command = ["-m", "gcore_core", "run", str(RECIPE), *words, *self._changes, *changes]
        process = subprocess.run(
            [sys.executable, *command],
            env={**environment(self._folder), **_sources(), **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        return _end_of(process.stdout + process.stderr) if process.returncode else ""


def measure(
    folder: Path,
    engines: Sequence[str],
    steps: int,
    seed: int,
    changes: Sequence[str],
    model: Path,
) -> list[Claim]:
    """Measures engines in both modes. model: a directory for generators to load."""
    claims = []
    runs = Engines(folder, steps, seed, changes)
    for name in engines:
        for mode in MODES:
            if name in GENERATORS:
                claims += runs.generator(name, mode, model)
            if name in TRAINERS and name != "torch":
                claims += runs.trainer(name, mode)
    return claims


def _sources() -> dict[str, str]:
    """Lets engines' venvs import the code beside this file, whatever is installed in them."""
    root = Path(__file__).parents[1]
    paths = [root, *sorted(path.parent for path in root.glob("plugins/*/pyproject.toml"))]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def _refused(title: str, output: str) -> Claim:
    print(f"{title} does not start: {_end_of(output)}", file=sys.stderr, flush=True)
    return Claim(f"{title}_starts", 0, "of 1")


def _end_of(output: str) -> str:
    return output.strip()[-1500:]


# -- in the engine's venv ------------------------------------------------------------------------


def answer(name: str, model: str, mode: str) -> dict[str, float]:
    """Returns what a generator gives alone, beside others, and beside them in reverse.

    batch, place: shares of greedy samples with the same tokens and the same bits of all log-probs
        beside others as alone, and as in the other order.
    gap: largest difference of a log-prob between alone and beside others, of greedy samples with
        the same tokens, in nats; not there where no tokens are the same.
    drawn: share of samples that are drawn again, tokens and log-probs, by the same seed.
    """
    from gcore_language.testing import requests_of, run

    generator = _open(name, model, mode)

    def answers(some: Sequence[Any]) -> dict[tuple[int, int], tuple[bytes, Any]]:
        return {
            (f.request.ordinal, f.request.sample): (
                f.columns["action_ids"].tobytes(),
                f.columns["logp"],
            )
            for f in run(generator, some)
        }

    greedy = requests_of(PROMPTS, 1, greedy=True)
    together = answers(greedy)
    reverse = answers(greedy[::-1])
    alone = {key: value for request in greedy for key, value in answers([request]).items()}
    drawn = requests_of(PROMPTS, 2)
    first, second = answers(drawn), answers(drawn)
    generator.close()
    gaps = [
        float(abs(alone[key][1] - together[key][1]).max())
        for key in alone
        if alone[key][0] == together[key][0]
    ]
    shares = {
        "batch": _same(alone, together),
        "place": _same(together, reverse),
        "drawn": _same(first, second),
    }
    return shares | ({"gap": max(gaps)} if gaps else {})


def _same(a: Mapping[Any, tuple[bytes, Any]], b: Mapping[Any, tuple[bytes, Any]]) -> float:
    """Returns the share of samples with the same tokens and the same bits of all log-probs."""
    equal = 0
    for key, (tokens, logp) in a.items():
        equal += tokens == b[key][0] and logp.tobytes() == b[key][1].tobytes()
    return equal / len(a)


def _open(name: str, model: str, mode: str) -> Any:
    from gcore_core.contract.context import WorkerContext

    context = WorkerContext(
        role="rollout",
        model={"path": model},
        deterministic=mode == "on",
        directory=tempfile.mkdtemp(),  # an engine writes its log there
    )
    settings: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8}
    if name == "vllm":
        from gcore_vllm.config import VllmGeneratorConfig
        from gcore_vllm.engine import VllmGenerator

        return VllmGenerator(VllmGeneratorConfig(kv_cache_gib=0.05, **settings), context)
    if name == "sglang":
        from gcore_sglang.config import SglangGeneratorConfig
        from gcore_sglang.deterministic import DeterministicSglangGenerator
        from gcore_sglang.engine import SglangGenerator

        make = DeterministicSglangGenerator if mode == "on" else SglangGenerator
        return make(SglangGeneratorConfig(**settings), context)
    from gcore_torch.config import TorchGeneratorConfig
    from gcore_torch.generator import TorchGenerator

    return TorchGenerator(TorchGeneratorConfig(**settings), context)


if __name__ == "__main__":
    try:
        told = answer(*sys.argv[1:4])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of an engine may hold up the end of the process
    print(json.dumps(told), flush=True)
    os._exit(0)
