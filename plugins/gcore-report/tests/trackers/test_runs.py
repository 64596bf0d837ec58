"""Runs of fakes with trackers: the tracker's own store, read back, holds what metrics.jsonl holds,
also after the run went back to a checkpoint and after it was resumed by another process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from gcore_report.trackers import kept

from gcore_core.contract import run_files
from tests.integration.test_resume import resume
from tests.support import runs, tracker_stores

pytestmark = pytest.mark.rest

PROJECT = "tested"
STEPS = 3
SECRET = "key-that-nobody-may-see-0123456789abcdef"
NAMES = ("wandb", "mlflow", "trackio")


def job(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A short job with every tracker; each has a store below ``tmp_path``."""
    sections = {
        "run": {"steps": STEPS},
        "controller": {"shards": 1},
        "checkpoint": {"every": 1},
        "evaluation": {"every": 2, "prompts": 4, "data": {"use": "fake"}},
    }
    settings: dict[str, dict[str, Any]] = {
        "wandb": {"mode": "offline"},
        "mlflow": {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"},
        "trackio": {"store": str(tmp_path / "trackio")},
    }
    observers = {
        name: {
            "use": f"trackers/{name}",
            "config": {"project": PROJECT, "checkpoints": True, **settings[name]},
        }
        for name in NAMES
    }
    return runs.job(**{**sections, **changes}) | {"observers": observers}


class Tracked:
    """A run whose trackers' stores are read back."""

    def __init__(self, tmp_path: Path, run: runs.Run) -> None:
        self.place = tmp_path
        self.run = run
        self.expected = tracker_stores.metrics_file_rows(run_files.read_metrics(run.path))

    def wandb(self) -> list[Path]:
        return tracker_stores.wandb_files(self.run.path)

    def mlflow(self) -> tuple[Any, Any]:
        return tracker_stores.mlflow_run(f"sqlite:///{self.place}/mlflow.db", PROJECT)

    def trackio(self) -> tuple[tracker_stores.Rows, list[Any]]:
        was = kept.read(self.run.path, "trackio")
        assert was is not None
        return tracker_stores.trackio_rows(PROJECT, was.id)

    def rows(self, name: str) -> tracker_stores.Rows:
        if name == "wandb":
            return tracker_stores.wandb_rows(self.wandb())
        return tracker_stores.mlflow_rows(*self.mlflow()) if name == "mlflow" else self.trackio()[0]

    def assert_holds_the_metrics(self, name: str) -> None:
        assert tracker_stores.same(self.rows(name), self.expected), self.run.output


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in NAMES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"missing: pip install 'gcore-report[{','.join(missing)}]'")
    folder = tmp_path_factory.mktemp("tracked")
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    # trackio reads that when it is imported. Another file's tests may have imported it before.
    for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        del sys.modules[module]
    return folder


@pytest.fixture(scope="module")
def tracked(place: Path) -> Tracked:
    surroundings = {
        "WANDB_API_KEY": SECRET,
        # as where a process has used W&B, started a run and ended W&B's own process
        "WANDB_SERVICE": "3-1-unix-/no/process/listens/here",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in surroundings.items():
            patch.setenv(name, value)
        code, run = runs.finish(place / "run", job(place))
    assert code == 0, run.output
    assert "observers." not in run.output, run.output
    return Tracked(place, run)


@pytest.mark.parametrize("name", NAMES)
def test_the_store_of_a_tracker_holds_what_the_metrics_file_holds(
    name: str, tracked: Tracked
) -> None:
    tracked.assert_holds_the_metrics(name)
    assert len(tracked.expected) == STEPS + 1


def test_wandb_has_configuration_samples_files_and_checkpoints(tracked: Tracked) -> None:
    records = [r for file in tracked.wandb() for r in tracker_stores.wandb_records(file)]
    (started, *_) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["run"]["steps"] == STEPS and config["data"]["use"] == "fake"
    tables = [row for row in tracker_stores.wandb_history(tracked.wandb()) if "samples" in row]
    shown = [row["samples"] for row in tables]
    assert [row["step"] for row in tables] == [0, 2, 3]
    assert all(table["_type"] == "table-file" for table in shown)
    media = tracked.wandb()[0].parent / "files" / shown[-1]["path"]
    table = json.loads(media.read_text())
    assert [
        dict(zip(table["columns"], row, strict=True)) for row in table["data"]
    ] == expected_samples(tracked, 3)
    artifacts = [r.request.log_artifact.artifact for r in records if r.HasField("request")]
    artifacts += [r.artifact for r in records if r.WhichOneof("record_type") == "artifact"]
    kinds = [artifact.type for artifact in artifacts if artifact.type]
    assert kinds.count("checkpoint") == STEPS and "weights" in kinds and "run-files" in kinds


def test_mlflow_has_configuration_samples_files_and_checkpoints(tracked: Tracked) -> None:
    client, run = tracked.mlflow()
    assert run.data.params["run.steps"] == str(STEPS) and run.info.status == "FINISHED"
    assert run.info.run_name == "fake-001"
    local = Path(client.download_artifacts(run.info.run_id, ""))
    metrics = (tracked.run.path / "metrics.jsonl").read_bytes()
    assert (local / "metrics.jsonl").read_bytes() == metrics
    saved = sorted(path.name for path in (local / "checkpoint").iterdir())
    assert saved == ["step-000001", "step-000002", "step-000003"]
    assert (local / "weights" / "step-000003" / "logits.json").is_file()
    tables = sorted((local / "samples").iterdir())
    assert [table.name[:11] for table in tables] == ["step_000000", "step_000002", "step_000003"]
    table = json.loads(tables[-1].read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert rows == expected_samples(tracked, 3)


def test_trackio_has_configuration_samples_files_and_checkpoints(tracked: Tracked) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    was = kept.read(tracked.run.path, "trackio")
    assert was is not None
    config = SQLiteStorage.get_run_config(PROJECT, was.id) or {}
    assert config["run"]["steps"] == STEPS
    _, tables = tracked.trackio()
    assert tables[-1]["_value"] == expected_samples(tracked, 3)
    (record,) = [r for r in SQLiteStorage.get_run_records(PROJECT) if r["name"] == was.id]
    artifacts = SQLiteStorage.get_run_artifacts(PROJECT, was.id, record["id"])
    names = [str(one["name"]) for one in artifacts["output"]]
    assert {name.rpartition("-")[2] for name in names} == {"checkpoint", "weights", "files"}


def expected_samples(tracked: Tracked, step: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "mode": row["mode"],
            "prompt": row["prompt"],
            "text": row["text"],
            "rewards": json.dumps(row["rewards"]),
            "status": row["status"],
        }
        for row in run_files.read_samples(tracked.run.path, step)
    ]


def test_no_key_of_the_environment_is_in_any_file_of_the_run_or_of_a_store(
    tracked: Tracked,
) -> None:
    files = [path for path in tracked.place.rglob("*") if path.is_file()]
    assert len(files) > 30
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


@pytest.mark.slow
def test_a_run_that_goes_back_and_is_resumed_stays_one_run_of_every_tracker(place: Path) -> None:
    """A trainer that is killed sends the run back to a checkpoint; then the supervisor is killed.
    What a tracker has not heard then, it is told when the run is resumed.
    """
    steps = 20
    changes = {"run": {"steps": steps}, "checkpoint": {"every": 2, "restarts": 1}}
    changed = job(place, **changes)
    for node in changed["observers"].values():
        node["config"]["project"] = "resumed"
        node["config"]["checkpoints"] = False
    with runs.running(place / "resumed", changed) as run:
        run.read_until(f" 5/{steps} ")
        os.kill(run.pids()["policy.0"], signal.SIGKILL)
        run.read_until("the run goes on from step")
        run.read_until(f" 9/{steps} ")
        supervisor = run.supervisor()
        run.process.kill()
        os.kill(supervisor, signal.SIGKILL)
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "observers." not in done.stdout + done.stderr
    tracked = Tracked(place, run)
    assert sorted(tracked.expected) == list(range(steps + 1))
    files = tracked.wandb()
    assert len({file.name for file in files}) == 1, "W&B joins them by the id"
    counted = [row["_step"] for row in tracker_stores.wandb_history(files)]
    assert counted == sorted(set(counted)), "W&B drops rows whose own step does not rise"
    for name in NAMES:
        assert tracker_stores.same(_numbers(tracked, name), tracked.expected), name


def _numbers(tracked: Tracked, name: str) -> tracker_stores.Rows:
    """Returns the rows of the only run of the project "resumed"."""
    if name == "wandb":
        return tracker_stores.wandb_rows(tracked.wandb())
    if name == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        (only,) = SQLiteStorage.get_runs("resumed")
        return tracker_stores.trackio_rows("resumed", only)[0]
    uri = f"sqlite:///{tracked.place}/mlflow.db"
    return tracker_stores.mlflow_rows(*tracker_stores.mlflow_run(uri, "resumed"))


@pytest.mark.slow
def test_a_tracker_that_is_chosen_when_a_run_is_resumed_has_all_of_its_steps(place: Path) -> None:
    without = job(place / "late") | {"observers": {}}
    code, run = runs.finish(place / "late", without)
    assert code == 0, run.output
    settings = f"{{use: trackers/mlflow, config: {{tracking_uri: 'sqlite:///{place}/late.db'}}}}"
    done = resume(run, "run.steps=5", f"observers={{mlflow: {settings}}}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = tracker_stores.mlflow_rows(
        *tracker_stores.mlflow_run(f"sqlite:///{place}/late.db", "g-core")
    )
    expected = tracker_stores.metrics_file_rows(run_files.read_metrics(run.path))
    assert sorted(rows) == list(range(6)) and tracker_stores.same(rows, expected)


#: Packages that raise when they are imported, and once their run is open.
BROKEN = {
    "wandb": "raise RuntimeError('this package is broken')",
    "trackio": """
class Run:
    def log(self, metrics, step): raise RuntimeError("this package is broken")
def init(**words): return Run()
""",
}


@pytest.mark.slow
def test_trackers_that_fail_leave_the_run_whole_and_are_told_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One package fails when it is imported, one at the first row, one has no place."""
    folder = place / "failing"
    folder.mkdir()
    for name, code in BROKEN.items():
        (folder / f"{name}.py").write_text(code)
    (folder / "no-directory").touch()
    changed = job(place)
    uri = f"sqlite:///{folder}/no-directory/mlflow.db"
    changed["observers"]["mlflow"]["config"]["tracking_uri"] = uri
    code, run = runs.finish(folder, changed)
    assert code == 0, run.output
    assert [row["step"] for row in run_files.read_metrics(run.path)] == list(range(STEPS + 1))
    for name in NAMES:
        assert run.output.count(f"observers.{name}: ") == 1, run.output
        log = (run.path / "logs" / f"observer.{name}.log").read_text()
        assert "Traceback" in log, log
    assert run.output.count("this package is broken") == 2
    assert run.output.count("the run goes on without it") == 3
