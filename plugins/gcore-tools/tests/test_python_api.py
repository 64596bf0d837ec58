"""Runs that a Python session starts: in processes of their own, told and stopped from here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gcore
import pytest
from gcore_testing import fake

from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.scorer import ScoredRecord
from tests.support.runs import PATIENCE_S, REPOSITORY

FAKE: dict[str, Any] = {
    "run": {"steps": 2, "seed": 3},
    "launcher": {"use": "core/inline"},
    "controller": {"config": {"prompts": 4}},
    "evaluation": {"every": 1, "prompts": 2, "show": 2},
    "advantage": {"use": "fake"},
    "objective": {"use": "fake"},
    "roles": {"policy": {"use": "fake"}, "rollout": {"use": "fake"}},
    "plugins": ["report"],
    "local": [fake.__file__],
}
ROWS = [{"prompt": f"row {i}", "letter": "a"} for i in range(8)]


def letters(record: ScoredRecord) -> float:
    return record.text.count(record.prompt.fields["letter"]) / max(1, len(record.text))


def train(**changes: Any) -> Any:
    given = {"model": None, "reward": letters, "data": ROWS, "evaluation": ROWS, "algorithm": FAKE}
    return gcore.train(**{**given, **changes})


@pytest.mark.protects
def test_a_call_trains_and_its_run_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = train()
    printed = capsys.readouterr().out
    assert "step 2/2" in printed and "weights_sha256" in printed
    assert (run.dir, run.steps) == (tmp_path / "runs" / "train" / "001", 2)
    assert run.config["run"]["steps"] == 2 and "seed: 3" in run.yaml
    assert [row["step"] for row in run.samples()] == [0] * 4 + [1] * 4 + [2] * 4
    assert {"prompt", "text", "rewards"} <= run.samples(1)[0].keys()
    assert "# train" in run.summary
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    pandas = pytest.importorskip("pandas")
    assert isinstance(run.metrics, pandas.DataFrame)
    assert run.metrics.index.tolist() == [0, 1, 2]
    assert run.metrics["reward"].loc[1:].tolist() == [r["metrics"]["reward"] for r in run.rows[1:]]
    assert run.metrics["evaluation/greedy/letters"].notna().all()
    # the command line's run of the same job has the same weights, and a second call works
    job = run.dir / "job" / "job.yaml"
    again = gcore.run(job, run__dir=str(tmp_path / "again"))
    assert (again.weights / "logits.json").read_bytes() == (
        run.weights / "logits.json"
    ).read_bytes()
    assert gcore.load("again").rows[-1]["metrics"]["reward"] == run.rows[-1]["metrics"]["reward"]
    with pytest.raises(ConfigError, match="does not say how its weights are opened"):
        run.policy()


def bounded(record: ScoredRecord) -> float:
    """Bounds itself as graders do, and counts each error as a wrong answer."""
    try:
        before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    except Exception:
        return 0.0
    return 1.0


def test_a_call_in_a_thread_trains_and_its_functions_have_the_main_thread_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server makes it that answers requests in threads: the run is another process."""
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(train, reward=bounded).result()
    assert [row["metrics"]["reward"] for row in run.rows[1:]] == [1.0, 1.0]


def test_an_error_of_the_run_is_raised_here_as_it_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no field 'question'") as caught:
        train(data__config__prompt="question")
    assert caught.value.todo == "set data.config.prompt to the field that holds the prompt"


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        gcore.load(tmp_path)


SCRIPT = f"""
import signal
import gcore

ROWS = {ROWS!r}
FAKE = {FAKE!r}

def slow(record):
    import time
    time.sleep(0.05)
    return 1.0

if __name__ == "__main__":
    # a script in the background of a shell ignores Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # its run must not: it gets this signal when the script is gone
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        gcore.train(model=None, reward=slow, data=ROWS, algorithm=FAKE, run__steps=1000,
                    checkpoint={{"every": 1000}}, launcher__use="core/local", plugins=[])
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_a_run_ends_with_its_session(how: str, tmp_path: Path) -> None:
    """Ctrl-C saves its state, and so does the end of the process that began it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-u", "script.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(PATIENCE_S, process.kill)  # reading would else wait for ever
    watchdog.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if re.match(r"step +1/", line):
                break
        process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
        rest = process.stdout.read()
        process.wait(60)
    finally:
        watchdog.cancel()
        process.kill()
    run = tmp_path / "runs" / "train" / "001"
    if how == "interrupt":
        assert "interrupted" in rest and "g-core resume" in rest
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list((run / "checkpoints").glob("step-*")):
        time.sleep(0.1)
    assert list((run / "checkpoints").glob("step-*"))
    record = run / "logs" / "processes.json"  # there as long as a process may be left
    while time.monotonic() < deadline and record.exists():
        time.sleep(0.1)
    assert not record.exists()
