"""Lets tests check that a state can be resumed with another layout of ranks.

A trainer that loads a state must go on as if it had not been interrupted, whichever trainer and
however many ranks saved the state.

A job is a trainer on some ranks. A job without states makes ``STEPS`` steps and saves its state
after ``AT`` of them. A job with states goes on from each of them. Jobs run one after the other, and
each rank is a process: ``python -m gcore_language.elastic JOBS RANK RANKS``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gcore_testing.runs import run_recipe, run_together
from safetensors.numpy import load_file

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.trainer import TrainRecord
from gcore_core.contract.traits import traits_of
from gcore_language.tiny import VOCABULARY

STEPS = 5
AT = 2
#: What float32 sums in another order may change, as a fraction of a gradient's norm or of a
#: tensor's largest weight.
TOLERANCE = 1e-6
#: About as large as gradients are. With a small eps Adam would make whole steps from the rounding
#: of gradients that should be zero.
_EPS = 1e-2
_SETTINGS = {
    "learning_rate": 2e-3,
    "eps": _EPS,
    "weight_decay": 0.1,
    "clip_grad_norm": 0.3,
    "schedule": "linear",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A trainer and how its ranks share the work.

    trainer, config: the trainer's class and its configuration's, each as ``module:Class``.
    ranks: how many ranks.
    settings: settings of the configuration, besides those of every job.
    engine: the role's ``engine:`` mapping.
    """

    trainer: str
    config: str
    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


TORCH = Layout(
    trainer="gcore_torch.trainer:TorchTrainer", config="gcore_torch.config:TorchTrainerConfig"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A trainer that runs, from its model or from states.

    layout: the trainer and its ranks.
    model: directory of the model.
    work: directory for what the job writes; see ``outcome``.
    states: name -> directory of a state to go on from; empty to begin from the model.
    """

    layout: Layout
    model: str
    work: str
    states: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the steps after ``AT`` led to.

    norms: gradient norm of each of these steps.
    weights: Hugging Face name -> float32 array, after the last step.
    """

    norms: list[float]
    weights: Mapping[str, np.ndarray]


def run_jobs(jobs: Sequence[Job], room: Path) -> None:
    """Runs the jobs, those of fewer ranks first.

    room: directory for the jobs' descriptions.

    Raises RuntimeError with the output of a rank that failed.
    """
    room.mkdir(parents=True, exist_ok=True)
    for ranks in sorted({job.layout.ranks for job in jobs}):
        file = room / f"jobs-{ranks}.json"
        file.write_text(json.dumps([asdict(job) for job in jobs if job.layout.ranks == ranks]))
        run_together(
            [
                ["-m", "gcore_language.elastic", str(file), str(rank), str(ranks)]
                for rank in range(ranks)
            ]
        )


def run_sources(
    layouts: Mapping[str, Layout], model: Path, works: Path, room: str
) -> dict[str, str]:
    """Runs a job for each layout, and returns source -> directory of its state.

    Each job has gone on after its save without an interruption; ``outcome(works / source)`` gives
    what it came to.
    """
    jobs = [
        Job(layout=layout, model=str(model), work=str(works / name))
        for name, layout in layouts.items()
    ]
    run_jobs(jobs, works / room)
    return {name: str(works / name / "state") for name in layouts}


def run_targets(
    targets: Mapping[str, Layout],
    states: Mapping[str, str],
    goes: Callable[[str, str], bool],
    model: Path,
    works: Path,
) -> dict[str, Path]:
    """Runs a job for each target, which goes on from the states of the sources.

    Returns target -> the job's directory; see ``outcome``.

    goes: whether ``goes(source, target)`` is to be run.
    """
    works_of = {target: works / f"in {target}" for target in targets}
    jobs = []
    for target, work in works_of.items():
        chosen_states = {source: state for source, state in states.items() if goes(source, target)}
        jobs.append(
            Job(layout=targets[target], model=str(model), work=str(work), states=chosen_states)
        )
    run_jobs(jobs, works / "targets")
    return works_of


def outcome(work: Path, name: str = "whole") -> Outcome:
    """Reads what a job came to.

    name: the state that it went on from; "whole" for a job without states.
    """
    return Outcome(
        norms=json.loads((work / f"{name}.json").read_text()),
        weights=dict(np.load(work / f"{name}.npz")),
    )


def assert_goes_on(resumed: Outcome, expected: Outcome, *, exact: bool) -> None:
    """Asserts that gradient norms and weights are those of the run that was not interrupted.

    exact: require them to be equal; otherwise they may differ by ``TOLERANCE``.
    """
    tolerance = 0 if exact else TOLERANCE
    np.testing.assert_allclose(resumed.norms, expected.norms, rtol=tolerance)
    assert resumed.weights.keys() == expected.weights.keys()
    for name, expected_weights in expected.weights.items():
        most = float(np.abs(expected_weights).max())
        np.testing.assert_allclose(
            resumed.weights[name], expected_weights, rtol=0, atol=tolerance * most, err_msg=name
        )


def assert_run_goes_on(
    recipe: Path, directory: Path, overrides: Sequence[str], timeout_s: float
) -> None:
    """Asserts that a run on torch, when resumed with other overrides, ends as it did without.

    The run is copied, its checkpoints after step ``AT`` are removed, and the copy is resumed. The
    gradient norms after ``AT`` and the final weights may differ by ``TOLERANCE``.
    """
    begun = directory / "begun"
    resumed = directory / "resumed"
    settings = ["plugins=[]", "run.deterministic=true", "cluster.devices=3", f"run.steps={STEPS}"]
    settings += [
        "roles.policy.model.make.config={seed: 0, steps: 40}",
        "controller.config.prompts=8",
    ]
    settings += [
        f"roles.policy.config.eps={_EPS}",
        "evaluation.prompts=8",
        "evaluation.every=0",
        f"checkpoint={{every: 1, last: {STEPS}}}",
    ]
    run_recipe(recipe, begun, settings, timeout_s)
    shutil.copytree(begun, resumed)
    for step in range(AT + 1, STEPS + 1):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:06d}")
    shutil.rmtree(resumed / "weights")
    command = [sys.executable, "-m", "gcore_core", "resume", str(resumed), *overrides]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert process.returncode == 0, (process.stdout + process.stderr)[-3000:]
    norms = []
    for run in (begun, resumed):
        rows = [
            json.loads(line)
            for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        latest = {row["step"]: row["metrics"] for row in rows if "grad_norm" in row["metrics"]}
        norms.append([latest[step]["grad_norm"] for step in range(AT + 1, STEPS + 1)])
    np.testing.assert_allclose(norms[1], norms[0], rtol=TOLERANCE)
    expected, weights = (
        load_file(run / "weights" / "model.safetensors") for run in (begun, resumed)
    )
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        most = float(np.abs(tensor).max())
        np.testing.assert_allclose(
            weights[name], tensor, rtol=0, atol=TOLERANCE * most, err_msg=name
        )


# -- in the processes of the ranks -----------------------------------------------------------------


class _Reinforce:
    """The objective -advantage * logp, averaged over trained actions."""

    requires: frozenset[str] = frozenset()

    def loss(self, columns: Any, current: Any) -> Any:
        mask = columns["mask"].float()
        return -(columns["advantage"] * current["logp"] * mask).sum(), mask.sum(), {}

    def weight(self, columns: Any) -> Any:
        return columns["mask"].float().sum()


def _run(job: Job, rank: int) -> None:
    """Runs one rank of a job."""
    work = Path(job.work)
    layout = job.layout
    meet = work / "meet"
    meet.mkdir(parents=True, exist_ok=True)
    context = WorkerContext(
        role="policy",
        rank=rank,
        ranks=layout.ranks,
        rendezvous=str(meet),
        directory=str(work),
        steps=STEPS,
        model={"path": job.model},
        engine=layout.engine,
        parts={"objective": _Reinforce()},
    )
    config = import_attribute(layout.config)(**{**_SETTINGS, **layout.settings})
    trainer = import_attribute(layout.trainer)(config, context)
    slots = traits_of(config).replica_slots
    replica = rank // slots
    replicas = layout.ranks // slots

    def step(number: int) -> float:
        records = _records(number)
        advantages = np.random.default_rng(number).standard_normal(len(records))
        trainer.prepare(records[replica::replicas], frozenset())
        return float(trainer.train(number, advantages[replica::replicas], 1, 1)["grad_norm"])

    def leave(name: str, norms: list[float]) -> None:
        weights = {
            s.name: a.copy().view(np.float32).reshape(s.shape)
            for s, a in trainer.export_weights()
            if a.size
        }
        if rank == 0:
            (work / f"{name}.json").write_text(json.dumps(norms))
            np.savez(work / f"{name}.npz", **weights)

    if not job.states:
        for number in range(AT):
            step(number)
        trainer.save(work / "state")
        leave("whole", [step(number) for number in range(AT, STEPS)])
    for name, state in job.states.items():
        trainer.load(Path(state))
        leave(name, [step(number) for number in range(trainer.version, STEPS)])
    trainer.close()


def _records(step: int) -> list[TrainRecord]:
    """Makes the records of a step: four samples of each of four prompts, of different lengths."""
    draw = np.random.default_rng(step)
    records = []
    for ordinal in range(4):
        prompt = draw.integers(3, VOCABULARY, int(draw.integers(2, 9))).astype(np.int32)
        for sample in range(4):
            actions = int(draw.integers(2, 9))
            columns = {
                "prompt_ids": prompt,
                "action_ids": draw.integers(2, VOCABULARY, actions).astype(np.int32),
                "logp": np.log(draw.uniform(0.01, 0.1, actions)).astype(np.float32),
                "action_mask": np.ones(actions, np.bool_),
                "temperature": np.array(np.float32(1.0)),
            }
            records.append(
                TrainRecord(ordinal=ordinal, sample=sample, minibatch=0, columns=columns)
            )
    return records


def _main(file: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    for plain in json.loads(file.read_text()):
        job = Job(**{**plain, "layout": Layout(**plain["layout"])})
        _run(job, rank)
    # all results are written; a thread of a library may abort a process that exits in the usual way
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
