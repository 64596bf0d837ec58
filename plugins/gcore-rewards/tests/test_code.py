"""``rewards/code``: right code is 1 and wrong code 0; harm stays within the limits; nothing runs
unconfined unless that was asked for.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gcore_rewards
import pytest
from gcore_rewards import confine
from gcore_rewards.code import CodeReward, Confinement, NotConfined
from gcore_rewards.config import CodeConfig
from gcore_rewards.interpreter import this_interpreter
from gcore_rewards.patterns import Pattern
from gcore_testing.contracts.scorer import scored_record

import gcore_core
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import REWARD_FAILED
from gcore_core.contract.scorer import ScoredRecord

pytestmark = pytest.mark.rest

CONTEXT = WorkerContext(role="scorer")
TESTS = ["assert double(2) == 4"]
RIGHT = "def double(x):\n    return 2 * x"
WRONG = "def double(x):\n    return 5"
LIMITS: dict[str, Any] = {"time_s": 4.0, "memory_mib": 256, "files_mib": 4, "processes": 8}


def why_not_confined() -> str:
    """Why this machine cannot confine programs; empty where it can."""
    confinement = Confinement(CodeConfig(**LIMITS))
    try:
        confinement.passes("", ["pass"])
        return ""
    except NotConfined as error:
        return f"this machine does not let programs be confined: {error}"
    finally:
        confinement.close()


REFUSAL = why_not_confined()
confined = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)


@pytest.fixture(scope="module")
def confinement() -> Iterator[Confinement]:
    made = Confinement(CodeConfig(**LIMITS))
    yield made
    made.close()


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    made = CodeReward(CodeConfig(**LIMITS), CONTEXT)
    yield made
    made.close()


def record(code: str, tests: Any = None) -> ScoredRecord:
    """A record whose completion has the code in a block; its row has TESTS or other tests."""
    text = f"Here it is.\n```python\n{code}\n```\n"
    return replace(scored_record(1, "", {"tests": TESTS if tests is None else tests}), text=text)


def scores(records: list[ScoredRecord], **config: Any) -> list[float | None]:
    """The values that a reward with LIMITS, or others, gives to records."""
    reward = CodeReward(CodeConfig(**{**LIMITS, **config}), CONTEXT)
    try:
        return [score.value for score in reward.score(records)]
    finally:
        reward.close()


@confined
def test_right_code_is_1_wrong_code_and_no_code_are_0() -> None:
    right = record("def double(x):\n    return 2 * x")
    wrong = record("def double(x):\n    return x")
    none = replace(right, text="I do not know.")
    assert scores([right, wrong, none]) == [1, 0, 0]


@confined
@pytest.mark.parametrize(
    "fence", ["```python3\n", "```Python\n", "``` python\n", "```PY \n", "```python\r\n", "```\r\n"]
)
def test_code_is_found_however_its_fence_is_written(fence: str) -> None:
    pattern = Pattern(CodeConfig().pattern, 10)
    assert (pattern.part(f"So:\n{fence}x = 1\n```\nDone.") or "").strip() == "x = 1"


def test_the_last_block_counts_and_every_test_must_pass() -> None:
    two = replace(
        record(""),
        text="```python\ndef double(x): return 0\n```\nno:\n```\ndouble = lambda x: 2 * x\n```\n",
    )
    assert scores(
        [two, replace(two, prompt=record("", [*TESTS, "assert double(1) == 3"]).prompt)]
    ) == [1, 0]


@pytest.mark.parametrize("tests", [3, [], [""], ["pass", 1], {"a": "b"}])
@confined
def test_a_row_without_tests_is_a_failure(tests: Any) -> None:
    reward = CodeReward(CodeConfig(**LIMITS), CONTEXT)
    (score,) = reward.score([record("x = 1", tests)])
    reward.close()
    assert (score.value, score.status) == (None, REWARD_FAILED)
    assert "has no tests in field 'tests'" in score.reason


def _class(base: str, call: str) -> str:
    """Tests with a class that looks at ``double``."""
    return f"class TestDouble({base}):\n    def test_two(self):\n        {call}\n"


FUNCTION = "def test_two():\n    assert double(2) == 4\n"
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n"
IMPORT = "from solution import double\n"
CASE = f"import unittest\n{_class('unittest.TestCase', 'self.assertEqual(double(2), 4)')}"
SUITE = "unittest.defaultTestLoader.loadTestsFromTestCase(TestDouble)"
SWALLOWED = "try:\n    assert double(2) == 4\nexcept Exception as error:\n    print(error)"

REAL_TESTS = {
    "a text": "assert double(2) == 4",
    "a list as one text of JSON": json.dumps(TESTS),
    "a function that nobody calls": FUNCTION,
    "such a function behind an import of the code": IMPORT + FUNCTION,
    "a function that is called": f"{FUNCTION}test_two()",
    "a function for candidates": f"{CHECK}check(double)",
    "a function for candidates that another text calls": [CHECK, "check(double)"],
    "a class of unittest": CASE,
    "a class that unittest.main is to run": f"{CASE}unittest.main()",
    "a script": f"{CASE}if __name__ == '__main__':\n    unittest.main()",
    "a class whose failures raise nothing": f"{CASE}unittest.TextTestRunner().run({SUITE})",
    "an exit code": "import sys\nsys.exit(0 if double(2) == 4 else 1)",
    "a function that raises": "def fail(): raise ValueError\ndouble(2) == 4 or fail()",
}


@pytest.mark.parametrize("form", REAL_TESTS)
@confined
def test_wrong_code_is_0_and_right_code_1_however_tests_are_written(
    form: str, reward: CodeReward
) -> None:
    tests = REAL_TESTS[form]
    found = reward.score([record(WRONG, tests), record(RIGHT, tests)])
    assert [score.value for score in found] == [0, 1]


NO_TESTS = {
    "nothing": "pass",
    "comments": "# assert double(2) == 4",
    "a text in quotes": "'assert double(2) == 4'",
    "a list in a list": json.dumps([json.dumps(TESTS)]),
    "a list as Python shows it": str(TESTS),
    "inputs and outputs as JSON": json.dumps({"input": [2], "output": [4]}),
    "inputs and outputs": {"input": [2], "output": [4]},
    "lists": [TESTS],
    "a function that nobody calls": CHECK,
    "such a function behind an import of the code": IMPORT + CHECK,
    "a function with arguments": "def test_two(x, y):\n    assert double(x) == y",
    "a coroutine": "async def test_two():\n    assert double(2) == 4",
    "a generator": "def test_two():\n    yield double(2) == 4",
    "a class that is none of unittest": _class("object", "assert double(2) == 4"),
    "errors that are caught": SWALLOWED,
    "errors that are caught behind an import of the code": IMPORT + SWALLOWED,
    "a comparison": "double(2) == 4",
    "a print": "print(double(2) == 4)",
    "an assert of two things": "assert (double(2) == 4, 'it is not doubled')",
    "what is no Python": "assert double(2) = 4",
    "the end of the process": "import os; os._exit(0)",
    "the end of the program": "import sys; sys.exit(0)",
    "a module that nobody has": "from candidate import double\nassert double(2) == 4",
}


@pytest.mark.parametrize("form", NO_TESTS)
@confined
def test_tests_that_any_program_passes_or_none_are_a_failure_that_names_the_row(
    form: str, reward: CodeReward
) -> None:
    found = reward.score([record(WRONG, NO_TESTS[form]), record(RIGHT, NO_TESTS[form])])
    assert [(score.value, score.status) for score in found] == [(None, REWARD_FAILED)] * 2
    assert all("row 1 has no tests in field 'tests'; " in score.reason for score in found)


REAL = "assert double(2) == 4"
#: Next to a real test.
HIDDEN = {
    "an assert of nothing of the program": ("assert 1 + 1 == 2", "test 1 of 2 is none: a program"),
    "a loop that looks at nothing": ("for _ in []:\n    assert double(1) == 2", "test 1 of 2 is"),
    "a comparison": ("double(2) == 4", "test 1 has `double(2) == 4`, a value"),
    "a text in quotes": ("'double(2) == 4'", "test 1 of 2 is none: "),
    "a print": ("print(double(2) == 4)", "test 1 of 2 is none: it passes whatever"),
    "an assert of two things": ("assert (double(2) == 4, 'no')", "leave the brackets out"),
    "such an assert in a function": ("def test_it():\n    assert (double(2), 'no')", "brackets"),
    "errors that are caught": (SWALLOWED, "test 1 of 2 is none: "),
    "a function that nobody calls": (CHECK, "nobody calls check"),
    "a function that calls only itself": ("def check(x):\n    return check(x)", "nobody calls"),
    "a program of unittest that skips": (
        "import unittest\nclass TestIt(unittest.TestCase):\n    def test_it(self): pass",
        "test 1 of 2 is none: a program",
    ),
}


@pytest.mark.parametrize("form", HIDDEN)
@pytest.mark.parametrize("first", [True, False])
@confined
def test_a_test_that_tests_nothing_does_not_hide_behind_others(
    form: str, first: bool, reward: CodeReward
) -> None:
    hidden, said = HIDDEN[form]
    tests = [hidden, REAL] if first else [REAL, hidden]
    (score,) = reward.score([record(RIGHT, tests)])
    assert (score.value, score.status) == (None, REWARD_FAILED)
    assert "row 1 has no tests in field 'tests'; " in score.reason
    assert (said if first else said.replace("test 1", "test 2")) in score.reason


NEEDED = {
    "an import": "import math",
    "an import of the code": IMPORT,
    "a function that the test calls": ("def fine(x):\n    return x == 4", "assert fine(double(2))"),
    "values": "CASES = [(2, 4)]",
    "a value of the program": ("two = double(2)", "assert two == 4"),
    "a call that prepares": "import random\nrandom.seed(0)",
    "a call of the program's own": ("seen = []", "seen.append(double(2))", "assert seen == [4]"),
    "a text at the head": '"""Looks at double."""\nimport math',
    "a name of a test that is all of a line": f"{FUNCTION}test_two",
    "an error that is waited for": (
        "try:\n    double(None) == 4\nexcept TypeError:\n    pass\nelse:\n    raise ValueError"
    ),
    "a function with an assert that holds always, as generated tests have it": (
        "def check(f):\n    assert True, 'this prints'\n    assert f(2) == 4",
        "check(double)",
    ),
}


@pytest.mark.parametrize("form", NEEDED)
@confined
def test_what_a_test_needs_may_stand_next_to_it(form: str, reward: CodeReward) -> None:
    needed = NEEDED[form]
    tests = [*needed] if isinstance(needed, tuple) else [needed]
    found = reward.score([record(code, [*tests, REAL]) for code in (WRONG, RIGHT)])
    assert [(score.value, score.reason) for score in found] == [(0, ""), (1, "")]


THREAD = "import threading\n\ndef start(do):\n    t = threading.Thread(target=do)\n    t.start()\n"


@confined
def test_an_error_in_a_thread_fails_the_test_as_it_does_elsewhere(reward: CodeReward) -> None:
    in_code = f"{THREAD}\n{RIGHT}\ndef fail():\n    raise ValueError\nstart(fail)"
    in_test = f"{THREAD}\ndef look():\n    assert double(2) == 4\nstart(look)"
    found = reward.score(
        [record(in_code), record(RIGHT, in_test), record(WRONG, in_test), record(RIGHT)]
    )
    assert [score.value for score in found] == [0, 1, 0, 1]


@confined
def test_tests_of_a_row_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    look = Confinement.look

    def counted(self: Confinement, tests: Any) -> Any:
        looks.append(tests)
        return look(self, tests)

    monkeypatch.setattr(Confinement, "look", counted)
    reward = CodeReward(CodeConfig(**LIMITS), CONTEXT)
    for _ in range(2):
        reward.score([record(RIGHT), record(WRONG), record(RIGHT, CHECK)])
    reward.close()
    assert sorted(looks) == sorted([tuple(TESTS), (CHECK,)])


@pytest.mark.parametrize(
    "code",
    [
        "import builtins\nbuiltins.exec = lambda *_: None",
        "import builtins\nbuiltins.compile = lambda *_, **__: 'pass'",
        "import runpy\nrunpy.run_path = lambda *_, **__: {}",
        "import sys\nsys.exit = lambda *_: None",
        "import builtins\nbuiltins.AssertionError = ValueError",
        "AssertionError = KeyboardInterrupt",
        "__builtins__ = {'double': lambda x: 4}",
        "import atexit, os\natexit.register(os._exit, 0)",
        "def double(x):\n    raise SystemExit(0)",
        "def double(x):\n    exec(compile('raise SystemExit(0)', 'tests0.py', 'exec'))",
        "def test_two():\n    pass",
    ],
)
@confined
def test_code_that_puts_its_own_in_place_of_what_runs_tests_has_not_passed(
    code: str, reward: CodeReward
) -> None:
    code = code if "def double" in code else f"{code}\n{WRONG}"
    found = reward.score([record(code), record(code, FUNCTION), record(code, CASE)])
    assert [score.value for score in found] == [0, 0, 0]


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "(",
    ],
)
@confined
def test_code_that_ends_before_its_tests_has_not_passed(
    code: str, confinement: Confinement
) -> None:
    assert not confinement.passes(code, ["pass"])


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(1000)"])
@confined
def test_code_that_does_not_end_is_ended(code: str) -> None:
    confinement = Confinement(CodeConfig(**{**LIMITS, "time_s": 1.0}))
    began_s = time.monotonic()
    assert not confinement.passes(code, ["pass"])
    confinement.close()
    assert time.monotonic() - began_s < 15


@confined
def test_a_fork_bomb_is_limited_and_nothing_of_it_is_left(confinement: Confinement) -> None:
    mark = f"bomb-{os.getpid()}"
    code = f"""
import os, time
made = 0
try:
    for _ in range(1000):
        if os.fork() == 0:
            os.execv("/usr/bin/python3", ["{mark}", "-c", "import time; time.sleep(1000)"])
        made += 1
except OSError:
    pass
"""
    assert confinement.passes(code, [f"assert 0 < made < {LIMITS['processes']}, made"])
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(p)]
    assert left == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@confined
def test_memory_is_limited(confinement: Confinement) -> None:
    code = "try:\n    held = bytearray(1 << 30)\nexcept MemoryError:\n    held = None"
    assert confinement.passes(code, ["assert held is None"])


@confined
def test_there_is_no_network(confinement: Confinement) -> None:
    """Neither to others nor to this machine, nor to a socket whose path is known."""
    code = """
import errno, socket
found = []
for family, address in [(socket.AF_INET, ("127.0.0.1", 22)), (socket.AF_INET, ("192.0.2.1", 80))]:
    try:
        socket.socket(family).connect(address)
    except OSError as error:
        found.append(error.errno)
names = [name for _, name in socket.if_nameindex()]
"""
    assert confinement.passes(
        code, ["assert found == [errno.ENETUNREACH] * 2, found", "assert names == ['lo']"]
    )


@confined
def test_files_outside_can_neither_be_written_nor_seen(
    confinement: Confinement, tmp_path: Path
) -> None:
    (tmp_path / "answers").write_text("42")
    code = f"""
import os, sys
found = []
hidden = ["/etc/passwd", "/proc/self", "/.old/etc", {str(Path(__file__).resolve())!r}]
for path in ({str(tmp_path / "answers")!r}, *hidden):
    found.append(os.path.exists(path))
written = []
for path in ("/usr/mine", sys.prefix + "/mine", "/bin/mine", os.__file__, "/dev/mine"):
    try:
        open(path, "a").close()
        written.append(path)
    except OSError:
        pass
open("mine", "w").write("here it may")
"""
    assert confinement.passes(code, ["assert not any(found), found", "assert not written, written"])
    assert not Path("/usr/mine").exists() and not Path(sys.prefix, "mine").exists()


@confined
def test_what_is_written_is_limited(confinement: Confinement) -> None:
    code = """
written = 0
try:
    for number in range(100):
        with open(f"file{number}", "wb", buffering=0) as file:
            written += file.write(bytes(1 << 20))
except OSError:
    pass
import os
for name in os.listdir():
    os.remove(name)  # the tests are written there too
"""
    assert confinement.passes(code, [f"assert 0 < written <= {LIMITS['files_mib'] << 20}, written"])


@confined
def test_output_without_end_is_dropped(confinement: Confinement) -> None:
    code = (
        "import os\nfor _ in range(200):\n    os.write(1, bytes(1 << 20)); os.write(2, "
        "bytes(1 << 20))"
    )
    assert confinement.passes(code, ["pass"])
    writes_everywhere = (
        "import os\nfor number in range(3, 64):\n    try: os.write(number, b'x' * 9)\n    "
        "except OSError: pass"
    )
    assert not confinement.passes(writes_everywhere, ["pass"])  # also where the verdict goes


@confined
def test_privileges_and_secrets_do_not_come_in(
    confinement: Confinement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
mounted = libc.mount(b"none", b"/.work", b"tmpfs", 0, None)
root = os.getuid() == 0
"""
    tests = [
        "assert mounted == -1 and not root",
        "assert 'A_TOKEN' not in os.environ",
        "assert os.getppid() == 1",
    ]
    assert confinement.passes(code, tests)


@confined
def test_a_row_that_is_no_text_of_any_encoding_is_0(confinement: Confinement) -> None:
    assert not confinement.passes("x = '\ud800", ["pass"])


PLAIN_PYTHON = Path("/usr/bin/python3")


@pytest.mark.skipif(
    os.geteuid() != 0 or not PLAIN_PYTHON.exists(), reason="needs root, and a python for all users"
)
@confined
def test_a_user_who_is_not_root_is_confined_in_the_same_way() -> None:
    """By user name spaces. The program sees no file of the user's and has no privilege over its own
    name space.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        _as_nobody(Path(directory))


def _as_nobody(place: Path) -> None:
    base = place / "base"
    driver = place / "driver.py"
    program = place / "confine.py"
    base.mkdir()
    os.chown(base, 65534, 65534)
    program.write_text(Path(confine.__file__).read_text())
    driver.write_text(
        "import ctypes, os, socket\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "facts = [os.path.exists('/etc/passwd'), libc.mount(b'none', b'/.work', b'tmpfs', 0, "
        "None)]\n"
        "facts += [os.getuid(), [name for _, name in socket.if_nameindex()]]\n"
        "import json; os.write(1, json.dumps(facts).encode())\n"
    )
    settings = {
        "confined": True,
        "python": str(PLAIN_PYTHON),
        "driver": str(driver),
        "readable": [],
        "environment": {},
        "shows_errors": False,
        "base": str(base),
    }
    settings |= {**LIMITS, "cpu_s": 4, "open_files": 64, "options": ["-I", "-B"]}
    done = subprocess.run(
        [PLAIN_PYTHON, "-I", program, json.dumps(settings)],
        capture_output=True,
        user=65534,
        group=65534,
        extra_groups=[],
    )
    if b"unshare" in done.stderr:
        pytest.skip(f"users may not make name spaces here: {done.stderr.decode()}")
    assert (done.returncode, json.loads(done.stdout)) == (0, [False, -1, 65534, ["lo"]]), (
        done.stderr
    )


# -- interpreters and directories of every name ---------------------------------------------------

TRY = """
import json, os, sys
from gcore_rewards.code import Confinement
from gcore_rewards.config import CodeConfig
from gcore_rewards.interpreter import this_interpreter
readable = json.loads(os.environ.get("READABLE", "[]"))
confinement = Confinement(CodeConfig(readable=readable))
confinement.require()
code = "import os, sys; prefix = sys.prefix; seen = os.path.exists(sys.argv[0] + '/../etc/passwd')"
code += "\\n" + os.environ.get("PROGRAM", "")
print(confinement.passes(code, [f"assert prefix == {sys.prefix!r} and not seen, prefix"]))
"""


def _venv(folder: Path, python: str = sys.executable) -> Path:
    """Makes an environment without packages and returns the path of its interpreter."""
    words = [os.path.realpath(python) if python == sys.executable else python, "-m", "venv"]
    subprocess.run([*words, "--without-pip", str(folder)], check=True)
    return folder / "bin/python"


def _tried(python: str | Path, cwd: Path, **environment: str) -> str:
    """What the program above prints, run by an interpreter that is named as it is given."""
    packages = [Path(str(package.__file__)).parents[1] for package in (gcore_rewards, gcore_core)]
    paths = os.pathsep.join([*map(str, packages), *filter(None, sys.path)])
    environment = {"PYTHONPATH": paths, **environment}
    words = [str(python), "-c", TRY]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


@pytest.mark.parametrize("name", ["link/bin/python", "deep/../venv/bin/python", "bin/python"])
@confined
def test_code_is_confined_by_an_interpreter_that_is_reached_by_links_dots_and_shims(
    name: str, tmp_path: Path
) -> None:
    _venv(tmp_path / "venv")
    (tmp_path / "link").symlink_to("venv")
    (tmp_path / "deep").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f'#!/bin/sh\nexec "{tmp_path}/link/bin/python" "$@"\n')
    (tmp_path / "bin/python").chmod(0o755)
    assert _tried(name, tmp_path) == "True"
    assert _tried(tmp_path / name, Path("/")) == "True"


@confined
def test_code_is_confined_by_an_environment_whose_python_lies_behind_links(tmp_path: Path) -> None:
    """Each version is a link, as is the folder of its programs, and names have spaces."""
    (tmp_path / "all versions").mkdir()
    (tmp_path / "all versions/3.x").symlink_to(sys.base_prefix)
    (tmp_path / "current").symlink_to("all versions/3.x")
    python = _venv(tmp_path / "my venv", str(tmp_path / "current/bin/python3"))
    (tmp_path / "my venv/bin").rename(tmp_path / "programs")
    (tmp_path / "my venv/bin").symlink_to("../programs")
    assert _tried(python, tmp_path) == "True"


@pytest.mark.parametrize("name", ["linked", "with spaces", "venv/tmp", "venv/../plain"])
@confined
def test_code_is_confined_wherever_temporary_files_lie(name: str, tmp_path: Path) -> None:
    python = _venv(tmp_path / "venv")
    for folder in ("plain", "with spaces", "venv/tmp"):
        (tmp_path / folder).mkdir()
    (tmp_path / "linked").symlink_to("plain")
    assert _tried(python, tmp_path, TMPDIR=str(tmp_path / name)) == "True"
    assert _tried(python, tmp_path, TMPDIR=name) == "True"


@confined
def test_what_is_named_as_readable_is_read_behind_links_and_above_the_interpreter(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/words").write_text("a b")
    (tmp_path / "link").symlink_to("data")
    python = _venv(tmp_path / "data/venv")
    readable = [str(tmp_path / "link/words"), str(tmp_path / "data")]
    code = f"import os\nread = open({readable[0]!r}).read(), sorted(os.listdir({readable[1]!r}))"
    program = f"{code}\nassert read == ('a b', ['venv', 'words'])"
    tried = _tried(python, tmp_path, READABLE=json.dumps(readable), PROGRAM=program)
    assert tried == "True"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only then another user runs the code")
@confined
def test_a_readable_folder_that_nobody_may_enter_is_refused_with_its_path(tmp_path: Path) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o700)
    python = _venv(shut / "venv")
    assert _tried(python, tmp_path) == "True"  # only the way to it is shut
    tried = _tried(python, tmp_path, READABLE=json.dumps([str(shut)]))
    assert f"nobody may not enter {shut}" in tried


@confined
def test_code_is_confined_whatever_the_mode_of_new_files_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        assert _tried(sys.executable, tmp_path) == "True"
    finally:
        os.umask(before)


def test_libraries_are_looked_for_where_the_interpreter_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libraries").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"libraries::{tmp_path}/libraries/..")
    assert this_interpreter().environment == {"LD_LIBRARY_PATH": f"{tmp_path}/libraries:{tmp_path}"}
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    (c_library,) = (name for name in libraries if Path(name).name.startswith(("libc.", "libc-")))
    assert str(Path(c_library).parent) in this_interpreter().places


@confined
def test_an_interpreter_that_cannot_be_started_confined_is_no_reason_to_run_code_unconfined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hidden = tmp_path / "python"
    hidden.write_text("#!/no/such/interpreter\n")
    hidden.chmod(0o755)
    plain = Confinement.__init__

    def init(self: Confinement, *args: Any, **more: Any) -> None:
        plain(self, *args, **more)
        self._settings["python"] = str(hidden)

    monkeypatch.setattr(Confinement, "__init__", init)
    with pytest.raises(ConfigError, match="cannot be confined here") as caught:
        CodeReward(CodeConfig(**LIMITS), CONTEXT)
    assert "No such file or directory" in caught.value.why
    assert "allow_unconfined" not in caught.value.todo
    assert "name in readable" in caught.value.todo


@confined
def test_too_little_memory_for_the_interpreter_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        CodeReward(CodeConfig(**{**LIMITS, "memory_mib": 4}), CONTEXT)
    assert "memory_mib" in caught.value.todo
    assert "allow_unconfined" not in caught.value.todo


# -- where programs cannot be confined -------------------------------------------------------------


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which name spaces are not permitted: the real program, whose system call
    fails.
    """
    program = tmp_path / "confine.py"
    source = Path(confine.__file__).read_text()
    broken = source.replace(
        "_LIBC.unshare(flags)", "_LIBC.unshare(1)"
    )  # a flag that does not exist
    assert broken != source
    program.write_text(broken)
    plain = Confinement.__init__

    def init(self: Confinement, *args: Any, **more: Any) -> None:
        plain(self, *args, **more)
        self._command[-1] = str(program)

    monkeypatch.setattr(Confinement, "__init__", init)


def test_without_confinement_it_refuses_to_start(forbidden: None) -> None:
    with pytest.raises(
        ConfigError, match="code that a model wrote cannot be confined here"
    ) as caught:
        CodeReward(CodeConfig(**LIMITS), CONTEXT)
    assert "unshare" in caught.value.why
    assert "allow_unconfined: true" in caught.value.todo


def test_a_program_that_could_not_be_confined_was_not_run(forbidden: None, tmp_path: Path) -> None:
    confinement = Confinement(CodeConfig(**LIMITS))
    with pytest.raises(NotConfined, match="unshare"):
        confinement.passes(f"open({str(tmp_path / 'ran')!r}, 'w')", ["pass"])
    confinement.close()
    assert not (tmp_path / "ran").exists()


def test_who_allows_it_runs_code_unconfined_with_a_warning_and_with_limits(
    forbidden: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        hungry = record(f"held = bytearray(1 << 30)\n{RIGHT}")
        endless = record(
            "import subprocess; subprocess.Popen(['sleep', '1000']); exec('while True: pass')"
        )
        right = record(RIGHT)
        assert scores([right, hungry, endless], allow_unconfined=True, time_s=1.5) == [1, 0, 0]
    assert "runs unconfined, as allow_unconfined says" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pattern": "("}, "not a regular expression"),
        ({"time_s": 0}, "must be positive"),
        ({"memory_mib": 0}, "must be at least 1"),
        ({"readable": ["data"]}, "must be absolute"),
        ({"readable": ["/usr/../root"]}, "must be absolute"),
    ],
)
def test_a_bad_setting_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CodeConfig(**wrong)
