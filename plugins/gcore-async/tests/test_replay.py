"""A run repeats an earlier one from its journal, where two fresh runs differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gcore_async.replaying import problems

from gcore_core.controllers.window.journal import read_memberships
from tests.integration.test_resume import resume
from tests.support import runs

STEPS = 6
#: Samples of some groups take longer, by a time that every run draws anew.
UNEVEN = '''
"""A generator whose groups end in another order in every run."""
import json, os, random, time

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.testing import fake


class Uneven(fake.FakeGenerator):
    def __init__(self, *told):
        super().__init__(*told)
        self._until_s = {}

    def step(self):
        now_s = time.monotonic()
        for key in self._running:
            self._until_s.setdefault(key[0], now_s + random.choice([0.0, 0.0, 0.3]))
        held = {key: one for key, one in self._running.items() if self._until_s[key[0]] > now_s}
        self._running = {key: one for key, one in self._running.items() if key not in held}
        if not self._running:
            time.sleep(0.001)
        finished = super().step()
        self._running |= held
        return finished


@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(
        name="any",
        summary="-",
        factory="uneven:Uneven",
        config=fake.FakeGeneratorConfig,
        capabilities=frozenset({"weights.push", "weights.fingerprint", "abort"}),
    )
'''


def job(shards: int = 1, **changes: Any) -> dict[str, Any]:
    bounds = {"prompts": 6, "ahead": 1, "age": 4, "midway": "wait"}
    bounds |= changes.pop("config", {})
    sections: dict[str, Any] = {
        "controller": {"use": "async", "shards": shards, "config": bounds},
        "objective": {"use": "algorithms/ppo_clip"},
        "filter": {"use": "core/varied"},
        "run": {"steps": STEPS},
        "checkpoint": {"every": 1},
        "roles": {"rollout": {"use": "uneven/any"}},
    }
    for name, part in changes.items():
        sections[name] = {**sections.get(name, {}), **part}
    found = runs.job(**sections)
    found["local"].append("uneven.py")
    return found


def finished(directory: Path, config: dict[str, Any]) -> Any:
    directory.mkdir()
    (directory / "uneven.py").write_text(UNEVEN)
    code, run = runs.finish(directory, config)
    assert code == 0, run.output
    return run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finished(tmp_path_factory.mktemp("original") / "run", job())


def replay(original: Any, shards: int = 1, **changes: Any) -> dict[str, Any]:
    config = {"replay": str(original.path), **changes.pop("config", {})}
    return job(shards, config=config, **changes)


def assert_same(run: Any, original: Any) -> None:
    assert run.weights() == original.weights()
    journals = [(one.path / "memberships.jsonl").read_text() for one in (run, original)]
    assert journals[0] == journals[1]
    rows = [[_repeated(row) for row in one.metrics()] for one in (run, original)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == STEPS + 1


def _repeated(row: dict[str, Any]) -> dict[str, Any]:
    """What of a step's row says nothing of times, messages and memory.

    To twelve digits: shards add up their parts of a mean, in an order that depends on their number.
    """
    kept = ("loss", "reward", "groups/", "age/", "entropy", "grad", "ordinals/", "window/")
    found = {n: float(f"{value:.12g}") for n, value in row.items() if n.startswith(kept)}
    return {**found, "digests": row["digests"]}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_replay_has_the_weights_metrics_and_records_of_the_run(
    shards: int, original: Any, tmp_path: Path
) -> None:
    run = finished(tmp_path / "run", replay(original, shards))
    assert_same(run, original)
    assert f"it repeats {original.path}" in run.output


@pytest.mark.slow
def test_two_fresh_runs_differ(original: Any, tmp_path: Path) -> None:
    """Guards the test above: without the journal the clock decides."""
    for number in range(3):
        run = finished(tmp_path / str(number), job())
        if run.weights() != original.weights():
            return
    raise AssertionError("the clock decided nothing")


def test_check_names_the_first_difference_from_the_run_that_is_replayed(
    original: Any, tmp_path: Path
) -> None:
    tmp_path.joinpath("uneven.py").write_text(UNEVEN)
    answer = runs.checked(tmp_path, replay(original, run={"seed": 4}))
    assert "run.seed was 3 in that run and is 4 here." in answer, answer
    answer = runs.checked(tmp_path, replay(original, shards=2, checkpoint={"every": 0}))
    assert answer.startswith("0 "), answer


JOB = {
    "run": {"name": "a", "seed": 1, "steps": 2},
    "controller": {"use": "async", "config": {"prompts": 2, "age": 1}, "shards": 1},
    "data": {"use": "core/json", "config": {"path": "/a"}},
    "roles": {"policy": {"use": "x", "slots": 1}, "rollout": {"use": "y", "slots": 1}},
}
LINE = {"step": 0, "begun": [[0, [0, 1]]], "trained": [0, 1], "consumed": [0, 1]}
LINES = [
    {**LINE, "digests": ["0" * 16] * 2},
    {**LINE, "step": 1, "begun": [[1, [2, 3]]], "trained": [2], "consumed": [2, 3]}
    | {"digests": ["0" * 16] * 2},
]


def run_of(directory: Path, lines: list[dict[str, Any]] = LINES, end: str = "\n") -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(json.dumps(JOB))
    text = "\n".join(map(json.dumps, lines)) + end
    (directory / "memberships.jsonl").write_text(text)
    return str(directory)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("data.config.path", "/b", "data.config.path was '/a' in that run and is '/b' here."),
        ("controller.config.age", 2, "controller.config.age was 1 in that run and is 2 here."),
        ("roles.policy.slots", 2, "roles.policy.slots was 1 in that run and is 2 here."),
        ("filter.use", "z", "filter.use was 'nothing' in that run and is 'z' here."),
        ("controller.shards", 2, ""),
        ("controller.config.replay", "/c", ""),
        ("controller.config.unfinished", "redraw", ""),
        ("roles.rollout.slots", 4, ""),
        ("roles.rollout.least", 2, ""),
        ("run.name", "b", ""),
        ("observers.tracker.use", "tracking/wandb", ""),
        ("plugins", {"async": None, "tracking": ">=0.2"}, ""),
    ],
)
def test_a_job_repeats_a_run_if_it_computes_the_same(
    key: str, value: Any, told: str, tmp_path: Path
) -> None:
    job = json.loads(json.dumps(JOB))
    *sections, name = key.split(".")
    place = job
    for section in sections:
        place = place.setdefault(section, {})
    place[name] = value
    found = list(problems(job, run_of(tmp_path)))
    assert len(found) == bool(told)
    assert told in "".join(found)


def test_a_journal_with_a_hole_is_refused(tmp_path: Path) -> None:
    (told,) = problems(JOB, run_of(tmp_path, LINES[1:]))
    assert "the line of step 0 is missing: step 1 stands there. the journal was cut" in told


def test_a_line_that_is_none_is_refused(tmp_path: Path) -> None:
    (told,) = problems(JOB, run_of(tmp_path, [LINES[0], {"step": 1}]))
    assert "memberships.jsonl:2: a line cannot be read." in told


def test_a_run_may_be_named_from_home_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(tmp_path / "001")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(problems(JOB, "~/001")) == []


def test_the_latest_run_is_to_be_named(tmp_path: Path) -> None:
    run = run_of(tmp_path / "001")
    latest = tmp_path / "latest"
    latest.symlink_to("001")
    (told,) = problems(JOB, str(latest))
    assert told.endswith(f"{latest} goes on to the next run of its name; give {run}.")


def test_a_directory_without_a_journal_is_refused(tmp_path: Path) -> None:
    (told,) = problems(JOB, str(tmp_path / "none"))
    assert "holds no run" in told
    Path(run_of(tmp_path), "memberships.jsonl").unlink()
    (told,) = problems(JOB, str(tmp_path))
    assert "the run has no journal of which groups its steps took." in told


def test_a_run_that_lent_devices_is_not_repeated(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    lending = {**JOB, "roles": {**JOB["roles"], "rollout": {"use": "y", "slots": 2, "lent": 1}}}
    (tmp_path / "config.yaml").write_text(json.dumps(lending))
    (told,) = problems(JOB, run)
    assert "lent its trainer's devices (roles.rollout.lent)" in told


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    run_of(tmp_path, LINES, end='\n{"step": 2, "beg')
    assert [line.step for line in read_memberships(tmp_path)] == [0, 1]


def test_a_group_that_was_begun_again_counts_once(tmp_path: Path) -> None:
    """Noted again with the same version the first line counts, begun anew the last."""
    again = {**LINES[1], "begun": [[0, [0]], [1, [1, 2, 3]]]}
    run_of(tmp_path, [LINES[0], again])
    begun = [
        [(one.version, one.ordinals) for one in line.begun] for line in read_memberships(tmp_path)
    ]
    assert begun == [[(0, [0])], [(1, [1, 2, 3])]]


def test_a_replay_ends_where_the_journal_was_cut(original: Any, tmp_path: Path) -> None:
    """Such as one of a run that failed: its steps are repeated, and no further one is made."""
    short = tmp_path / "short"
    short.mkdir()
    for name in ("config.yaml", "data.json"):
        shutil.copy(original.path / name, short)
    lines = (original.path / "memberships.jsonl").read_text().splitlines(keepends=True)
    (short / "memberships.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    run = finished(tmp_path / "run", job(config={"replay": str(short)}))
    assert "the journal of that run ends with step 3, and so does this run" in run.output
    digests = [[row["digests"] for row in one.metrics()] for one in (run, original)]
    assert digests[0] == digests[1][:4]


@pytest.mark.slow
def test_other_records_end_a_replay_and_are_named(original: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.yaml", "data.json"):
        shutil.copy(original.path / name, other)
    lines = [
        json.loads(line) for line in (original.path / "memberships.jsonl").read_text().splitlines()
    ]
    ordinal = lines[2]["consumed"][0]
    lines[2]["digests"][0] = "0" * 16
    (other / "memberships.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "uneven.py").write_text(UNEVEN)
    code, run = runs.finish(tmp_path / "run", job(config={"replay": str(other)}))
    assert code == 6
    assert f"the group of ordinal {ordinal} is not that of the run that is replayed" in run.output


@pytest.mark.slow
def test_other_rows_are_refused(original: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.yaml", "memberships.jsonl"):
        shutil.copy(original.path / name, other)
    data = json.loads((original.path / "data.json").read_text())
    data["digests"]["4"] = "0" * 16
    (other / "data.json").write_text(json.dumps(data))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "uneven.py").write_text(UNEVEN)
    code, run = runs.finish(tmp_path / "run", job(config={"replay": str(other)}))
    assert code == 2
    assert "row 4 is another one" in run.output


@pytest.mark.slow
def test_runs_that_were_killed_repeat_and_are_repeated(original: Any, tmp_path: Path) -> None:
    """A replay that is killed goes on as a replay; a run that was killed can be replayed."""
    for number, config in enumerate([replay(original), job()]):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "uneven.py").write_text(UNEVEN)
        with runs.running(directory, config) as run:
            run.read_until(f"step 3/{STEPS}")
            run.process.kill()
        done = resume(run)
        assert done.returncode == 0, done.stdout + done.stderr
        if number == 0:
            assert run.weights() == original.weights()
            continue
        again = finished(tmp_path / "again", replay(run))
        assert again.weights() == run.weights()
