"""Counts what must be learned before a change: the code of the core that one event enters.

The step: one prompt, from the beginning of ``SynchronousController.step`` to its end, in the
program that ``launcher.use: core/inline`` runs in one process. The kill: a simulated run of one
step in which one generator is killed while it draws, and the same run without the kill.

A function counts once, with what is defined in it apart; comprehensions and lambdas count with
their function. A class counts when a method that it defines is entered. Code that is made when a
class is, such as the ``__init__`` of a dataclass, is not seen.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from gcore_testing.simulation import SimulatedJob, run_virtual, simulate
from step_costs import Even

from gcore_core import cli
from gcore_core.controllers.synchronous import SynchronousController

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "gcore_core"
FAKE = ROOT / "plugins" / "gcore-testing" / "gcore_testing" / "fake.py"


@dataclass(frozen=True)
class Walk:
    """Names what was entered.

    functions: (module, qualified name).
    classes: (module, qualified name), of each whose method was entered.
    modules: files, relative to the core.
    """

    functions: frozenset[tuple[str, str]] = frozenset()
    classes: frozenset[tuple[str, str]] = frozenset()
    modules: frozenset[str] = frozenset()

    def beyond(self, other: Walk) -> Walk:
        """Returns what the other walk has not entered."""
        return Walk(
            functions=self.functions - other.functions,
            classes=self.classes - other.classes,
            modules=self.modules - other.modules,
        )


def walk_of(entered: Collection[tuple[str, str]]) -> Walk:
    """Returns the walk through some functions.

    entered: (module, qualified name) of each, as the interpreter names it.
    """
    functions = set[tuple[str, str]]()
    for module, name in entered:
        words = name.split(".<locals>.")
        while words[1:] and words[-1].startswith("<"):
            words.pop()  # a comprehension or a lambda
        functions.add((module, ".".join(words)))
    classes = {
        (module, owner)
        for module, name in entered
        for owner, _, _ in [name.split(".<locals>.")[0].rpartition(".")]
        if owner
    }
    return Walk(
        functions=frozenset(functions),
        classes=frozenset(classes),
        modules=frozenset(module for module, _ in functions),
    )


@dataclass
class Recorder:
    """Records which code of the kernel is entered while it is on.

    on: whether it records.
    """

    on: bool = False
    _codes: set[CodeType] = field(default_factory=set)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Has the interpreter tell of every call, in this thread and in those that begin."""
        sys.setprofile(self._told)
        threading.setprofile(self._told)
        try:
            yield
        finally:
            threading.setprofile(None)
            sys.setprofile(None)

    def _told(self, frame: FrameType, event: str, argument: Any) -> None:
        # The bodies of modules and classes are not optimized: what is imported is not entered.
        if self.on and event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            self._codes.add(frame.f_code)

    def walk(self) -> Walk:
        """Returns what was entered."""
        files = {code: Path(code.co_filename) for code in self._codes}
        return walk_of(
            [
                (file.relative_to(CORE).as_posix(), code.co_qualname)
                for code, file in files.items()
                if file.is_relative_to(CORE)
            ]
        )


def walk_of_step() -> Walk:
    """Returns what one prompt enters from the beginning of a step to its end, in one process.

    What a first run alone enters, as it fills caches, is not in it.
    """
    _walk_of_step()
    return _walk_of_step()


def walk_of_kill(kills: bool) -> Walk:
    """Returns what a simulated run of one step enters; likewise.

    kills: whether its first generator is killed at its third answer.
    """
    _walk_of_kill(kills)
    return _walk_of_kill(kills)


def _walk_of_step() -> Walk:
    recorder = Recorder()
    step = SynchronousController.step

    async def recorded(self: SynchronousController, number: int) -> bool:
        recorder.on = True
        try:
            return await step(self, number)
        finally:
            recorder.on = False

    job = {
        "run": {"name": "walk", "steps": 1},
        "launcher": {"use": "core/inline"},
        "controller": {"config": {"prompts": 1}},
        "data": {"use": "fake"},
        "advantage": {"use": "fake"},
        "objective": {"use": "fake"},
        "roles": {"policy": {"use": "fake"}, "rollout": {"use": "fake"}},
        "rewards": {"letters": {"use": "fake"}},
        "local": [str(FAKE)],
    }
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as until_end:
        file = Path(folder) / "job.yaml"
        file.write_text(json.dumps(job))  # JSON is YAML
        SynchronousController.step = recorded  # type: ignore[method-assign]
        until_end.callback(setattr, SynchronousController, "step", step)
        until_end.enter_context(contextlib.redirect_stdout(printed))
        until_end.enter_context(recorder.installed())
        code = cli.main(["run", str(file), f"run.dir={folder}/run"])
    if code:
        raise RuntimeError(f"the inline run ended with {code}: {printed.getvalue()}")
    return recorder.walk()


def _walk_of_kill(kills: bool) -> Walk:
    job = SimulatedJob(
        shards=1, scorers=1, steps=1, prompts=4, samples=2, minibatches=1, evaluate_prompts=0
    )
    recorder = Recorder(on=True)
    weather = Even(3 if kills else 0)
    with tempfile.TemporaryDirectory() as folder, recorder.installed():
        run_virtual(simulate(job, Path(folder) / "store", weather))
    if sum(weather.hits.values()) != kills:
        raise RuntimeError("the generator was not killed once")
    return recorder.walk()
