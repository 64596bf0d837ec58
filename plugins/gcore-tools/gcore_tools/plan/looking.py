"""Answers the looks of plugins, in one helper process an interpreter.

A look (``gcore_core.contract.looking``) is answered by what was kept of it in the user's cache, or
by a helper process. Only an answer without problems is kept: what fixes a problem may be something
that nobody named. It holds as long as

    the look itself, the interpreter and the distributions that are installed there are the same;
    the files that the look names, and those that it imported outside of libraries, are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.looking import Look, Seen
from gcore_core.kits.cache import cache_root, replacing
from gcore_core.kits.commands import Interpreter, open_interpreter, without_paths_of_this
from gcore_tools.plan import look_child
from gcore_tools.plan.look_child import FileState, Line, add_facts, state_of

#: What is shown while helper processes work.
LOOKING = "looking at models and rows"
#: One look may take so long; the first one imports an engine's libraries, from a slow disk perhaps.
_LIMIT_S = 180.0
_NOTICE_S = 1.0  # what takes longer is told
_KEPT_DAYS = 30
# Characters of a line that are told; it may begin with an interpreter's long path.
_LINE = 1_000
#: Is part of the name of what is kept; another one makes all that was kept void.
_FORMAT = 3
#: How an interpreter runs the helper's file; of this project it needs the core alone.
_RUN = "import gcore_core, runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"


def look_at(
    looks: Sequence[tuple[str, Look]],
    say: Callable[[str], None],
    limit_s: float = _LIMIT_S,
) -> Seen:
    """Answers all looks.

    looks: the plugin's name, and its look.
    say: told once what goes on, where it takes longer than a second.
    limit_s: one look that takes longer is ended, and that is its problem.
    """
    notice = _Notice(say)
    problems: dict[int, list[str]] = {}
    notes: dict[int, list[str]] = {}
    facts: dict[str, int] = {}
    for numbers in _by_interpreter(looks).values():
        try:
            interpreter = open_interpreter(looks[numbers[0]][1].python, where="")
        except ConfigError as error:
            problems |= {number: [f"{error.sentence()}."] for number in numbers}
            continue
        kept = _Kept(interpreter)
        known = {number: kept.answer(looks[number][1]) for number in numbers}
        notes |= {number: answer.notes for number, answer in known.items() if answer}
        for answer in filter(None, known.values()):
            add_facts(facts, answer.facts)
        unknown = [number for number in numbers if not known[number]]
        helper = _Helper(interpreter, [looks[number][1] for number in unknown], notice, limit_s)
        states = [_states(looks[number][1]) for number in unknown]
        for place, said in enumerate(helper.answers()):
            look = looks[unknown[place]][1]
            problems[unknown[place]] = said.problems
            notes[unknown[place]] = said.notes
            add_facts(facts, said.facts)
            if not said.problems and states[place] == _states(look):
                files = [*states[place], *said.imported]
                kept.keep(look, _KeptAnswer(files, said.notes, said.facts), helper.began_ns)
    # Two looks may meet the same file.
    once, noted_once = (list(dict.fromkeys(_named(said, looks))) for said in (problems, notes))
    return Seen(problems=once, notes=noted_once, facts=facts)


def _named(
    said: Mapping[int, Sequence[str]],
    looks: Sequence[tuple[str, Look]],
) -> list[str]:
    """Returns what looks say in their order, with config paths and plugins.

    said: number of the look -> what it says.
    """
    return [
        f"{_beginning(looks[number][1].where, text)} [plugin {looks[number][0]}]"
        for number in sorted(said)
        for text in said[number]
    ]


def _by_interpreter(looks: Sequence[tuple[str, Look]]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for number, (_, look) in enumerate(looks):
        numbers.setdefault(look.python or "", []).append(number)
    return numbers


def _beginning(where: str, problem: str) -> str:
    return problem if problem.startswith(where) else f"{where}: {problem}"


def _states(look: Look) -> list[FileState]:
    """Returns the states of the files that a look names; of those in a directory in its place."""
    states = []
    for path in look.files:
        states.append(state_of(path))
        if os.path.isdir(path):
            with contextlib.suppress(OSError):
                states += [state_of(f"{path}/{name}") for name in sorted(os.listdir(path))]
    return states


class _Notice:
    """Tells once that something takes longer."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Callable[[str], None] | None = say

    def tell(self) -> None:
        if self._say is not None:
            self._say(LOOKING)
        self._say = None


# -- what is kept ----------------------------------------------------------------------------------


class _KeptAnswer(msgspec.Struct, frozen=True):
    """What is kept of a look in which nothing was found.

    files: those that its answer depends on.
    notes: what it said besides.
    facts: what it counted.
    """

    files: list[FileState]
    notes: list[str]
    facts: dict[str, int]


class _Kept:
    """Keeps the looks of one interpreter in which nothing was found, a small file each.

    A file that is not as it was written is no answer. What is not used for a month is removed.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self._folder = cache_root() / "looks"
        path = sys.path if interpreter.path is None else interpreter.path
        self._interpreter = [
            interpreter.python,
            sys.version if interpreter.path is None else "",
            msgspec.to_builtins(state_of(interpreter.python)),
            # Folders without any, such as that of a script or the current one, say nothing here.
            {folder: there for folder in path if (there := list(_distributions(folder)))},
        ]

    def answer(self, look: Look) -> _KeptAnswer | None:
        """Returns what is kept of a look in which nothing was found; None where there is nothing,
        or something has changed since then.
        """
        file = self._file(look)
        try:
            answer = msgspec.json.decode(file.read_bytes(), type=_KeptAnswer)
            unchanged = all(state_of(state.path) == state for state in answer.files)
            os.utime(file)
        except (OSError, msgspec.DecodeError, ValueError):
            return None
        return answer if unchanged else None

    def keep(self, look: Look, answer: _KeptAnswer, began_ns: int) -> None:
        """Keeps that nothing was found, unless a file was written while it was looked at.

        Where nothing can be kept, it is looked at again next time.

        began_ns: when the helper process was started, in nanoseconds since the epoch.
        """
        if any(state.mtime_ns > began_ns for state in answer.files):
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_old()
            with replacing(self._file(look)) as fresh:
                fresh.write_bytes(msgspec.json.encode(answer))

    def _file(self, look: Look) -> Path:
        key = [_FORMAT, look.function, dict(look.arguments), look.files, self._interpreter]
        text = json.dumps(key, sort_keys=True)
        return self._folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"

    def _remove_old(self) -> None:
        oldest_s = time.time() - _KEPT_DAYS * 24 * 3600
        for file in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if file.stat().st_mtime < oldest_s:
                    file.unlink()


def _distributions(folder: str) -> Iterator[tuple[str, int]]:
    """Yields name with version, and time, of what is installed in a folder of modules."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        found = [entry for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
        yield from sorted((entry.name, entry.stat().st_mtime_ns) for entry in found)


# -- the helper process ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _HelperAnswer:
    """What a helper process says of a look."""

    problems: list[str]
    notes: list[str] = field(default_factory=list)
    facts: dict[str, int] = field(default_factory=dict)
    imported: Iterable[FileState] = ()


class _Helper:
    """Answers looks by helper processes of one interpreter.

    One that ends early or hangs costs the look that it was at; another one answers those behind.

    began_ns: when the first one was started, in nanoseconds since the epoch.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        looks: Sequence[Look],
        notice: _Notice,
        limit_s: float,
    ) -> None:
        self._interpreter = interpreter
        self._looks = looks
        self._notice = notice
        self._limit_s = limit_s
        self.began_ns = time.time_ns()

    def answers(self) -> Iterator[_HelperAnswer]:
        """Yields the answers in the order of the looks."""
        looks = list(self._looks)
        while looks:
            with tempfile.TemporaryDirectory(prefix="g-core-looks-") as folder:
                ended = self._run(looks, Path(folder))
                results = Path(folder) / "results"
                for answer in _read(results):
                    looks.pop(0)
                    yield answer
                if looks:
                    last = _last_printed_line(Path(folder) / "log")
                    what = f"{looks.pop(0).function} in {self._interpreter.python} {ended}"
                    yield _HelperAnswer(
                        problems=[f"{what}{f'; it said last: {last}' if last else ''}."]
                    )
                if not results.stat().st_size:
                    return  # it did not come as far as the first look, and no other would

    def _run(self, looks: Sequence[Look], folder: Path) -> str:
        """Runs one helper process to its end, and returns how it ended."""
        results = folder / "results"
        asked = [{"function": look.function, "arguments": dict(look.arguments)} for look in looks]
        request = json.dumps({"results": str(results), "looks": asked})
        (folder / "request").write_text(request, encoding="ascii")
        results.touch()
        try:
            child, lifeline = self._start(folder)
        except OSError as error:
            return f"could not be called: {error.strerror}"
        try:
            if not self._ended(child, results):
                return f"took longer than {self._limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with what it has started itself
            child.wait()
            os.close(lifeline)
        code = child.returncode
        return (
            f"ended its process with exit code {code}"
            if code >= 0
            else f"was ended by signal {-code}"
        )

    def _start(self, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
        """Starts the process, in a group of its own that is ended when this process ends."""
        from gcore_core.kits.calls import signal_at_end

        reading, lifeline = os.pipe()
        is_other = self._interpreter.path is not None
        try:
            with open(folder / "request", "rb") as request, open(folder / "log", "wb") as log:
                child = subprocess.Popen(
                    [self._interpreter.python, "-c", _RUN, look_child.__file__],
                    stdin=request,
                    stdout=log,
                    stderr=log,
                    pass_fds=(reading,),
                    process_group=0,
                    env=without_paths_of_this(os.environ) if is_other else None,
                )
            signal_at_end(reading, child.pid, signal.SIGKILL)
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(reading)
        return child, lifeline

    def _ended(self, child: subprocess.Popen[bytes], results: Path) -> bool:
        """Waits for the end of the process; says whether it came before one look took too long."""
        size = 0
        since_s = time.monotonic()
        while True:
            try:
                child.wait(timeout=min(_NOTICE_S, self._limit_s))
            except subprocess.TimeoutExpired:
                self._notice.tell()
            else:
                return True
            if (now := results.stat().st_size) != size:
                size = now
                since_s = time.monotonic()
            elif time.monotonic() - since_s > self._limit_s:
                return False


def _read(results: Path) -> Iterator[_HelperAnswer]:
    """Yields the answers that a helper process has given, whole lines alone."""
    for text in results.read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            line = msgspec.json.decode(text, type=Line)
            if line.problems is not None:
                yield _HelperAnswer(
                    problems=line.problems,
                    notes=line.notes,
                    facts=line.facts,
                    imported=line.imported,
                )


def _last_printed_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip()[:_LINE] for line in reversed(lines) if line.strip()), "")
    return ""
