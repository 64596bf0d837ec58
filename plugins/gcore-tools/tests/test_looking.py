"""What a plugin has looked at in another process: what is told of it, and how long it is kept."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from gcore_testing.installed import empty_venv
from gcore_tools.plan.looking import LOOKING, look_at

from gcore_core.contract.looking import Look

LOOKS = """
import os, sys, time
from pathlib import Path
import beside_looks
from gcore_core.contract.errors import DataError
from gcore_core.contract.looking import Fact, Note

def find(arguments):
    with open(arguments["calls"], "a") as calls:
        calls.write(arguments["name"] + chr(10))
    print('{"look": 0, "problems": ["a print is no result"]}')
    os.write(1, b'{"look": 0, "problems": ["nor is this"]}\\n')
    yield from beside_looks.FOUND

def count(arguments):
    yield f"roles.policy: {arguments['rows']!r} {sys.executable} {os.getppid()}"

def note(arguments):
    with open(arguments["calls"], "a") as calls:
        calls.write("note" + chr(10))
    yield Note("three of" + chr(10) + "nine rows")
    yield from [Fact("tokens", 7), Fact("tokens", 9), Fact("tokens", 8)]
    yield from beside_looks.FOUND

def refuse(arguments):
    yield "roles.policy: first"
    raise DataError("row 3 is bad", where="rows.jsonl", todo="correct it.")

def fail(arguments):
    raise ValueError("of two" + chr(10) + "lines")

def end(arguments):
    print("these are my last words", flush=True)
    sys.exit(3)

def crash(arguments):
    print("these are my last words", flush=True)
    os._exit(7)

def hang(arguments):
    if os.fork() == 0:
        Path(arguments["pid"]).write_text(str(os.getpid()))
        time.sleep(600)
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module of looks that helper processes find, and a cache of its own."""
    monkeypatch.setenv("G_CORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "looks_made.py").write_text(LOOKS)
    (tmp_path / "beside_looks.py").write_text("FOUND = []\n")
    return tmp_path


def look(name: str, **more: Any) -> Look:
    return Look(where="roles.policy", function=f"looks_made:{name}", **more)


def seen(*looks: Look, **more: Any) -> list[str]:
    return list(look_at([("made", each) for each in looks], lambda text: None, **more).problems)


def finder(folder: Path, name: str = "one", **more: Any) -> Look:
    arguments = {"calls": str(folder / "calls"), "name": name}
    return look("find", arguments=arguments, **more)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split()


def test_arguments_arrive_as_they_are_and_one_process_answers_all_looks_of_an_interpreter(
    folder: Path,
) -> None:
    rows = [{"a": None, "b": [1, 0.5, True], "c": "ä\ud800\n"}]
    one, two = seen(look("count", arguments={"rows": rows}), look("count", arguments={"rows": 2}))
    assert one == f"roles.policy: {rows!r} {sys.executable} {os.getpid()} [plugin made]"
    assert two == f"roles.policy: 2 {sys.executable} {os.getpid()} [plugin made]"


def test_notes_and_the_largest_facts_are_no_problems_and_are_kept_with_what_was_not_found(
    folder: Path,
) -> None:
    noting = look("note", arguments={"calls": str(folder / "calls")})
    for _ in range(2):
        said = look_at([("made", noting)], lambda text: None)
        assert said.problems == []
        assert said.notes == ["roles.policy: three of nine rows [plugin made]"]
        assert said.facts == {"tokens": 9}
    assert calls(folder) == ["note"]


def test_what_a_function_prints_is_no_answer(folder: Path) -> None:
    assert seen(finder(folder)) == []
    assert calls(folder) == ["one"]


def test_nothing_found_is_kept_until_a_named_file_or_an_imported_one_changes(folder: Path) -> None:
    named = folder / "named"
    given = finder(folder, files=(str(named), str(folder / "model")))
    for count in (1, 1):  # it is kept also that a file is not there
        assert seen(given) == []
        assert len(calls(folder)) == count
    named.write_text("a")
    (folder / "model").mkdir()
    for count in (2, 2):
        assert seen(given) == []
        assert len(calls(folder)) == count
    (folder / "model" / "config.json").write_text("{}")
    assert seen(given) == []
    assert len(calls(folder)) == 3
    (folder / "beside_looks.py").write_text("FOUND = ['now there is something.']\n")
    for count in (4, 5):  # what was found is not kept
        assert seen(given) == ["roles.policy: now there is something. [plugin made]"]
        assert len(calls(folder)) == count


def test_a_problem_that_two_looks_find_is_told_once(folder: Path) -> None:
    (folder / "beside_looks.py").write_text("FOUND = ['the file is broken.']\n")
    found = seen(finder(folder, "one"), finder(folder, "two"))
    assert calls(folder) == ["one", "two"]
    assert found == ["roles.policy: the file is broken. [plugin made]"]


def test_another_look_is_answered_by_itself(folder: Path) -> None:
    assert seen(finder(folder, "one"), finder(folder, "two")) == []
    assert seen(finder(folder, "two"), finder(folder, "three")) == []
    assert calls(folder) == ["one", "two", "three"]


def test_a_kept_answer_that_is_damaged_is_written_again_and_an_old_one_is_removed(
    folder: Path,
) -> None:
    assert seen(finder(folder)) == []
    (kept,) = (folder / "cache" / "looks").iterdir()
    written = json.loads(kept.read_text())
    for damage in (b"", b"{", b"[]", b'{"files": [{"path": 3}]}', b"\xff"):
        kept.write_bytes(damage)
        assert seen(finder(folder)) == []
        assert json.loads(kept.read_text()) == written
    os.utime(kept, (0, 0))
    assert seen(finder(folder, "two")) == []
    assert not kept.exists()


def test_where_nothing_can_be_kept_a_look_is_answered_all_the_same(folder: Path) -> None:
    (folder / "cache").write_text("a file")
    for count in (1, 2):
        assert seen(finder(folder)) == []
        assert len(calls(folder)) == count


def test_a_function_that_raises_has_one_problem_without_a_traceback(folder: Path) -> None:
    assert seen(look("refuse"), look("fail"), look("end"), look("gone")) == [
        "roles.policy: first [plugin made]",
        "roles.policy: rows.jsonl: row 3 is bad; correct it. [plugin made]",
        "roles.policy: looks_made:fail raised ValueError: of two lines [plugin made]",
        "roles.policy: looks_made:end raised SystemExit: 3 [plugin made]",
        "roles.policy: 'looks_made:gone': looks_made has no 'gone'. [plugin made]",
    ]


def test_a_function_whose_module_does_not_import_has_one_problem(folder: Path) -> None:
    (folder / "beside_looks.py").write_text("import nowhere_at_all\n")
    (problem,) = seen(look("fail"))
    assert problem.startswith(
        "roles.policy: 'looks_made:fail' does not import: ModuleNotFoundError: No module named "
        f"'nowhere_at_all'; interpreter: {sys.executable}; "
    )


def test_a_crash_costs_its_own_look_alone(folder: Path) -> None:
    assert seen(finder(folder), look("crash"), look("fail")) == [
        f"roles.policy: looks_made:crash in {sys.executable} ended its process with exit code 7; "
        "it said last: these are my last words. [plugin made]",
        "roles.policy: looks_made:fail raised ValueError: of two lines [plugin made]",
    ]
    assert seen(finder(folder)) == []
    assert calls(folder) == ["one"]


def test_a_look_that_hangs_is_ended_with_what_it_has_started(folder: Path) -> None:
    pid = folder / "pid"
    problems = seen(look("hang", arguments={"pid": str(pid)}), look("fail"), limit_s=2.0)
    assert problems == [
        f"roles.policy: looks_made:hang in {sys.executable} took longer than 2 s. [plugin made]",
        "roles.policy: looks_made:fail raised ValueError: of two lines [plugin made]",
    ]
    status = Path(f"/proc/{pid.read_text()}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_what_takes_longer_than_a_second_is_told_once(folder: Path) -> None:
    told: list[str] = []
    hanging = look("hang", arguments={"pid": str(folder / "pid")})
    look_at([("made", hanging), ("made", hanging)], told.append, limit_s=1.5)
    assert told == [LOOKING]


def test_an_interpreter_that_lacks_the_core_or_is_none_is_told(folder: Path) -> None:
    place = folder / ("long" * 30)  # the reason stands behind the path
    other = empty_venv(place)
    python = str(place / "bin/python")
    (problem,) = seen(look("fail", python=python), look("fail", python=python))
    assert problem.startswith(f"roles.policy: looks_made:fail in {python} ended its process")
    assert "No module named" in problem and "gcore_core" in problem
    (problem,) = seen(look("fail", python=str(other.directory / "none")))
    assert problem.startswith("roles.policy: ") and "there is no interpreter" in problem
