"""Rewards code that the model wrote: 1 where it passes its row's tests, else 0.

The code runs confined (see ``confine``) or, unless ``allow_unconfined`` is set, not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.scorer import REASON_CHARACTERS, Score, ScoredRecord, failure
from gcore_rewards import confine
from gcore_rewards.config import CodeConfig
from gcore_rewards.interpreter import this_interpreter
from gcore_rewards.patterns import Pattern, SlowPattern, timed_out
from gcore_rewards.verifiers import shortened

log = logging.getLogger(__name__)
_PATIENCE_S = 20.0  # beyond the program's own time, for the confinement to start and to end
_MOST_LOOKED = 1 << 16  # rows whose tests are remembered


class NotConfined(Exception):
    """The program was not started, or did not end as it should.

    forbidden: because the system does not permit to confine it.
    """

    def __init__(self, why: str, *, forbidden: bool = False) -> None:
        super().__init__(why)
        self.forbidden = forbidden


@dataclass(frozen=True)
class Looked:
    """Says what a row's tests are.

    calls: of each test, the names of what it defines as a test and does not call.
    fault: why they test nothing; "" where they do.
    """

    calls: tuple[tuple[str, ...], ...] = ()
    fault: str = ""


class Confinement:
    """Runs programs, each confined, with the settings that all of them share."""

    def __init__(self, config: CodeConfig, *, confined: bool = True) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="g-core-code-")
        here = Path(__file__).parent
        self._time_s = config.time_s
        python = this_interpreter()
        self._command = [python.path, "-I", str(here / "confine.py")]
        self._environment = python.environment
        self._settings = {
            "confined": confined,
            "shows_errors": False,
            "python": python.path,
            "options": ["-I", "-B"],
            "environment": python.environment,
            "driver": str(here / "driver.py"),
            "readable": [*python.places, *config.readable],
            "time_s": config.time_s,
            "cpu_s": max(1, int(config.time_s)),
            "memory_mib": config.memory_mib,
            "files_mib": config.files_mib,
            "processes": config.processes,
            "open_files": 64,
        }

    def require(self) -> None:
        """Raises NotConfined where a program that should pass does not."""
        task = {"code": "x = 1", "tests": ["assert x == 1"], "calls": [[]]}
        word, output, in_time, errors = self._run(task, shows_errors=True)
        if not in_time:
            raise NotConfined(f"a program of one line did not end within {self._time_s:g} s")
        if output != word:
            last = errors.strip().rpartition("\n")[2]
            raise NotConfined(last or "a program that should pass does not")

    def passes(self, code: str, tests: Sequence[str], calls: Sequence[Sequence[str]] = ()) -> bool:
        """Returns whether the code, and then the tests, come to their end in time.

        calls: of each test, the names of what is called after it; (): nothing.
        Raises NotConfined when the program could not be started or ended as it should.
        """
        calls = calls or [()] * len(tests)
        word, output, in_time, _ = self._run({"code": code, "tests": tests, "calls": calls})
        return in_time and output == word

    def look(self, tests: Sequence[str]) -> Looked:
        """Looks whether tests fail for programs that do nothing, and what in them is to be called.

        Raises NotConfined.
        """
        word, output, in_time, _ = self._run({"code": None, "tests": tests})
        findings: dict[str, Any] = {}
        for line in output.splitlines():
            findings |= json.loads(line.removeprefix(word))
        # Tests that take too long for a program that does nothing do not pass it.
        fault = findings.get("fault", "they end the process" if in_time else "")
        return Looked(tuple(map(tuple, findings.get("calls", ()))), fault)

    def _run(
        self, task: Mapping[str, Any], *, shows_errors: bool = False
    ) -> tuple[bytes, bytes, bool, str]:
        """Gives the driver a task; returns (word, what it printed, whether it ended in time,
        errors).

        word: the driver prints it when the tests have ended. The code is not given it: a program
            that exits early has not passed, whatever its exit code says.
        shows_errors: whether the program's own errors are returned, which are dropped else.
        Raises NotConfined.
        """
        word = secrets.token_hex(16)
        with tempfile.TemporaryDirectory(dir=self._place.name) as base:
            settings = {**self._settings, "base": base, "shows_errors": shows_errors}
            process = subprocess.Popen(
                [*self._command, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                cwd=base,
                start_new_session=True,
            )
            try:
                output, written = process.communicate(
                    json.dumps({**task, "word": word}).encode(),
                    timeout=self._time_s + _PATIENCE_S,
                )
            except subprocess.TimeoutExpired as error:
                raise NotConfined("it did not end in time") from error
            finally:
                _end(process)
        errors = written.decode("utf-8", "replace").strip()
        code = process.returncode
        if code not in (0, confine.TIMED_OUT):
            why = errors or f"exit code {code}"
            raise NotConfined(why, forbidden=code == confine.FORBIDDEN)
        return word.encode(), output, code == 0, errors

    def close(self) -> None:
        self._place.cleanup()


class CodeReward:
    """Scores records by their tests; see ``gcore_core.contract.scorer.Scorer``.

    Raises ConfigError where programs cannot be confined and ``allow_unconfined`` is not set; one
    program is run at the start to find that out.
    """

    def __init__(self, config: CodeConfig, context: WorkerContext) -> None:
        self._config = config
        self._pattern = Pattern(config.pattern, config.pattern_s)
        self._confinement = Confinement(config)
        self._pool = ThreadPoolExecutor(config.parallel)
        self._looked: dict[bytes, Looked] = {}  # by the tests' hash
        try:
            self._confinement.require()
        except (NotConfined, OSError) as error:
            if not config.allow_unconfined:
                raise _not_confined(error) from error
            log.warning(
                "code that a model wrote runs unconfined, as allow_unconfined says: %s", error
            )
            self._confinement = Confinement(config, confined=False)

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Returns one score for each record; a failure where its row's tests test nothing."""
        tests = [_tests(record.prompt.fields.get(self._config.tests)) for record in records]
        # Each row's tests once, before any code runs: records of a group have the same.
        looks = dict(self._pool.map(self._look, {one for one in tests if one is not None}))
        looked = [None if one is None else looks[one] for one in tests]
        return list(self._pool.map(self._score, records, tests, looked))

    def close(self) -> None:
        self._pool.shutdown()
        self._confinement.close()

    def _look(self, tests: tuple[str, ...]) -> tuple[tuple[str, ...], Looked | str]:
        """Returns a row's tests with what they are, or with why that is not known."""
        key = hashlib.sha256("\0".join(tests).encode("utf-8", "surrogatepass")).digest()
        looked = self._looked.get(key)
        if looked is None:
            try:
                looked = self._confinement.look(tests)
            except (NotConfined, OSError) as error:
                return tests, str(error)
            if len(self._looked) >= _MOST_LOOKED:
                self._looked.clear()
            self._looked[key] = looked
        return tests, looked

    def _score(
        self, record: ScoredRecord, tests: tuple[str, ...] | None, looked: Looked | str | None
    ) -> Score:
        if tests is None or looked is None:
            return self._refused(record, _shape(record, self._config.tests))
        if isinstance(looked, Looked) and looked.fault:
            return self._refused(record, looked.fault)
        try:
            code = self._pattern.part(record.text)
        except SlowPattern as error:
            return timed_out(error)
        if code is None:
            return Score(value=0.0)
        try:
            if isinstance(looked, str):
                raise NotConfined(looked)
            passed = self._confinement.passes(code, tests, looked.calls)
        except (NotConfined, OSError) as error:
            return failure(f"the code could not be run: {error}"[:REASON_CHARACTERS])
        return Score(value=float(passed))

    def _refused(self, record: ScoredRecord, why: str) -> Score:
        what = f"row {record.prompt.row} has no tests in field {self._config.tests!r}; {why}"
        return failure(what[:REASON_CHARACTERS])


def _not_confined(error: Exception) -> ConfigError:
    """Returns the error for a machine or an interpreter on which no program was confined."""
    if isinstance(error, NotConfined) and error.forbidden:
        todo = (
            "run as root or allow user name spaces (sysctl user.max_user_namespaces); in a "
            "container of its own, set allow_unconfined: true"
        )
    elif "Permission denied" in str(error) and os.geteuid() == 0:
        todo = (
            f"the code runs as the user nobody: let it read {sys.prefix}, and what readable names "
            "(chmod -R o+rX)"
        )
    else:
        todo = (
            "name in readable what else the interpreter needs, and leave it enough time_s, "
            f"memory_mib and files_mib; it is {sys.executable}"
        )
    return ConfigError(
        "code that a model wrote cannot be confined here, so it is not run.",
        where="rewards/code",
        why=str(error)[:REASON_CHARACTERS],
        todo=todo,
    )


def _tests(field: Any) -> tuple[str, ...] | None:
    """Returns the tests in a row's field; None where it is no text and no list of texts.

    A list may be written as one text of JSON, as files without lists have it. As Python, such a
    text would be a value, which raises nothing.
    """
    tests = [field] if isinstance(field, str) else field
    if isinstance(field, str) and field.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            tests = json.loads(field)
    if isinstance(tests, list) and tests and all(_is_text(test) for test in tests):
        return tuple(tests)
    return None


def _shape(record: ScoredRecord, field: str) -> str:
    """What a row has in place of tests."""
    tests = record.prompt.fields.get(field)
    if tests is None:
        return f"it has: {', '.join(record.prompt.fields) or 'none'}"
    return f"{shortened(tests)!r} is neither Python nor a list of it"


def _is_text(test: Any) -> bool:
    return isinstance(test, str) and bool(test.strip())


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the program's process group, and closes its pipes.

    Only an unconfined program can leave processes behind. It leads a group of its own, so nothing
    else is hit.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
