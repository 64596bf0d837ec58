"""What users wrote is called in the main thread, where signals and event loops of its own work.

What cannot work elsewhere ends the run, also where the function hides the error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

HIDES = '''
"""Providers that set a time limit in a thread, and hide that Python does not allow it."""
import contextlib, signal, threading

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.scorer import Score
from gcore_testing import fake


def limit():
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)


class Waits:
    """A reward that is called on the event loop of its worker."""

    def __init__(self, config, context):
        pass

    async def score(self, records):
        limit()
        return [Score(value=0.0)] * len(records)


class Teaches(fake.FakeAnnotator):
    def annotate(self, records):
        thread = threading.Thread(target=limit)
        thread.start()
        thread.join()
        return super().annotate(records)


@hookimpl
def gcore_rewards():
    yield p.RewardProvider(name="waits", summary="-", factory="hides:Waits")


@hookimpl
def gcore_roles():
    yield p.RoleProvider(
        name="teacher", summary="-", kind="annotator", columns=("teacher_logp",)
    )


@hookimpl
def gcore_annotators():
    yield p.AnnotatorProvider(
        name="teaches", summary="-", factory="hides:Teaches", config=fake.FakeAnnotatorConfig
    )
'''

LAUNCHERS = pytest.mark.parametrize("launcher", ["core/local", "core/inline"])

REWARDS = '''
"""Rewards that are 1.0 where something works, and hide it where it does not."""
import asyncio, multiprocessing, signal, threading, time
from concurrent.futures import ThreadPoolExecutor


def hidden(work):
    def reward(record):
        try:
            return float(work())
        except Exception:
            return 0.0

    return reward


def limited(work, seconds=60.0):
    """Bounds itself by an alarm, as graders do."""

    def ring(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(1) if seconds == 1 else signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def rings(seconds):
    try:
        limited(lambda: time.sleep(60), seconds)
    except TimeoutError:
        return True


async def answer():
    await asyncio.sleep(0)
    return 1.0


def in_processes(how):
    with multiprocessing.get_context(how).Pool(1) as pool:
        return pool.map(abs, [-1]) == [1]


one_at_a_time = asyncio.Lock()


async def awaits(record):
    loop = asyncio.get_running_loop()
    rung = asyncio.Event()
    async with one_at_a_time:
        loop.add_signal_handler(signal.SIGALRM, rung.set)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        await rung.wait()
        return float(loop.remove_signal_handler(signal.SIGALRM))


def pooled(record):
    """Divides the work over threads, in which no handler can be set."""
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(hidden(lambda: limited(lambda: 1.0)), [record]))


within = hidden(lambda: limited(lambda: 1.0))
alarm = hidden(lambda: rings(1))
timer = hidden(lambda: rings(0.01))
loop = hidden(lambda: asyncio.run(answer()))
forked = hidden(lambda: in_processes("fork"))
spawned = hidden(lambda: in_processes("spawn"))
handler_at_import = signal.signal(signal.SIGUSR2, lambda number, frame: None)
at_import = hidden(lambda: signal.getsignal(signal.SIGUSR2) is not handler_at_import)
'''

WORKS = ["within", "timer", "loop", "awaits", "at_import"]
COSTS_SECONDS = ["alarm", "forked", "spawned"]

STRICT = '''
"""Fakes that refuse to be called anywhere but in the main thread, without an event loop."""
import asyncio, functools, inspect, threading

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_testing import fake


def noted(what):
    assert threading.current_thread() is threading.main_thread(), f"{what}: not the main thread"
    asyncio.run(asyncio.sleep(0))
    with open("called.txt", "a") as file:
        print(what, file=file)


def strict(cls):
    def wrapped(name, method):
        @functools.wraps(method)
        def call(self, *args, **kwargs):
            noted(f"{cls.__name__}.{name}")
            return method(self, *args, **kwargs)

        return call

    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_") or name in ("__init__", "__getitem__"):
            setattr(cls, name, wrapped(name, method))
    return cls


@strict
class Data(fake.FakeDataset):
    pass


@strict
class Draws(fake.FakeGenerator):
    pass


@strict
class Trains(fake.FakeTrainer):
    pass


@strict
class Teaches(fake.FakeAnnotator):
    pass


@strict
class Scores(fake.FakeScorer):
    pass


@strict
class Observes(fake.FakeObserver):
    pass


def others(kind, name):
    """Returns what the plugin fake offers of a kind, made by a class of here."""
    (provider,) = getattr(fake, f"gcore_{kind}")()
    changes = {"factory": f"strict:{name}", "name": name.lower()}
    return [type(provider)(**{**vars(provider), **changes})]


@hookimpl
def gcore_datasets():
    return others("datasets", "Data")


@hookimpl
def gcore_generators():
    return others("generators", "Draws")


@hookimpl
def gcore_trainers():
    return others("trainers", "Trains")


@hookimpl
def gcore_annotators():
    return others("annotators", "Teaches")


@hookimpl
def gcore_roles():
    yield p.RoleProvider(
        name="teacher", summary="-", kind="annotator", columns=("teacher_logp",)
    )


@hookimpl
def gcore_rewards():
    return others("rewards", "Scores")


@hookimpl
def gcore_observers():
    return others("observers", "Observes")


@hookimpl
def gcore_run_start(run):
    noted("hook run_start")


@hookimpl
def gcore_step_end(run, report):
    noted("hook step_end")


@hookimpl
def gcore_run_end(run, error):
    noted("hook run_end")
'''


def scored(directory: Path, launcher: str, *names: str, steps: int = 1) -> tuple[int, runs.Run]:
    """Runs a job with the rewards of these names: (exit code, run)."""
    directory.mkdir(exist_ok=True)
    (directory / "rewards.py").write_text(REWARDS)
    config = runs.job(
        run={"steps": steps},
        launcher={"use": launcher},
        controller={"shards": 1, "config": {"prompts": 1}},
    )
    config["rewards"] = {
        name: {"use": "core/function", "config": {"path": "rewards.py", "name": name}}
        for name in names
    }
    return runs.finish(directory, config)


@pytest.mark.protects
@LAUNCHERS
@pytest.mark.parametrize("names", [WORKS, COSTS_SECONDS], ids=["quick", "slow"])
def test_a_function_has_signals_timers_event_loops_and_processes(
    launcher: str, names: list[str], tmp_path: Path
) -> None:
    code, run = scored(tmp_path, launcher, *names)
    assert code == 0, run.output
    row = run.metrics()[-1]
    assert {name: row[f"reward/{name}"] for name in names} == dict.fromkeys(names, 1.0)


@LAUNCHERS
def test_a_time_limit_in_a_thread_ends_the_run_although_the_function_hides_the_error(
    launcher: str, tmp_path: Path
) -> None:
    code, run = scored(tmp_path, launcher, "within", "pooled")
    assert code == 3, run.output
    line = 1 + REWARDS.splitlines().index("    before = signal.signal(signal.SIGALRM, ring)")
    assert "rewards.pooled: a time limit by SIGALRM was set in the thread" in run.output
    assert f"rewards.py:{line}" in run.output


@LAUNCHERS
@pytest.mark.parametrize("where", ["rewards.letters", "teacher.0"])
def test_a_time_limit_beside_the_main_thread_ends_the_run_whoever_sets_it(
    where: str, launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "hides.py").write_text(HIDES)
    config = runs.job(launcher={"use": launcher})
    config["local"] = [*config["local"], "hides.py"]
    if where == "teacher.0":
        config["roles"]["policy"] = {"use": "fake", "config": {"toward": "teacher_logp"}}
        config["roles"]["teacher"] = {"use": "hides/teaches"}
    else:
        config["rewards"] = {"letters": {"use": "hides/waits"}}
    code, run = runs.finish(tmp_path, config)
    assert code == 3, run.output
    line = 1 + HIDES.splitlines().index("        signal.signal(signal.SIGALRM, signal.SIG_IGN)")
    assert f"{where}: a time limit by SIGALRM was set in the thread" in run.output
    assert f"hides.py:{line}" in run.output


@LAUNCHERS
def test_everything_of_a_plugin_is_called_in_the_main_thread(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text(STRICT)
    config: dict[str, Any] = runs.job(
        launcher={"use": launcher},
        data={"use": "strict/data"},
        evaluation={"every": 1, "prompts": 4, "data": {"use": "strict/data"}},
        checkpoint={"every": 1},
        rewards={"letters": {"use": "strict/scores"}},
        observers={"one": {"use": "strict/observes"}},
    )
    config["roles"] = {
        "policy": {"use": "strict/trains", "config": {"toward": "teacher_logp"}},
        "rollout": {"use": "strict/draws"},
        "teacher": {"use": "strict/teaches"},
    }
    config["local"] = [*config["local"], "strict.py"]
    code, run = runs.finish(tmp_path, config)
    assert code == 0, run.output
    called = set((tmp_path / "called.txt").read_text().splitlines())
    assert called >= {
        *("Data.__init__", "Data.__getitem__", "Draws.__init__", "Draws.submit", "Draws.step"),
        *("Draws.load_weights", "Trains.__init__", "Trains.prepare", "Trains.train"),
        *("Trains.begin_save", "Trains.save_pretrained", "Teaches.annotate", "Scores.score"),
        *("Observes.__init__", "Observes.step_end"),
        *("hook run_start", "hook step_end", "hook run_end"),
    }
    assert json.loads((run.path / "samples" / "step_000001.jsonl").read_text().splitlines()[0])


ENDS = """
import os, sys

def kept(record):
    {end}
"""


@pytest.mark.protects
@LAUNCHERS
@pytest.mark.parametrize("end", ["os._exit(0)", "os._exit(4)"])
def test_a_reward_that_ends_its_process_ends_the_run_as_a_failure_that_says_so(
    end: str, launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(ENDS.format(end=end))
    config = runs.job(launcher={"use": launcher})
    config["rewards"] = {
        "kept": {"use": "core/function", "config": {"path": "rewards.py", "name": "kept"}}
    }
    code, run = runs.finish(tmp_path, config)
    assert code == 5, run.output
    assert f"ended with exit code {end[-2]}" in run.output
    cause = "has called os._exit" if launcher == "core/inline" else "rewards.kept was being called"
    assert cause in run.output
    assert str(run.path) in run.output


LEAVES = """
import sys

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_testing import fake


class Leaves(fake.FakeDataset):
    def __getitem__(self, index):
        sys.exit(0)


@hookimpl
def gcore_datasets():
    yield p.DatasetProvider(
        name="leaves", summary="-", factory="leaves:Leaves", config=fake.FakeDataConfig
    )
"""


@pytest.mark.parametrize("launcher", ["core/local", "core/inline"])
def test_data_that_ask_the_process_to_end_end_the_run_as_a_failure_that_names_the_line(
    launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    config = runs.job(launcher={"use": launcher})
    config["local"] = [*config["local"], "leaves.py"]
    config["data"] = {"use": "leaves/leaves"}
    code, run = runs.finish(tmp_path, config)
    assert code == 3, run.output
    assert "SystemExit(0)" in run.output and "leaves.py:11" in run.output
    assert "SystemExit(0)" in runs.checked(tmp_path, config)
