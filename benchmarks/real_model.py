"""Compares training a real pretrained model with TRL: speed, memory, start; and with plain torch.

    python benchmarks/real_model.py [--json] [--check] [--rounds 3] [--steps 2] [--parts ...]
                                    [--trl-python .tox/bench-trl/bin/python] [--keep FOLDER]
                                    [--vllm-python PYTHON]

The model is SmolLM2-135M-Instruct, which ``recipes/smollm2/smollm2.py`` makes once, in the cache
where ``g-core run`` looks for it. In each round both sides train one after the other on one
machine, TRL first in every second round: the same rows, reward, group, batch, learning rate and
lengths, one update a step, float32, and no evaluation. TRL (trl_real_model.py) has an environment
of its own: ``tox run -e bench-trl --notest``.

grpo    the job recipes/smollm2/notes.yaml on whole weights: 4 prompts x 8 answers
lora    the same on adapters of rank 16 on all linear layers; in TRL by peft
sft     supervised fine-tuning on 8 rows of 60 to 140 tokens
dpo     DPO on 8 pairs of such rows, with the reference computed in each step on both sides
memory  peak resident memory in the runs of ``grpo``, summed over a side's processes
start   seconds from the start of the program to the first step, in the runs of ``grpo``
gap     the largest difference of a log-prob between generator and trainer, of ``grpo``, ``lora``
plain   our trainer of ``sft`` against a loop of plain torch on the same rows (plain_real_model.py)
decode  what decode_real.py measures of the generator

Measured are ``--steps`` steps after the first: samples, tokens or pairs over the processor seconds
of *all* processes, and over seconds of the clock. Tokens are all of a row's, padding apart.

``X_over_trl`` is G-Core as it comes (``threads: auto``) over TRL with one thread or with as many as
the machine has cores, whichever is better in this measure. ``X_over_trl_one_thread`` compares one
thread with one thread, and ``X_over_trl_each_best`` takes the better number of threads on both
sides. TRL's process changes its threads at each step, so that each number has ``--steps`` steps.

Where it can be, the result is checked: TRL gave as many answers, as long; the tokens of a step are
the same; both sides' first loss on the same rows is the same; rewards are finite.

With ``--keep`` each run that ended lies in a folder, and a second call goes on where the first one
stopped; it must be of the same code. ``--out`` is written after each part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml
from quickstart_runs import finished_rows
from report import Claim, add_options, interval, publish, report_of

from gcore_core.config.plan import load_plan
from gcore_core.run.make_model import make_model, models_cache

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/smollm2/notes.yaml"
CORES = os.cpu_count() or 1
WATCH_S = 0.5  # between two looks at a run's memory
DISTRIBUTIONS = ["gcore-core", "gcore-torch", "torch", "transformers"]

#: How far both sides' first loss on the same rows may differ, in nats.
LOSS_TOLERANCE = 1e-3
#: How far apart the mean lengths of both sides' answers may lie, as a ratio: both are drawn.
LENGTH_TOLERANCE = 2.0

SFT_ROWS, DPO_ROWS = 8, 8
OFFLINE = {"sft": "offline/sft", "dpo": "offline/pairs"}
#: The beginning of answers; sentences follow, so that rows have different lengths.
SENTENCES = (
    "it is never far from a quiet road.",
    "people come home to it at night and leave again before the morning light.",
    "it is small and warm.",
    "in the old days nobody had time for it, and yet it was always there under the trees.",
    "the water is blue.",
    "a hand is open and slow to close again.",
)


@dataclass(kw_only=True)
class Run:
    """What one side did with one number of threads in one round, without its first step.

    threads: "auto", or a number of them.
    units: samples, tokens or pairs.
    cpu_s: seconds of the processor, of all processes. trainer_cpu_s: of the trainer alone.
    wall_s: seconds of the clock.
    peak_rss_mib, peak_pss_mib: the largest sum over all processes; a page that several share counts
        for each of them in the first, and once in the second.
    start_s: from the start of the program to its first step.
    answers, answer_tokens: that were sampled.
    rewards: mean of each step.
    first_loss: of the first step.
    gap: largest difference of a log-prob between generator and trainer.
    versions: of TRL's environment.
    """

    threads: str
    units: float
    cpu_s: float
    wall_s: float
    trainer_cpu_s: float = 0.0
    peak_rss_mib: float = 0.0
    peak_pss_mib: float = 0.0
    start_s: float = 0.0
    answers: float = 0.0
    answer_tokens: float = 0.0
    rewards: list[float] = field(default_factory=list)
    first_loss: float = 0.0
    gap: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)


#: A round of a part: name of a side and its threads -> its run.
Round = dict[str, Run]
AUTO, ONE = "ours-auto", "ours-1"


class Bench:
    """Runs the parts by G-Core, by TRL and in plain torch.

    folder: where runs lie.
    trl_python: an interpreter that has TRL; None: there is none.
    steps: that are measured, after the first.
    model: a directory; None: the recipe's, which is made where it is missing.
    vllm_python: an interpreter that has vLLM, for ``decode``; None: there is none.
    """

    def __init__(
        self,
        folder: Path,
        trl_python: Path | None,
        steps: int,
        model: Path | None,
        vllm_python: Path | None = None,
    ) -> None:
        self._folder = folder
        self._trl_python = trl_python
        self.vllm_python = vllm_python
        self._steps = steps
        make = load_plan(RECIPE, []).config["roles"]["policy"]["model"]["make"]
        self.model = model or make_model(make, models_cache(), _say)
        self._rounds: dict[tuple[str, int], Round] = {}

    def round(self, part: str, number: int) -> Round:
        """Returns a round of a part; measured once."""
        if (part, number) not in self._rounds:
            self._rounds[part, number] = self._measured(part, number)
        return self._rounds[part, number]

    def _measured(self, part: str, number: int) -> Round:
        turns: list[tuple[str, Callable[[], list[Run]]]] = [
            (AUTO, lambda: [self._ours(part, number, "auto")]),
            (ONE, lambda: [self._ours(part, number, "1")]),
        ]
        if self._trl_python is not None:
            turns.insert(0 if number % 2 else 2, ("trl", lambda: self._trl(part, number)))
        found: Round = {}
        for name, run in turns:
            for one in self._kept(f"{part}-{number}-{name}", run):
                found[f"{name.partition('-')[0]}-{one.threads}"] = one
        check(part, found)
        return found

    def _kept(self, name: str, run: Callable[[], list[Run]]) -> list[Run]:
        """Returns what an earlier call has measured, or measures it and keeps it."""
        file = self._folder / f"{name}.json"
        if not file.exists():
            began_s = time.monotonic()
            load = os.getloadavg()[0]
            content = json.dumps([asdict(one) for one in run()], indent=2)
            beside = file.with_suffix(".part")
            beside.write_text(content)
            beside.replace(file)
            took_s = time.monotonic() - began_s
            print(f"{name}: {took_s:.0f} s, load before it {load:.1f}", file=sys.stderr, flush=True)
        return msgspec.json.decode(file.read_bytes(), type=list[Run])

    def _plan(self, part: str, name: str, threads: str) -> tuple[list[str], dict[str, Any]]:
        """Returns the arguments of ``g-core run`` and the plan that they resolve to."""
        directory = self._folder / name
        if part in OFFLINE:
            job = directory.with_suffix(".yaml")
            job.write_text(yaml.safe_dump(self._offline_job(part)))
            changes = []
        else:
            job = RECIPE
            changes = [
                f"data.config.path={self._notes()}",
                "evaluation.every=0",
                "evaluation.data=null",
                "plugins=[]",
                "controller.config.minibatches=1",
                f"roles.policy.model={{path: {self.model}}}",
                f"roles.rollout.config.threads={threads}",
            ]
            if part == "grpo":
                changes += [
                    "roles.policy.config.lora.rank=0",
                    "roles.policy.config.learning_rate=1e-5",
                ]
        changes += [
            f"run.dir={directory}",
            f"run.steps={1 + self._steps}",
            f"roles.policy.config.threads={threads}",
        ]
        return [str(job), *changes], load_plan(job, changes).config

    def _notes(self) -> Path:
        """Writes the prompts of one step: so every step of both sides has the same ones."""
        source = RECIPE.with_name("notes_train.jsonl").read_text().splitlines()
        prompts = load_plan(RECIPE, []).config["controller"]["config"]["prompts"]
        file = self._folder / "notes.jsonl"
        file.write_text("\n".join(source[:prompts]) + "\n")
        return file

    def _offline_job(self, part: str) -> dict[str, Any]:
        """Writes the rows of one step and returns the job that trains on them."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model)
        draw = random.Random(0)
        rows = []
        notes = RECIPE.with_name("notes_train.jsonl").read_text().splitlines()
        for line in notes[: SFT_ROWS if part == "sft" else DPO_ROWS]:
            prompt = tokenizer.apply_chat_template(
                json.loads(line)["prompt"], add_generation_prompt=True, tokenize=False
            )
            answers = [" ".join(draw.choices(SENTENCES, k=draw.randint(1, 5))) for _ in range(2)]
            names = ("completion",) if part == "sft" else ("chosen", "rejected")
            rows.append({"prompt": prompt, **dict(zip(names, answers, strict=False))})
        data = self._folder / f"{part}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = "offline/chat" if part == "sft" else "offline/pairs"
        return {
            "run": {"name": part, "seed": 7},
            "controller": {
                "use": OFFLINE[part],
                "config": {"prompts": len(rows), "minibatches": 1},
            },
            "data": {"use": dataset, "config": {"path": str(data)}},
            "objective": {"use": f"offline/{part}"},
            "roles": {
                "policy": {
                    "use": "torch",
                    "model": {"path": str(self.model)},
                    "config": {"learning_rate": 1e-5 if part == "sft" else 1e-6},
                },
                "rollout": {"use": "offline"},
            },
        }

    def _units(self, part: str, plan: dict[str, Any]) -> float:
        """Returns how many samples, tokens or pairs a step trains on."""
        prompts = plan["controller"]["config"]["prompts"]
        if part == "sft":
            return self.tokens(plan["data"]["config"]["path"])
        return float(prompts if part == "dpo" else prompts * group_size(plan))

    def tokens(self, data: str) -> float:
        """Returns the tokens of all rows of supervised fine-tuning, ends included."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model)
        rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
        texts = [row[name] for row in rows for name in ("prompt", "completion")]
        encoded = tokenizer(texts, add_special_tokens=False).input_ids
        return float(sum(map(len, encoded)) + len(rows))

    # -- the sides ---------------------------------------------------------------------------------

    def _ours(self, part: str, number: int, threads: str) -> Run:
        """Trains by ``g-core run``."""
        name = f"{part}-{number}-ours-{threads}"
        arguments, plan = self._plan(part, name, threads)
        began_unix_s = time.time()
        log = self._folder / f"{name}.log"
        command = [sys.executable, "-m", "gcore_core", "run", *arguments]
        peaks = self._watched(command, log, environment(None))
        rows = finished_rows(self._folder / name, plan["run"]["steps"])
        steps = [row["metrics"] for row in rows[1:]]
        first, last = steps[0], steps[-1]
        answers = 0.0 if part in OFFLINE else self._units(part, plan)
        return Run(
            threads=threads,
            units=self._units(part, plan) * self._steps,
            cpu_s=last["cpu_seconds"] - first["cpu_seconds"],
            trainer_cpu_s=last["cpu_seconds/policy.0"] - first["cpu_seconds/policy.0"],
            wall_s=float(rows[-1]["time_unix_s"] - rows[1]["time_unix_s"]),
            peak_rss_mib=peaks[0],
            peak_pss_mib=peaks[1],
            start_s=rows[0]["time_unix_s"] - began_unix_s,
            answers=answers * len(steps[1:]),
            answer_tokens=0.0 if part in OFFLINE else sum(m["length"] for m in steps[1:]) * answers,
            rewards=[] if part in OFFLINE else [m["reward"] for m in steps],
            first_loss=first["loss"] if part in OFFLINE else 0.0,
            gap=0.0 if part in OFFLINE else max(m["logprob_gap_max"] for m in steps),
        )

    def _trl(self, part: str, number: int) -> list[Run]:
        """Trains by TRL; returns a run for one thread and one for all cores."""
        name = f"{part}-{number}-trl"
        _, plan = self._plan(part, f"{part}-{number}-settings", "auto")
        threads = [CORES, *(sorted({1, CORES}) * self._steps)]
        settings = trl_settings(part, plan, threads)
        log = self._folder / f"{name}.log"
        command = [str(self._trl_python), str(ROOT / "benchmarks/trl_real_model.py")]
        command += [str(self.model), str(self._folder / name), json.dumps(settings)]
        began_unix_s = time.time()
        peaks = self._watched(command, log, environment(CORES))
        last = [line for line in log.read_text().splitlines() if line.startswith('{"first_')][-1]
        result = json.loads(last)
        found = []
        for count in sorted(set(threads)):
            steps = [step for step in result["steps"][1:] if step["threads"] == count]
            found.append(
                Run(
                    threads=str(count),
                    units=self._units(part, plan) * len(steps),
                    cpu_s=sum(step["cpu_s"] for step in steps),
                    wall_s=sum(step["wall_s"] for step in steps),
                    peak_rss_mib=peaks[0],
                    peak_pss_mib=peaks[1],
                    start_s=result["first_step_unix_s"] - began_unix_s,
                    answers=sum(step["answers"] for step in steps),
                    answer_tokens=sum(step["answer_tokens"] for step in steps),
                    rewards=[r for step in steps for r in step["rewards"]],
                    first_loss=result["steps"][0]["logs"]["loss"],
                    versions=result["versions"],
                )
            )
            if part == "sft":
                check_tokens(result["steps"], self._units(part, plan))
        return found

    def plain(self, number: int) -> tuple[float, float]:
        """Returns the tokens per processor second of our trainer and of plain torch, one thread."""
        name = f"plain-{number}"
        _, plan = self._plan("sft", f"{name}-settings", "1")
        trainer = plan["roles"]["policy"]["config"]
        settings = {
            "data": plan["data"]["config"]["path"],
            "steps": 1 + self._steps,
            **{key: trainer[key] for key in ("learning_rate", "betas", "weight_decay")},
        }

        def measured() -> list[Run]:
            log = self._folder / f"{name}.log"
            command = [sys.executable, str(ROOT / "benchmarks/plain_real_model.py")]
            command += [str(self.model), json.dumps(settings)]
            self._watched(command, log, environment(1))
            steps = json.loads(log.read_text().splitlines()[-1])
            cpu_s = sum(step["cpu_s"] for step in steps[1:])
            tokens = sum(step["tokens"] for step in steps[1:])
            loss = steps[0]["loss"]
            return [Run(threads="1", units=tokens, cpu_s=cpu_s, wall_s=0.0, first_loss=loss)]

        (plain,) = self._kept(name, measured)
        ours = self.round("sft", number)[ONE]
        require(plain.units == ours.units, f"plain torch had {plain.units} tokens, {ours.units}")
        check_loss("plain torch", plain.first_loss, ours.first_loss)
        return ours.units / ours.trainer_cpu_s, plain.units / plain.cpu_s

    def _watched(
        self, command: Sequence[str], log: Path, variables: dict[str, str]
    ) -> tuple[float, float]:
        """Runs a command to its end; returns the peaks of its memory in MiB, as in ``Run``."""
        with log.open("wb") as file:
            process = subprocess.Popen(command, env=variables, stdout=file, stderr=file)
        peaks = (0.0, 0.0)
        root = psutil.Process(process.pid)
        while process.poll() is None:
            now = memory_mib(root)
            peaks = (max(peaks[0], now[0]), max(peaks[1], now[1]))
            time.sleep(WATCH_S)
        if process.returncode:
            text = log.read_text()[-2000:]
            sys.exit(f"{' '.join(command)[:300]} ended with {process.returncode}:\n{text}")
        return peaks


def _say(share: float, text: str) -> None:
    print(f"{share:4.0%} {text}", file=sys.stderr, flush=True)


def environment(threads: int | None) -> dict[str, str]:
    """Returns the variables of a run; threads: None: a run chooses itself."""
    found = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    found |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
    return found if threads is None else {**found, "OMP_NUM_THREADS": str(threads)}


def memory_mib(root: psutil.Process) -> tuple[float, float]:
    """Returns the sums of RSS and of PSS of a process and its descendants, now."""
    rss = pss = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                info = process.memory_full_info()
                rss += info.rss / 2**20
                pss += info.pss / 2**20
    return rss, pss


def group_size(plan: dict[str, Any]) -> int:
    return int(plan["advantage"]["config"]["group_size"])


def trl_settings(part: str, plan: dict[str, Any], threads: Sequence[int]) -> dict[str, Any]:
    """Returns what trl_real_model.py takes, read from the plan of our run.

    Ends the benchmark where TRL cannot do the same.
    """
    trainer = plan["roles"]["policy"]["config"]
    steps = plan["controller"]["config"]
    require(steps["epochs"] == steps["minibatches"] == 1, "one update a step")
    require(trainer["schedule"] == "constant", "a constant learning rate")
    require(trainer["warmup_updates"] == 0, "no warm-up")
    require(trainer["dtype"] == "float32", "float32")
    settings = {
        "program": part if part in OFFLINE else "grpo",
        "data": plan["data"]["config"]["path"],
        "threads": list(threads),
        "batch": steps["prompts"],
        "seed": plan["run"]["seed"],
        **{key: trainer[key] for key in ("learning_rate", "betas", "weight_decay")},
        "clip_grad_norm": trainer["clip_grad_norm"],
    }
    if part == "dpo":
        settings["beta"] = plan["objective"]["config"]["beta"]
    if part in OFFLINE:
        return settings
    loss = plan["objective"]["config"]
    require(loss["clip_low"] == loss["clip_high"], "one clip for both sides")
    lora = trainer["lora"]
    return settings | {
        "batch": steps["prompts"] * group_size(plan),
        "group_size": group_size(plan),
        "max_new_tokens": plan["roles"]["rollout"]["config"]["max_new_tokens"],
        "clip": loss["clip_low"],
        "reward": plan["rewards"]["kept"]["config"],
        "lora": {"rank": lora["rank"], "alpha": lora["alpha"]} if lora["rank"] else None,
    }


# -- checks ----------------------------------------------------------------------------------------


def require(holds: bool, what: str) -> None:
    """Ends the benchmark where both sides do not do the same."""
    if not holds:
        sys.exit(f"the sides do not do the same: {what}")


def check(part: str, found: Round) -> None:
    """Ends the benchmark where the runs of a round did not do the same work."""
    trl = [run for name, run in found.items() if name.startswith("trl")]
    ours = [found[AUTO], found[ONE]]
    for run in (*ours, *trl):
        require(all(map(math.isfinite, run.rewards)), f"{part}: rewards are not finite")
    for run in trl:
        if part in OFFLINE:
            check_loss(f"{part}: TRL", run.first_loss, ours[0].first_loss)
            continue
        require(
            run.answers == run.units, f"{part}: TRL gave {run.answers} answers of {run.units:.0f}"
        )
        lengths = [one.answer_tokens / one.answers for one in (run, ours[0])]
        require(
            max(lengths) <= LENGTH_TOLERANCE * min(lengths),
            f"{part}: answers have {lengths[0]:.1f} tokens in TRL, {lengths[1]:.1f} here",
        )


def check_loss(who: str, other: float, ours: float) -> None:
    require(
        abs(other - ours) <= LOSS_TOLERANCE,
        f"{who} begins with a loss of {other:.5f}, G-Core with {ours:.5f}",
    )


def check_tokens(steps: Sequence[dict[str, Any]], a_step: float) -> None:
    """Ends the benchmark where TRL's steps of fine-tuning had other tokens; it counts them up."""
    counted = [step["logs"]["num_tokens"] for step in steps]
    require(
        counted == [a_step * (place + 1) for place in range(len(counted))],
        f"TRL counted {counted[0]:.0f} tokens in its first step, and rows have {a_step:.0f}",
    )


# -- claims ----------------------------------------------------------------------------------------


def rate(rounds: Sequence[Round], name: str, seconds: str) -> float:
    """Returns units per second of all rounds together. seconds: ``cpu_s`` or ``wall_s``."""
    runs = [found[name] for found in rounds]
    return sum(run.units for run in runs) / sum(getattr(run, seconds) for run in runs)


def best(rounds: Sequence[Round], side: str, seconds: str) -> float:
    """Returns a side's rate with the number of threads that is best for it."""
    return max(rate(rounds, name, seconds) for name in rounds[0] if name.startswith(side))


def has_trl(rounds: Sequence[Round]) -> bool:
    return any(name.startswith("trl") for name in rounds[0])


def over(name: str, rounds: Sequence[Round], seconds: str, bar: float) -> list[Claim]:
    """Returns the claims of our rate over TRL's; see the head of this file."""

    def as_it_comes(some: Sequence[Round]) -> float:
        return rate(some, AUTO, seconds) / best(some, "trl", seconds)

    def one_thread(some: Sequence[Round]) -> float:
        return rate(some, ONE, seconds) / rate(some, "trl-1", seconds)

    def each_best(some: Sequence[Round]) -> float:
        return best(some, "ours", seconds) / best(some, "trl", seconds)

    def claim(end: str, ratio: Callable[[Sequence[Round]], float], bar: float | None) -> Claim:
        value = ratio(rounds)
        return Claim(f"{name}{end}", value, "ratio", bar, interval=interval(rounds, ratio))

    return [
        claim("", as_it_comes, bar),
        claim("_one_thread", one_thread, None),
        claim("_each_best", each_best, None),
    ]


def rates(part: str, what: str, rounds: Sequence[Round]) -> list[Claim]:
    """Returns the rates themselves, of each side and number of threads, and the memory."""
    claims = []
    for name in rounds[0]:
        end = f"{part}_{name.replace('-', '_')}"
        cpu, wall = (rate(rounds, name, seconds) for seconds in ("cpu_s", "wall_s"))
        claims += [
            Claim(f"{what}_per_cpu_second_{end}", cpu, f"{what}/CPU-s"),
            Claim(f"{what}_per_second_{end}", wall, f"{what}/s"),
        ]
    for side, names in (("ours", (AUTO,)), ("trl", ("trl-1",))):
        for name in set(names) & rounds[0].keys():
            peak = max(found[name].peak_rss_mib for found in rounds)
            claims.append(Claim(f"peak_memory_mib_{part}_{side}", peak, "MiB, all processes"))
    return claims


def of_training(part: str, what: str, bar: float) -> Callable[[Bench, int], list[Claim]]:
    """Returns what measures a part that both sides train."""

    def measure(bench: Bench, count: int) -> list[Claim]:
        rounds = [bench.round(part, number) for number in range(count)]
        claims = []
        if has_trl(rounds):
            claims = over(f"{part}_{what}_per_cpu_second_over_trl", rounds, "cpu_s", bar)
        if has_trl(rounds) and part == "grpo":
            claims += over("grpo_wall_over_trl_best", rounds, "wall_s", 3.0)
        return claims + rates(part, what, rounds)

    return measure


def measure_memory(bench: Bench, count: int) -> list[Claim]:
    rounds = [bench.round("grpo", number) for number in range(count)]
    if not has_trl(rounds):
        return []

    def ratio(kind: str) -> float:
        return max(getattr(found[AUTO], kind) for found in rounds) / max(
            getattr(found["trl-1"], kind) for found in rounds
        )

    unit = "ratio of sums over processes"
    return [
        Claim("peak_memory_over_trl", ratio("peak_rss_mib"), unit, 0.6, "<="),
        Claim("peak_memory_over_trl_shared_pages_once", ratio("peak_pss_mib"), unit),
    ]


def measure_start(bench: Bench, count: int) -> list[Claim]:
    rounds = [bench.round("grpo", number) for number in range(count)]
    names = {"start_to_first_step_s": AUTO, "trl_start_to_first_step_s": "trl-1"}
    return [
        Claim(claim, statistics.median(found[name].start_s for found in rounds), "s")
        for claim, name in names.items()
        if name in rounds[0]
    ]


def measure_gap(bench: Bench, count: int) -> list[Claim]:
    runs = [
        bench.round(part, number)[name]
        for part in ("grpo", "lora")
        for number in range(count)
        for name in (AUTO, ONE)
    ]
    return [Claim("logprob_gap_max", max(run.gap for run in runs), "nats", 1e-4, "<=")]


def measure_plain(bench: Bench, count: int) -> list[Claim]:
    pairs = [bench.plain(number) for number in range(count)]

    def ratio(some: Sequence[tuple[float, float]]) -> float:
        return statistics.mean(a for a, _ in some) / statistics.mean(b for _, b in some)

    unit = "tokens/CPU-s, one thread"
    value = ratio(pairs)
    return [
        Claim("training_over_plain_torch", value, "ratio", 1.0, interval=interval(pairs, ratio)),
        Claim("training_tokens_per_cpu_second", statistics.mean(a for a, _ in pairs), unit),
        Claim("plain_torch_tokens_per_cpu_second", statistics.mean(b for _, b in pairs), unit),
    ]


def measure_decode(bench: Bench, count: int) -> list[Claim]:
    """Takes the claims of decode_real.py."""
    script = ROOT / "benchmarks/decode_real.py"
    command = [sys.executable, str(script), str(bench.model), "--rounds", str(count), "--json"]
    if bench.vllm_python is not None:
        command += ["--vllm-python", str(bench.vllm_python)]
    done = subprocess.run(
        command, env=environment(1), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{script.name} ended with {done.returncode}")
    claims = json.loads(done.stdout)["claims"]
    for claim in claims:
        claim["interval"] = tuple(claim["interval"]) if "interval" in claim else None
    return [Claim(**claim) for claim in claims if claim["name"].startswith("decode_")]


#: Part -> what measures it, given the number of rounds. Those of ``grpo`` share its runs.
PARTS: dict[str, Callable[[Bench, int], list[Claim]]] = {
    "grpo": of_training("grpo", "samples", 3.5),
    "lora": of_training("lora", "samples", 3.0),
    "sft": of_training("sft", "tokens", 1.2),
    "dpo": of_training("dpo", "pairs", 1.2),
    "memory": measure_memory,
    "start": measure_start,
    "decode": measure_decode,
    "gap": measure_gap,
    "plain": measure_plain,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="measured, after the first")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".tox/bench-trl/bin/python")
    parser.add_argument("--vllm-python", type=Path, help="an interpreter with vLLM, for decode")
    parser.add_argument("--model", type=Path, help="another directory with a model that chats")
    parser.add_argument("--keep", type=Path, help="a folder in which runs stay, to go on later")
    add_options(parser)
    args = parser.parse_args()
    trl_python = args.trl_python if args.trl_python.exists() else None
    if trl_python is None:
        print(f"{args.trl_python} is not there: TRL is not compared with", file=sys.stderr)
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if args.keep is None else args.keep.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        trl, vllm = (path and path.absolute() for path in (trl_python, args.vllm_python))
        bench = Bench(folder, trl, args.steps, args.model, vllm)
        for part in args.parts:
            claims += PARTS[part](bench, args.rounds)
            if args.out is not None:  # what was measured is kept if a later part is interrupted
                report = report_of("real_model", claims, DISTRIBUTIONS)
                args.out.write_text(json.dumps(report, indent=2) + "\n")
    return publish("real_model", claims, args, DISTRIBUTIONS)


if __name__ == "__main__":
    sys.exit(main())
