"""Processes of a run are killed while it goes on: it ends, with the weights and the prompts of the undisturbed run."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

# The tests are imported by file (--import-mode=importlib), so the module beside this one is as well.
_spec = importlib.util.spec_from_file_location("local_runs", Path(__file__).with_name("local_runs.py"))
assert _spec is not None and _spec.loader is not None
runs = importlib.util.module_from_spec(_spec)
sys.modules["local_runs"] = runs
_spec.loader.exec_module(runs)

PROMPTS = 6


def config(steps: int, restarts: int) -> dict[str, Any]:
    found: dict[str, Any] = runs.job(
        run={"steps": steps, "deterministic": True}, checkpoint={"every": 1, "restarts": restarts}
    )
    found["roles"] = {"policy": {"use": "trouble/recording"}, "rollout": {"use": "fake", "slots": 2}}
    return found


def calm(directory: Path, steps: int) -> Any:
    code, run = runs.finish(directory, config(steps, 0))
    assert code == 0, run.output
    return run


def consumed(run: Any) -> dict[int, list[list[int]]]:
    """What each step trained on, by its lowest ordinal; of a step that was made twice, the latest."""
    return {min(ordinal for ordinal, _ in batch): batch for batch in run.batches()}


def latest_pids(run: Any) -> dict[str, int]:
    """Worker -> pid of its latest start. Those that have ended are left out."""
    told = (run.path / "logs" / "agent.0.log").read_text()
    found = {name: int(pid) for name, pid in re.findall(r"INFO (\S+) is started, pid (\d+)", told)}
    return {name: pid for name, pid in found.items() if Path(f"/proc/{pid}").exists()}


@pytest.mark.parametrize("victim", ["rollout.0", "rollout.1", "scorer.0"])
def test_a_killed_generator_or_scorer_is_started_again_and_nothing_is_lost(victim: str, tmp_path: Path) -> None:
    steps = 6
    still = calm(tmp_path / "calm", steps)
    with runs.running(tmp_path / "killed", config(steps, 0)) as run:
        run.read_until(f" 2/{steps} ")
        os.kill(latest_pids(run)[victim], signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert f"{victim} ended with signal SIGKILL; it is started again" in run.output
    assert run.weights() == still.weights()
    assert consumed(run) == consumed(still)


@pytest.mark.parametrize("victim", ["rollout.0", "scorer.0", "policy.0"])
def test_a_process_that_hangs_is_killed_with_its_waiter_told(victim: str, tmp_path: Path) -> None:
    steps = 6
    still = calm(tmp_path / "calm", steps)
    patient = config(steps, 1)
    patient["run"]["patience_s"] = 3.0
    with runs.running(tmp_path / "stopped", patient) as run:
        run.read_until(f" 2/{steps} ")
        os.kill(latest_pids(run)[victim], signal.SIGSTOP)
        assert run.wait() == 0, run.output
    assert re.search(rf"\S+ waits for {re.escape(victim)}: no sign of progress for 3 s in \w+", run.output)
    assert run.weights() == still.weights()
    assert consumed(run) == consumed(still)


@pytest.mark.parametrize("kills", [pytest.param(6, id="6"), pytest.param(30, id="30", marks=pytest.mark.slow)])
def test_whoever_is_killed_at_whatever_time_the_run_ends_as_if_nobody_had_been(kills: int, tmp_path: Path) -> None:
    steps, draw = 40 * kills, random.Random(kills)
    kinds = ["rollout.0", "rollout.1", "scorer.0", "policy.0", "controller.0", "controller.1"]
    still = calm(tmp_path / "calm", steps)
    victims = [kinds[i % len(kinds)] for i in range(kills)]
    draw.shuffle(victims)
    with runs.running(tmp_path / "killed", config(steps, kills)) as run:
        for victim in victims:
            run.read_until("step ")
            while victim not in latest_pids(run):  # the one killed before took it along, or it is being started
                run.read_until("step ")
            run.read_until("step ")
            os.kill(latest_pids(run)[victim], signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert run.weights() == still.weights()
    assert consumed(run) == consumed(still)
    position = json.loads((run.path / "position.json").read_text())
    assert position["next_ordinal"] == steps * PROMPTS
    ended = len(re.findall(r"ended with signal SIGKILL", run.output + (run.path / "logs/supervisor.log").read_text()))
    assert ended >= kills, "somebody was not killed: this tests nothing"
