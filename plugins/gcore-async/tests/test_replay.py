"""A run repeats an earlier one from its journal, where two fresh runs differ."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from gcore_async.replaying import problems

from gcore_core.controllers.window.journal import read_memberships
from gcore_core.run.checkpoint_service import UNFINISHED
from tests.integration.test_resume import resume
from tests.support import runs

pytestmark = pytest.mark.rest

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


class Long(Uneven):
    """Its samples take so long that they run when a push comes."""

    def step(self):
        time.sleep(0.003)
        return super().step()


def provider(name, factory, *more):
    return p.GeneratorProvider(
        name=name,
        summary="-",
        factory=factory,
        config=fake.FakeGeneratorConfig,
        capabilities=frozenset({"weights.push", "weights.fingerprint", "abort", *more}),
    )


@hookimpl
def gcore_generators():
    midway = "weights.midway", "logprobs", "continues"
    yield provider("any", "uneven:Uneven")
    yield provider("long", "uneven:Long", *midway, "continues.exact", "determinism")
    yield provider("other", "uneven:Long", *midway)
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


@pytest.mark.slow
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


# -- where pushes cut samples ----------------------------------------------------------------------


def cut_job(shards: int = 1, **changes: Any) -> dict[str, Any]:
    """A job whose samples run through pushes; some also wait for a place in the engine's batch."""
    config = {"midway": "recompute", "ahead": 2} | changes.pop("config", {})
    rollout = {"use": "uneven/long", "config": {"max_new_tokens": 200, "late_end": 150}}
    roles = {"rollout": {**rollout, **changes.pop("rollout", {})}}
    return job(shards, config=config, roles=roles, **changes)


def cut_replay(original: Any, shards: int = 1, **changes: Any) -> dict[str, Any]:
    config = {"replay": str(original.path), **changes.pop("config", {})}
    return cut_job(shards, config=config, **changes)


@pytest.fixture(scope="module")
def cut_original(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = finished(tmp_path_factory.mktemp("cut") / "run", cut_job())
    cuts = [cut for line in read_memberships(run.path) for cut in line.cuts or ()]
    assert any(len(cut.ends) > 1 for cut in cuts), "no sample was cut twice"
    return run


def assert_same_records(run: Any, original: Any) -> None:
    """The same weights and digests of every step, and the same journal in the end."""
    assert run.weights() == original.weights()
    digests = [[row["digests"] for row in one.metrics()] for one in (run, original)]
    assert digests[0] == digests[1]
    assert len(digests[0]) == STEPS + 1
    taken = [
        [(line.trained, line.consumed, line.digests, line.cuts) for line in lines]
        for lines in map(read_memberships, (run.path, original.path))
    ]
    assert taken[0] == taken[1]


@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (2, 3)])
def test_a_replay_cuts_samples_where_pushes_of_the_run_cut_them(
    shards: int, replicas: int, cut_original: Any, tmp_path: Path
) -> None:
    config = cut_replay(cut_original, shards, rollout={"slots": replicas}, cluster={"devices": 4})
    run = finished(tmp_path / "run", config)
    assert_same_records(run, cut_original)


@pytest.mark.slow
@pytest.mark.parametrize("victims", [["rollout.0"], ["rollout.0", "rollout.1"]])
def test_a_replay_that_loses_replicas_cuts_samples_alike(
    victims: list[str], cut_original: Any, tmp_path: Path
) -> None:
    """What is lost is drawn again from the last cut on, here or from a checkpoint."""
    config = cut_replay(cut_original, 2, rollout={"slots": 2}, cluster={"devices": 3})
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "uneven.py").write_text(UNEVEN)
    with runs.running(directory, config) as run:
        run.read_until(f"step 2/{STEPS}")
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.pids()[victim], signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert_same_records(run, cut_original)


@pytest.mark.slow
def test_a_replay_that_is_killed_goes_on_with_samples_from_their_cuts(
    cut_original: Any, tmp_path: Path
) -> None:
    """Its checkpoints hold what samples had at the push."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "uneven.py").write_text(UNEVEN)
    with runs.running(directory, cut_replay(cut_original)) as run:
        run.read_until(f"step 3/{STEPS}")
        run.process.kill()
    assert list((run.path / "checkpoints").glob(f"step-*/{UNFINISHED}"))
    done = resume(run, "controller.shards=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_records(run, cut_original)


@pytest.mark.slow
def test_a_run_that_was_killed_is_repeated_with_its_cuts(tmp_path: Path) -> None:
    """Groups that were in flight were begun again, by newer weights; a replay begins them then."""
    directory = tmp_path / "first"
    directory.mkdir()
    (directory / "uneven.py").write_text(UNEVEN)
    config = cut_job(2, rollout={"slots": 2}, cluster={"devices": 3})
    with runs.running(directory, config) as run:
        run.read_until(f"step 2/{STEPS}")
        os.kill(run.pids()["rollout.1"], signal.SIGKILL)
        run.read_until(f"step 3/{STEPS}")
        run.process.kill()
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_records(finished(tmp_path / "again", cut_replay(run)), run)


@pytest.mark.slow
def test_deterministic_runs_by_the_clock_survive_a_lost_replica_and_repeat(tmp_path: Path) -> None:
    """No replica waits for other shards' parts of a round: who had theirs never asks again."""
    changes: dict[str, Any] = {"run": {"deterministic": True}, "config": {"order": "clock"}}
    changes |= {"rollout": {"slots": 2}, "cluster": {"devices": 3}}

    def run_with_a_kill(directory: Path, config: dict[str, Any], victim: str) -> Any:
        directory.mkdir()
        (directory / "uneven.py").write_text(UNEVEN)
        with runs.running(directory, config) as run:
            run.read_until(f"step 2/{STEPS}")
            os.kill(run.pids()[victim], signal.SIGKILL)
            assert run.wait() == 0, run.output
        return run

    first = run_with_a_kill(tmp_path / "first", cut_job(2, **copy.deepcopy(changes)), "rollout.0")
    changes["config"] |= {"replay": str(first.path)}
    again = run_with_a_kill(tmp_path / "again", cut_job(3, **changes), "rollout.1")
    assert_same_records(again, first)


@pytest.mark.slow
def test_a_sample_that_was_cut_elsewhere_ends_a_replay_and_is_named(
    cut_original: Any, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.yaml", "data.json"):
        shutil.copy(cut_original.path / name, other)
    text = (cut_original.path / "memberships.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    # Of a trained group that an earlier step's push has cut.
    cut = next(
        cut for line in lines[1:] for cut in line["cuts"] if cut[3] and cut[0] in line["trained"]
    )
    cut[3][0][0] += 1
    (other / "memberships.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "uneven.py").write_text(UNEVEN)
    code, run = runs.finish(tmp_path / "run", cut_job(config={"replay": str(other)}))
    assert code == 6, run.output
    assert f"the group of ordinal {cut[0]} is not that of the run that is replayed" in run.output


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"run": {"deterministic": True}}, "run.deterministic was False in that run"),
        ({"rollout": {"use": "uneven/other"}}, "no capability continues.exact"),
        ({"sampling": {"use": "refine"}}, "draws records in waves or pieces of its own"),
    ],
    ids=["all there", "other settings", "capability", "waves"],
)
def test_check_says_what_keeps_a_replay_from_cutting_samples(
    changes: dict[str, Any], told: str, cut_original: Any, tmp_path: Path
) -> None:
    (tmp_path / "uneven.py").write_text(UNEVEN)
    answer = runs.checked(tmp_path, cut_replay(cut_original, **changes))
    assert answer.startswith("0 ") == (not told), answer
    assert told in answer


def recomputing(directory: Path, lines: list[dict[str, Any]], **config: Any) -> dict[str, Any]:
    """Writes a run of midway: recompute; returns its job."""
    settings = {**JOB["controller"]["config"], "midway": "recompute", **config}
    job = {**JOB, "controller": {**JOB["controller"], "config": settings}}
    run_of(directory, lines)
    (directory / "config.yaml").write_text(json.dumps(job))
    return job


def test_a_journal_that_does_not_say_where_samples_were_cut_is_refused(tmp_path: Path) -> None:
    """Such as that of an older version; also where it says so of some steps alone."""
    lines = [{**LINES[0], "cuts": []}, LINES[1]]
    job = recomputing(tmp_path, lines)
    (told,) = problems(job, str(tmp_path))
    assert "does not say where pushes cut samples, since an older version wrote it" in told
    recomputing(tmp_path, [{**line, "cuts": []} for line in LINES])
    assert list(problems(job, str(tmp_path))) == []


def test_a_run_whose_checkpoints_kept_unfinished_samples_is_not_repeated(tmp_path: Path) -> None:
    job = recomputing(tmp_path, [{**line, "cuts": []} for line in LINES], unfinished="keep")
    (told,) = problems(job, str(tmp_path))
    assert "had checkpoints keep unfinished samples (controller.config.unfinished)" in told


def test_a_journal_of_a_run_whose_pushes_wait_has_no_cuts(original: Any) -> None:
    assert "cuts" not in (original.path / "memberships.jsonl").read_text()


#: The quickstart's model, whose samples are long enough here for pushes to cut some.
OF_A_MODEL = (
    *("controller.use=async", "controller.config.ahead=2", "controller.config.age=4"),
    *("controller.config.midway=recompute", "controller.config.order=clock"),
    *("controller.config.prompts=64", "run.deterministic=true", "run.steps=5"),
    # so few at once that generation takes longer than training, on a busy machine too: pushes find
    # samples that run
    "roles.rollout.config.max_batch=8",
)


@pytest.mark.slow
def test_samples_of_a_model_are_cut_again_bit_for_bit(tmp_path: Path) -> None:
    """In a deterministic run, replayed with other numbers of controllers and replicas."""
    pytest.importorskip("gcore_torch")
    first, again = tmp_path / "first", tmp_path / "again"
    rows = []
    for directory, words in (
        (first, ()),
        (again, (f"controller.config.replay={first / 'run'}", "roles.rollout.slots=2")),
    ):
        directory.mkdir()
        shards = () if directory == first else ("controller.shards=1",)
        rows.append(
            runs.rows_of_recipe(
                "quickstart", directory, *OF_A_MODEL, *words, *shards, timeout_s=900
            )
        )
    lines = read_memberships(first / "run")
    assert any(cut.ends for line in lines for cut in line.cuts or ()), "no sample was cut"
    assert [row["digests"] for row in rows[0]] == [row["digests"] for row in rows[1]]
