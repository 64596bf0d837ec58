"""What differs between two runs, of files that are written here: see also test_diff.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gcore_report.comparison import Comparison, compare

from gcore_core.cli import main
from gcore_core.contract.records import TensorSpec, WeightPlan
from gcore_core.contract.run_files import Environment
from gcore_core.workers.run_journals import TensorJournal

STEPS = 3
ENVIRONMENT = Environment(
    step=0,
    versions={"torch": "2.13", "python": "3.11"},
    machine={"processor": "EPYC", "cores": "2"},
    files={"rewards.exact.config.path": "aa", "data.config.path": "bb"},
)


@dataclass
class Made:
    """A run's directory that a test may change.

    digests: (row, stage) -> another digest than that of every run.
    tensors: (row, tensor) -> another digest.
    """

    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    digests: dict[tuple[int, str], str] = field(default_factory=dict)
    tensors: dict[tuple[int, str], int] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    transport: str = "shm"
    metrics: dict[str, float] = field(default_factory=dict)

    def write(self) -> Path:
        self.directory.mkdir()
        config = {"run": {"seed": 7, "steps": STEPS, "deterministic": True}} | self.config
        (self.directory / "config.yaml").write_text(json.dumps(config))
        line = msgspec.structs.replace(ENVIRONMENT, **self.environment)
        (self.directory / "environment.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
        stages = ("generation", "rewarding", "preparation", "training", "weights")
        rows = [
            {
                "step": row,
                "version": row,
                "time_unix_s": 0.0,
                "metrics": {"loss": 0.5} | self.metrics,
                "digests": {
                    stage: self.digests.get((row, stage), f"{stage} {row}")
                    for stage in (stages if row else stages[-1:])
                },
            }
            for row in range(STEPS + 1)
        ]
        lines = [json.dumps(row) + "\n" for row in rows]
        (self.directory / "metrics.jsonl").write_text("".join(lines))
        journal = TensorJournal(self.directory)
        names = ["embed", "layer", "head"]
        for row in range(STEPS + 1):
            specs = [TensorSpec(name, "F32", (1,), 4) for name in names]
            digests = [self.tensors.get((row, name), 10 * row + i) for i, name in enumerate(names)]
            journal.write(WeightPlan(row, specs), digests, self.transport)
        return self.directory


def compared(tmp_path: Path, **changes: Any) -> Comparison:
    first = Made(tmp_path / "first").write()
    return compare(first, Made(tmp_path / "second", **changes).write())


def test_equal_files_are_the_same(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert found.same and found.differences == () and found.cause is None


def test_the_first_tensor_that_differs_is_named(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        digests={(2, "weights"): "x", (3, "generation"): "y"},
        tensors={(2, "layer"): 99, (2, "head"): 98},
    )
    assert (found.step, found.stage, found.tensor) == (1, "weights", "layer")
    assert found.details == ("2 of 3 tensors differ",)


def test_other_weights_at_the_beginning_part_before_the_first_step(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        digests={(0, "weights"): "x"},
        tensors={(0, "embed"): 99},
        config={"roles": {"policy": {"model": {"path": "other"}}}},
    )
    assert (found.step, found.stage, found.tensor) == (0, "start", "embed")
    assert found.cause is not None and found.cause.what == "roles.policy.model.path"


def test_weights_of_another_transport_are_not_compared(tmp_path: Path) -> None:
    everywhere = {(row, "weights"): "x" for row in range(STEPS + 1)}
    assert compared(tmp_path, digests=everywhere, transport="ipc").same


def test_an_update_that_differs_is_told_by_its_metrics(tmp_path: Path) -> None:
    found = compared(tmp_path, digests={(1, "training"): "x"}, metrics={"loss": 0.25})
    assert (found.step, found.stage) == (0, "training")
    assert found.details == ("loss 0.5 | 0.25",)


@pytest.mark.parametrize(
    ("kind", "environment"),
    [
        ("versions", {"versions": {"torch": "2.12", "python": "3.11"}}),
        ("hardware", {"machine": {"processor": "Xeon", "cores": "2"}}),
        ("code", {"files": {"rewards.exact.config.path": "zz", "data.config.path": "bb"}}),
        ("data", {"files": {"rewards.exact.config.path": "aa", "data.config.path": "zz"}}),
    ],
)
def test_the_one_thing_that_differs_is_the_cause(
    kind: str, environment: Mapping[str, Any], tmp_path: Path
) -> None:
    found = compared(tmp_path, digests={(1, "rewarding"): "x"}, environment=environment)
    assert found.cause is not None and found.cause.kind == kind
    assert found.differences == (found.cause,)


def test_of_two_differences_the_one_that_acts_on_the_stage_is_the_cause(tmp_path: Path) -> None:
    changes = {
        "config": {
            "run": {"seed": 8, "steps": STEPS, "deterministic": True},
            "rewards": {"exact": {"weight": 2.0}},
        }
    }
    rewarding = compared(tmp_path, digests={(1, "rewarding"): "x"}, **changes)
    assert rewarding.cause is not None and rewarding.cause.what == "rewards.exact.weight"
    generation = compare(
        tmp_path / "first",
        Made(tmp_path / "third", digests={(1, "generation"): "x"}, **changes).write(),
    )
    assert generation.cause is not None and generation.cause.what == "run.seed"
    assert generation.cause.kind == "seed"


def test_names_and_directories_are_no_differences(tmp_path: Path) -> None:
    config = {
        "run": {"seed": 7, "steps": STEPS, "deterministic": True, "name": "b", "dir": "/b"},
        "checkpoint": {"every": 5},
        "rewards": {"exact": {"config": {"path": "/elsewhere/reward.py"}}},
    }
    assert compared(tmp_path, config=config).differences == ()


def test_where_nothing_differs_the_cause_is_unknown(tmp_path: Path) -> None:
    found = compared(tmp_path, digests={(1, "training"): "x"})
    assert found.cause is not None and found.cause.kind == "unknown"


@pytest.mark.parametrize(("rate", "cause"), [(2e-4, "run.steps"), (1e-4, "nothing that a run")])
def test_another_length_is_the_cause_where_it_changed_the_learning_rate(
    rate: float, cause: str, tmp_path: Path
) -> None:
    config = {"run": {"seed": 7, "steps": 2 * STEPS, "deterministic": True}}
    first = Made(tmp_path / "first", metrics={"learning_rate": 1e-4})
    second = Made(
        tmp_path / "second",
        config=config,
        digests={(1, "training"): "x"},
        metrics={"learning_rate": rate},
    )
    found = compare(first.write(), second.write())
    assert found.stage == "training"
    assert found.cause is not None and found.cause.what.startswith(cause)


def test_without_run_deterministic_that_is_the_cause(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        digests={(1, "generation"): "x"},
        config={"run": {"seed": 7, "steps": STEPS, "deterministic": False}},
    )
    assert found.cause is not None and "run.deterministic" in found.cause.what


def test_saved_weights_that_are_not_the_last_steps_are_a_difference(tmp_path: Path) -> None:
    runs = [Made(tmp_path / name).write() for name in ("first", "second")]
    for run, sha256 in zip(runs, ("aa", "bb"), strict=True):
        (run / "summary.md").write_text(f"# run\n\n- weights_sha256: {sha256}\n")
    found = compare(*runs)
    assert (found.same, found.stage, found.weights_sha256) == (False, "saved", ("aa", "bb"))


def test_half_a_line_as_a_killed_run_leaves_it_is_left_out(tmp_path: Path) -> None:
    runs = [Made(tmp_path / name).write() for name in ("first", "second")]
    for name in ("metrics.jsonl", "tensors.jsonl", "environment.jsonl"):
        with (runs[1] / name).open("ab") as file:
            file.write(b'{"step": 9, "what": "pu')
    assert compare(*runs).same


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("nothing there", "no such run directory"),
        ("no metrics", "this directory holds no run"),
        ("no digests", "the steps of this run have no digests to compare"),
        ("no step", "no step has ended yet"),
        ("torn config", "the run's configuration cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_exit_code_2(
    spoil: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (Made(tmp_path / name).write() for name in ("first", "second"))
    metrics = second / "metrics.jsonl"
    if spoil == "nothing there":
        second = tmp_path / "third"
    elif spoil == "no metrics":
        metrics.unlink()
    elif spoil == "no digests":
        metrics.write_text('{"step": 0, "version": 0, "time_unix_s": 0, "metrics": {}}\n')
    elif spoil == "no step":
        metrics.write_text("")
    else:
        (second / "config.yaml").write_text("run: {seed: [")
    assert main(["diff", str(first), str(second)]) == 2
    error = capsys.readouterr().err
    assert message in error and str(second) in error
