"""Measures what is promised of a run that is to repeat, and of a run with a fault in it.

    python benchmarks/proved.py [--json] [--check] [--parts hashes time sentinel museum]
                                [--steps 30] [--cases ...] [--minutes 6] [--generators ...]

The parts hashes and time run recipes as a person does, with ``run.deterministic=true``: the
quickstart, where nothing else is said.

hashes: 24 runs that differ in what must leave no trace: number of controllers, replicas and trainer
    ranks, launcher, kills, and a resume at another size. ``distinct_weight_hashes`` counts the
    SHA-256 of their final weights. ``torch_pair_gap_max`` is the largest difference between
    rollout's and trainer's log-prob of an action, over all runs and steps, in nats.
    ``distinct_episode_weight_hashes`` is the same count for runs of the recipe calculator, in which
    also the processes of environments differ in number, are killed, or sleep at random. Theirs is
    ``episode_pair_gap_max``: a generator reads turns as a prompt, which a trainer reads as actions,
    and the two are rounded in their own ways.

time: ``deterministic_time_over_default`` is the median, over rounds that run both ways one after
    the other, of the ratio of seconds from the end of the first step to the end of the last. It
    needs a machine on which nothing else runs. The same ratios of processor time, of all processes
    (``deterministic_cpu_over_default``), of the trainer and of the generator, need less of that.

sentinel: how the sequential test does in bfloat16 on torch with torch, and on vLLM with torch
    (``sentinel_trials.py``), each in a process on one core, at the same time. The second needs the
    venv of vLLM; ``--generators torch`` does without. ``false_alarms_in_1e7_healthy_bf16_tokens``
    counts the alarms of both, each of which would have ended a healthy run; each pair has an equal
    share of the tokens. ``healthy_bf16_tokens_sampled`` says how many of these tokens were sampled
    in the ``--minutes`` that this may take, ``..._sampled_vllm`` how many of those by vLLM. The
    others are drawn anew from them. ``detection_delay_tokens_median`` is over all planted faults,
    versions and pairs, in tokens of the replica that is wrong. A fault that was not found counts
    with all of its tokens. ``spot_check_...`` say what the trainer's log-probs in float32 would
    show that those in bfloat16 do not.

museum: all exhibits of tests/museum, each a fault that was reported in public, in a run of its own.
    ``real_faults_found_within_one_step`` counts the faults whose run ended with an error of ours
    before the step after the one in which they acted first had ended, ``faults_named_share`` those
    whose error has the class and the words that the exhibit expects. ``quiet_controls`` counts the
    exhibits without a fault whose run went to its end.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from engine_pairs import interpreter
from quickstart_runs import (
    RECIPE,
    finished_rows,
    make_policy,
    overrides_of,
    require_success,
    start,
    wall_s,
)
from report import Claim, add_options, publish, repeated

from gcore_core.config.plan import load_plan
from gcore_core.run.saved_weights import weights_sha256

if TYPE_CHECKING:
    import sentinel_trials  # with torch, which the other parts do without

ROOT = Path(__file__).parents[1]
SEED = 7
#: Seeds of the sentinel's policies, of their teaching and of their prompts. The shipped tables have
#: others.
SENTINEL_SEEDS = (7, 1)
#: Healthy tokens that the sentinels judge, over all pairs.
SENTINEL_TOKENS = 10_000_000
WAIT_S = 3600.0
#: Metric, in seconds of processor time since a run began -> its word in the claims of part time.
PROCESSOR_S = {
    "cpu_seconds": "cpu",
    "cpu_seconds/policy.0": "trainer_cpu",
    "cpu_seconds/rollout.0": "generator_cpu",
}
#: Processes that are killed, or stopped, in turn.
VICTIMS = ("rollout.0", "controller.0", "policy.0", "scorer.0")
CALCULATOR = RECIPE.parent / "calculator.yaml"
#: The calculator, which takes its time.
SLOW = f"{ROOT}/benchmarks/slow_calculator.py:Slow"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the matrix.

    controllers, replicas, ranks: how many there are of each.
    inline: whether it is all in one process.
    faults: how many processes are killed or stopped on the way.
    victims: which, in turn; "host" is a process of environments, "supervisor" the run's own.
    stop_after: all processes are ended after this step, and the run is resumed; 0: it is not.
    stopped_by: the signal that ends them.
    resumed: what is changed when it is resumed.
    recipe: that is run.
    changes: further overrides.
    """

    name: str
    controllers: int = 2
    replicas: int = 1
    ranks: int = 1
    inline: bool = False
    faults: int = 0
    victims: tuple[str, ...] = VICTIMS
    stop_after: int = 0
    stopped_by: int = signal.SIGKILL
    resumed: tuple[str, ...] = ()
    recipe: Path = RECIPE
    changes: tuple[str, ...] = ()

    def overrides(self) -> list[str]:
        """Returns the overrides of the recipe."""
        layout = {
            "controller.shards": self.controllers,
            "roles.rollout.slots": self.replicas,
            "roles.policy.slots": self.ranks,
            # resumed runs may grow
            "cluster.devices": max(self.ranks + self.replicas, 7 if self.stop_after else 2),
            "launcher.use": "core/inline" if self.inline else "core/local",
            "checkpoint.every": 1 if self.faults or self.stop_after else 0,
            "checkpoint.restarts": self.faults,
        }
        if self.faults:
            layout["run.patience_s"] = 10.0
        return [*(f"{key}={value}" for key, value in layout.items()), *self.changes]


def _of_episodes(name: str, *changes: str, **fields: Any) -> Case:
    """Returns a run of the calculator; one in trouble waits less long for its environment."""
    changes = ("environment.config.turn_s=8", *changes)
    return Case(name=f"calculator: {name}", recipe=CALCULATOR, changes=changes, **fields)


def _resumed(after: int, *changes: str) -> Case:
    name = "resumed after {} with {}".format(after, " ".join(changes) or "the same")
    return Case(name=name, stop_after=after, resumed=changes)


CASES = (
    *(Case(name=f"{n} controllers", controllers=n) for n in (1, 2, 4, 8)),
    *(Case(name=f"{n} replicas", replicas=n) for n in (2, 3)),
    *(Case(name=f"{n} ranks", ranks=n) for n in (2, 4)),
    Case(name="inline", inline=True, controllers=1),
    Case(name="inline, 2 controllers, 2 replicas", inline=True, replicas=2),
    *(
        Case(name=f"{c} controllers, {p} replicas, {r} ranks", controllers=c, replicas=p, ranks=r)
        for c, p, r in ((1, 3, 2), (4, 2, 2), (8, 3, 4), (4, 1, 4), (1, 2, 4))
    ),
    _resumed(1, "roles.policy.slots=2"),
    _resumed(7, "controller.shards=4", "roles.rollout.slots=3"),
    _resumed(15, "roles.policy.slots=4"),
    _resumed(22, "controller.shards=1", "roles.policy.slots=2", "roles.rollout.slots=2"),
    _resumed(29, "controller.shards=8"),
    Case(name="10 faults", faults=10),
    Case(name="10 faults, 2 replicas, 4 controllers", faults=10, replicas=2, controllers=4),
    Case(name="10 faults, 2 ranks", faults=10, ranks=2),
    Case(name="again"),
    *(_of_episodes(f"{n} controllers", controllers=n) for n in (1, 2, 4)),
    _of_episodes("3 hosts", "environment.config.hosts=3"),
    _of_episodes("sleeps at random", f"environment.config.environment={SLOW}"),
    _of_episodes("2 hosts killed", faults=2, victims=("host",)),
    _of_episodes("a replica killed", faults=1, victims=("rollout.0",)),
    _of_episodes("a supervisor killed", faults=1, victims=("supervisor",)),
    _of_episodes("killed and resumed", stop_after=5),
    _of_episodes("stopped and resumed", stop_after=5, stopped_by=signal.SIGINT),
)


class Runs:
    """Runs recipes in a folder.

    changes: overrides of every run, such as a shorter teaching.
    """

    def __init__(self, folder: Path, steps: int, changes: Sequence[str]) -> None:
        self._folder = folder
        self._steps = steps
        self._changes = changes
        (folder / "cache").mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *overrides: str, recipe: Path = RECIPE) -> list[dict[str, Any]]:
        """Runs from start to end; returns the metrics of its steps."""
        command = self._command(name, overrides, recipe)
        log = self._log(name)
        require_success(start(command, self._folder, log), command, log)
        return finished_rows(self.directory(name), self._steps)

    def of_case(self, case: Case) -> list[dict[str, Any]]:
        """Runs a case from start to end; returns the metrics of its steps."""
        name = re.sub(r"\W+", "-", case.name)
        if not case.faults and not case.stop_after:
            return self.run(name, *case.overrides(), recipe=case.recipe)
        directory = self.directory(name)
        log = self._log(name)
        command = self._command(name, case.overrides(), case.recipe)
        process = start(command, self._folder, log, own_session=True)
        if case.faults:
            self._trouble(process, directory, case)
        else:
            _wait_for_step(process, directory, min(case.stop_after, self._steps - 1))
            _wait_for_checkpoint(process, directory)
            if case.stopped_by == signal.SIGKILL:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                os.kill(process.pid, case.stopped_by)
            process.wait()
            command = ["resume", str(directory), *case.resumed]
            process = start(command, self._folder, log)
        require_success(process, command, log)
        return finished_rows(directory, self._steps)

    def policy(self, seed: int) -> Path:
        """Makes the model that runs of a seed begin with; returns its directory."""
        words = [*overrides_of(seed, self.directory(f"seed-{seed}")), *self._changes]
        return make_policy(load_plan(RECIPE, words).config, self._folder)

    def directory(self, name: str) -> Path:
        """Returns the directory of a run."""
        return self._folder / name

    def weights_sha256(self, case: Case) -> str:
        """Returns the hash of a case's final weights."""
        return weights_sha256(self.directory(re.sub(r"\W+", "-", case.name)) / "weights")

    def _log(self, name: str) -> Path:
        return self.directory(name).with_suffix(".log")

    def _command(self, name: str, overrides: Sequence[str], recipe: Path) -> list[str]:
        words = [
            *overrides_of(SEED, self.directory(name)),
            f"run.steps={self._steps}",
            "run.deterministic=true",
            "evaluation.every=0",
            "plugins=[]",
            *self._changes,
            *overrides,
        ]
        make_policy(load_plan(recipe, words).config, self._folder)
        return ["run", str(recipe), *words]

    def _trouble(self, process: subprocess.Popen[bytes], directory: Path, case: Case) -> None:
        """Kills and stops processes of a run, one after the other, evenly over its steps."""
        faults, victims = case.faults, case.victims
        draw = random.Random(faults)
        _wait_for_checkpoint(process, directory)
        for fault in range(faults):
            step = 1 + fault * max(1, (self._steps - 2) // faults)
            _wait_for_step(process, directory, min(step, self._steps - 1))
            time.sleep(draw.uniform(0, 0.3))  # anywhere in a step
            pid = _pids(process, directory).get(victims[fault % len(victims)])
            if pid is not None:
                number = (signal.SIGKILL, signal.SIGSTOP)[fault // len(VICTIMS) % 2]
                os.kill(pid, number)


def _pids(process: subprocess.Popen[bytes], directory: Path) -> dict[str, int]:
    """Returns the latest process id of each worker, as the node agent wrote it down, of the
    supervisor, and of a process of environments.
    """
    log = (directory / "logs" / "agent.0.log").read_text()
    started = re.findall(r"INFO (\S+) is started, pid (\d+)", log)
    found = {name: int(pid) for name, pid in started if Path(f"/proc/{pid}").exists()}
    for supervisor in psutil.Process(process.pid).children():
        found["supervisor"] = supervisor.pid
    if "rollout.0" in found:
        for child in psutil.Process(found["rollout.0"]).children():
            if any(word.endswith("host.py") for word in child.cmdline()):
                found["host"] = child.pid
    return found


def _wait_for_step(process: subprocess.Popen[bytes], directory: Path, step: int) -> None:
    """Waits until a run has written down a step; ends the benchmark when it ends before."""
    metrics = directory / "metrics.jsonl"
    _wait_for(
        process,
        directory,
        lambda: metrics.exists() and metrics.read_bytes().count(b"\n") - 1 >= step,
    )


def _wait_for_checkpoint(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Waits until a run has a whole checkpoint; ends the benchmark when it ends before."""
    whole = "checkpoints/step-??????/manifest.json"
    _wait_for(process, directory, lambda: any(directory.glob(whole)))


def _wait_for(
    process: subprocess.Popen[bytes], directory: Path, condition: Callable[[], bool]
) -> None:
    """Waits for something that a run does; ends the benchmark when the run ends before."""
    until_s = time.monotonic() + WAIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > until_s:
            sys.exit(f"{directory} ended, or hangs, before it was killed; see its .log")
        time.sleep(0.05)


def measure_hashes(runs: Runs, args: argparse.Namespace) -> list[Claim]:
    """Runs the matrix and compares the final weights."""
    hashes: dict[Path, list[str]] = {RECIPE: [], CALCULATOR: []}
    gaps: dict[Path, list[float]] = {RECIPE: [0.0], CALCULATOR: [0.0]}
    for case in CASES:
        if args.cases and case.name not in args.cases:
            continue
        rows = runs.of_case(case)
        gaps[case.recipe] += [
            row["metrics"]["logprob_gap_max"] for row in rows[1:] if row["metrics"]
        ]
        hashes[case.recipe].append(runs.weights_sha256(case))
        print(f"{hashes[case.recipe][-1]}  {case.name}", file=sys.stderr, flush=True)
    unit = f"runs of {args.steps} steps"
    return [
        Claim("distinct_weight_hashes", len(set(hashes[RECIPE])), "hashes", 1, "<="),
        Claim("hashed_runs", len(hashes[RECIPE]), unit),
        Claim("torch_pair_gap_max", max(gaps[RECIPE]), "nats", 0.0, "<="),
        Claim("distinct_episode_weight_hashes", len(set(hashes[CALCULATOR])), "hashes", 1, "<="),
        Claim("hashed_episode_runs", len(hashes[CALCULATOR]), unit),
        Claim("episode_pair_gap_max", max(gaps[CALCULATOR]), "nats", 1e-4, "<="),
    ]


def measure_time(runs: Runs, args: argparse.Namespace) -> list[Claim]:
    """Runs both ways in turn and compares what they take."""
    rounds: list[dict[bool, dict[str, float]]] = []
    for number in range(args.rounds):
        took: dict[bool, dict[str, float]] = {}
        for way in (True, False) if number % 2 else (False, True):
            rows = runs.run(f"time-{number}-{way}", f"run.deterministic={str(way).lower()}")
            first, last = rows[1]["metrics"], rows[-1]["metrics"]
            took[way] = {name: last[name] - first[name] for name in PROCESSOR_S}
            took[way]["wall"] = wall_s(rows)
        rounds.append(took)

    def ratio(name: str) -> Callable[[Sequence[dict[bool, dict[str, float]]]], float]:
        return lambda some: statistics.median(t[True][name] / t[False][name] for t in some)

    wall = repeated(
        "deterministic_time_over_default", rounds, ratio("wall"), "of wall time", 1.15, "<="
    )
    return [
        wall,
        *(
            repeated(
                f"deterministic_{short}_over_default", rounds, ratio(name), "of processor time"
            )
            for name, short in PROCESSOR_S.items()
        ),
    ]


def measure_sentinel(runs: Runs, args: argparse.Namespace) -> list[Claim]:
    """Has the sentinel judge healthy log-probs and planted faults, of every pair."""
    from sentinel_trials import CAUSES  # with torch, which the other parts do without

    models = [runs.policy(seed) for seed in SENTINEL_SEEDS]
    outcomes = _try_pairs(runs, args, models)
    trials = [trial for outcome in outcomes.values() for trial in outcome.trials]
    told = sum(t.found and t.cause == CAUSES[t.fault] for t in trials)
    records = sum(outcome.records for outcome in outcomes.values())
    measured_s = sum(outcome.measured_s for outcome in outcomes.values())
    alarms = sum(outcome.alarms for outcome in outcomes.values())
    sampled = {generator: outcome.sampled for generator, outcome in outcomes.items()}
    claims = [
        Claim("false_alarms_in_1e7_healthy_bf16_tokens", alarms, "alarms", 0, "<="),
        Claim("healthy_bf16_tokens_sampled", sum(sampled.values()), "tokens"),
        *(
            Claim(f"healthy_bf16_tokens_sampled_{generator}", count, "tokens")
            for generator, count in sampled.items()
        ),
        Claim("healthy_log_e_max", max(o.highest for o in outcomes.values()), "nats"),
        _delay("detection_delay_tokens_median", trials),
        Claim("planted_faults_told", told / len(trials), "of faults, versions and pairs"),
        Claim("sentinel_us_per_record", 1e6 * measured_s / records, "us"),
    ]
    for generator, outcome in outcomes.items():
        for spot in outcome.spots:
            end = f"{spot.precision}_{generator}"
            claims += [
                Claim(f"spot_check_slope_{end}", spot.slope_errors, "standard errors"),
                Claim(f"spot_check_kl_by_slope_{end}", spot.kl_by_slope, "nats"),
                Claim(f"spot_check_kl_by_mean_{end}", spot.kl_by_mean, "nats"),
            ]
        for fault in CAUSES:
            some = [trial for trial in outcome.trials if trial.fault == fault]
            word = re.sub(r"\W+", "_", fault)
            claims.append(_delay(f"detection_delay_tokens_{word}_{generator}", some))
    return claims


def _try_pairs(
    runs: Runs, args: argparse.Namespace, models: Sequence[Path]
) -> dict[str, sentinel_trials.Outcome]:
    """Tries all pairs at the same time; returns what came out of each, by generator.

    Each has a process and one thread. That of vLLM is of the interpreter of its venv.
    """
    import sentinel_trials

    script = Path(__file__).with_name("sentinel_trials.py")
    tokens = SENTINEL_TOKENS // len(args.generators)
    started = {}
    for generator in args.generators:
        python = sys.executable if generator == "torch" else interpreter(generator)
        out = runs.directory(f"sentinel-{generator}.json")
        words = ["--generator", generator, "--out", str(out)]
        words += ["--minutes", str(args.minutes), "--tokens", str(tokens), *map(str, models)]
        # The venv of an engine has no sentinel, and this checkout's is the one that is measured.
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "plugins" / "gcore-sentinel"),
        }
        process = subprocess.Popen([python, str(script), *words], env=environment)
        started[generator] = process, out
    for generator, (process, _) in started.items():
        if process.wait():
            sys.exit(f"{script.name} --generator {generator} ended with {process.returncode}")
    return {
        generator: sentinel_trials.Outcome.read(out.read_text())
        for generator, (_, out) in started.items()
    }


def _delay(name: str, trials: Sequence[Any]) -> Claim:
    return repeated(name, trials, lambda some: statistics.median(t.tokens for t in some), "tokens")


def measure_museum(runs: Runs, args: argparse.Namespace) -> list[Claim]:
    """Plants every fault of the museum into a run of its own and counts what was said."""
    sys.path.insert(0, str(ROOT))
    from tests.museum.commands import as_json, chosen, findings_of

    exhibits = chosen()
    told = as_json(exhibits, findings_of(exhibits))
    faults, controls = told["real_faults"], told["controls"]
    return [
        Claim(
            "real_faults_found_within_one_step",
            told["found_within_one_step"],
            f"of {faults} faults",
            30,
        ),
        Claim("faults_named_share", told["named"] / faults, "of the faults", 0.9),
        Claim("quiet_controls", told["quiet_controls"], f"of {controls} controls", controls),
    ]


#: Part -> what measures it. A part takes the runs and the arguments, and returns claims.
PARTS: dict[str, Callable[[Runs, argparse.Namespace], list[Claim]]] = {
    "hashes": measure_hashes,
    "time": measure_time,
    "sentinel": measure_sentinel,
    "museum": measure_museum,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="What is promised of a run.")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5, help="of part time")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], default=[])
    parser.add_argument(
        "--minutes", type=float, default=6.0, help="of part sentinel, to sample healthy tokens in"
    )
    parser.add_argument(
        "--generators",
        nargs="+",
        choices=("torch", "vllm"),
        default=["torch", "vllm"],
        help="of part sentinel: whose pairs with torch are tried; vllm needs its venv",
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="in every run")
    parser.add_argument("--keep", type=Path, help="folder for the runs; they stay there")
    add_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = Runs((args.keep or Path(temporary)).absolute(), args.steps, args.set)
        claims = [claim for part in args.parts for claim in PARTS[part](runs, args)]
    name = f"proved_{args.parts[0]}" if len(args.parts) == 1 else "proved"
    return publish(name, claims, args, ["gcore-core", "gcore-sentinel", "gcore-torch", "torch"])


if __name__ == "__main__":
    sys.exit(main())
