"""Rewards code that the model wrote: 1 where it passes its row's tests, else 0.

The code runs confined (see ``confine``) or, unless ``allow_unconfined`` is set, not at all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.scorer import REASON_CHARACTERS, Score, ScoredRecord, failure
from gcore_rewards import confine
from gcore_rewards.config import CodeConfig
from gcore_rewards.patterns import Pattern, SlowPattern, timed_out

log = logging.getLogger(__name__)
_PATIENCE_S = 20.0  # beyond the program's own time, for the confinement to start and to end


class NotConfined(Exception):
    """The program was not started, because it could not be confined."""


class Confinement:
    """Runs programs, each confined, with the settings that all of them share."""

    def __init__(self, config: CodeConfig, *, confined: bool = True) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="g-core-code-")
        here = Path(__file__).parent
        self._confine = here / "confine.py"
        self._time_s = config.time_s
        self._settings = {
            "confined": confined,
            "python": sys.executable,
            "driver": str(here / "driver.py"),
            "readable": [*dict.fromkeys((sys.prefix, sys.base_prefix)), *config.readable],
            "time_s": config.time_s,
            "cpu_s": max(1, int(config.time_s)),
            "memory_mib": config.memory_mib,
            "files_mib": config.files_mib,
            "processes": config.processes,
        }

    def passes(self, code: str, tests: Sequence[str]) -> bool:
        """Returns whether the code, and then the tests, come to their end in time.

        Raises NotConfined when the program could not be started or ended as it should.
        """
        # The driver prints this word, which the code is not given, when the tests have ended: a
        # program that exits early has not passed, whatever its exit code says.
        word = secrets.token_hex(16)
        task = json.dumps({"code": code, "tests": list(tests), "word": word})
        with tempfile.TemporaryDirectory(dir=self._place.name) as base:
            command = [
                sys.executable,
                "-I",
                str(self._confine),
                json.dumps({**self._settings, "base": base}),
            ]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd=base,
                start_new_session=True,
            )
            try:
                output, why = process.communicate(
                    task.encode("utf-8", "replace"), timeout=self._time_s + _PATIENCE_S
                )
            except subprocess.TimeoutExpired as error:
                raise NotConfined("it did not end in time") from error
            finally:
                _end(process)
        if process.returncode not in (0, confine.TIMED_OUT):
            raise NotConfined(
                why.decode("utf-8", "replace").strip() or f"exit code {process.returncode}"
            )
        return process.returncode == 0 and output == word.encode()

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
        try:
            if not self._confinement.passes("x = 1", ["assert x == 1"]):
                raise NotConfined("a program that should pass does not")
        except NotConfined as error:
            if not config.allow_unconfined:
                raise ConfigError(
                    "code that a model wrote cannot be confined here, so it is not run.",
                    where="rewards/code",
                    why=str(error)[:REASON_CHARACTERS],
                    todo="run as root or allow user name spaces (sysctl "
                    "user.max_user_namespaces); in a container "
                    "of its own, set allow_unconfined: true",
                ) from error
            log.warning(
                "code that a model wrote runs unconfined, as allow_unconfined says: %s", error
            )
            self._confinement = Confinement(config, confined=False)

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        return list(self._pool.map(self._score, records))

    def close(self) -> None:
        self._pool.shutdown()
        self._confinement.close()

    def _score(self, record: ScoredRecord) -> Score:
        tests = _tests(record.prompt.fields.get(self._config.tests))
        if tests is None:
            has = ", ".join(record.prompt.fields) or "none"
            what = (
                f"row {record.prompt.row} has no tests in field {self._config.tests!r}; it "
                f"has: {has}"
            )
            return failure(what[:REASON_CHARACTERS])
        try:
            code = self._pattern.part(record.text)
        except SlowPattern as error:
            return timed_out(error)
        if code is None:
            return Score(value=0.0)
        try:
            passed = self._confinement.passes(code, tests)
        except (NotConfined, OSError) as error:
            return failure(f"the code could not be run: {error}"[:REASON_CHARACTERS])
        return Score(value=float(passed))


def _tests(field: Any) -> list[str] | None:
    """Returns the tests in a row's field; None where it is no text and no list of texts."""
    tests = [field] if isinstance(field, str) else field
    if (
        isinstance(tests, list)
        and tests
        and all(isinstance(test, str) and test.strip() for test in tests)
    ):
        return tests
    return None


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
