"""A function of a notebook becomes a file that defines the same function, or is refused by name."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gcore.functions import files_of, literal
from hypothesis import given
from hypothesis import strategies as st

from gcore_core.config.user_functions import load_function
from gcore_core.contract.errors import ConfigError

Session = Callable[[str], dict[str, Any]]


@pytest.fixture
def session() -> Iterator[Session]:
    """Runs cells as a notebook's kernel does: in one namespace, sources kept in linecache."""
    main = types.ModuleType("__main__")
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    cells: list[str] = []

    def run(cell: str) -> dict[str, Any]:
        name = f"<cell {len(cells)} of {id(cells)}>"
        cells.append(name)
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        exec(compile(cell, name, "exec", dont_inherit=True), main.__dict__)
        return main.__dict__

    yield run
    sys.modules["__main__"] = before
    for name in cells:
        linecache.cache.pop(name, None)


def text_of(function: Any, where: str) -> str:
    return files_of(function, where)[0]


def imported(text: str, directory: Path) -> Any:
    """The module that a worker gets from the file."""
    file = directory / "written.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("written", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_a_function_uses_of_other_cells_travels_with_it(
    session: Session, tmp_path: Path
) -> None:
    session("import math\nimport os.path as place\nfrom collections import Counter\nimport re\n")
    session(
        "LIMIT = 3\nWEIGHTS = {'a': 0.5, 'b': [1, (2, None)]}\nVOWEL = re.compile('[aeiou]', re.I)"
    )
    session("def share(text):\n    return len(VOWEL.findall(text)) / max(1, len(text))\n")
    names = session(
        "def reward(record, scale=LIMIT):\n"
        "    counts = Counter(record)\n"
        "    base = place.basename('x/' + record)\n"
        "    return scale * share(base) + math.floor(WEIGHTS['b'][0]) + counts['a']\n"
    )
    written = imported(text_of(names["reward"], "reward"), tmp_path)
    assert written.reward("Aardvark") == names["reward"]("Aardvark")
    assert written.reward.__defaults__ == (3,)


def test_functions_that_call_each_other_travel_once(session: Session, tmp_path: Path) -> None:
    session("def even(n):\n    return True if n == 0 else odd(n - 1)\n")
    names = session("def odd(n):\n    return False if n == 0 else even(n - 1)\n")
    text = text_of(names["odd"], "reward")
    assert text.count("def even") == text.count("def odd") == 1
    assert imported(text, tmp_path).odd(7) is True


@pytest.mark.parametrize("text", ["\n        deep\n        ", "\nflat\n", "\n     \n    "])
def test_a_text_in_quotes_stays_as_it_is_where_the_function_is_indented(
    session: Session, text: str, tmp_path: Path
) -> None:
    names = session(f"if True:\n    def reward(record):\n        return '''{text}'''\n")
    written = imported(text_of(names["reward"], "reward"), tmp_path)
    assert written.reward(None) == names["reward"](None) == text


def test_a_decorator_travels_with_its_function(session: Session, tmp_path: Path) -> None:
    session("import functools\n")
    names = session("@functools.lru_cache\ndef reward(record):\n    return len(record)\n")
    assert imported(text_of(names["reward"], "reward"), tmp_path).reward("four") == 4


def test_what_only_annotations_name_need_not_travel(session: Session, tmp_path: Path) -> None:
    session("class Record:\n    pass\n")
    names = session(
        "def reward(record: Record) -> 'float':\n    size: Record = 1\n    return size\n"
    )
    assert imported(text_of(names["reward"], "reward"), tmp_path).reward(None) == 1


def test_an_importable_function_travels_as_an_import(tmp_path: Path) -> None:
    text = text_of(literal, "reward")
    assert "from gcore.functions import literal" in text
    assert imported(text, tmp_path).literal is literal


def test_everything_that_a_function_lacks_is_named_at_once(session: Session) -> None:
    session("class Judge:\n    pass\njudge = Judge()\nlog = open('/dev/null')\n")
    names = session(
        "def reward(record):\n    log.write(record)\n    return judge.score(record) + missing\n"
    )
    with pytest.raises(ConfigError) as caught:
        text_of(names["reward"], "reward")
    assert sorted(caught.value.facts["names"]) == ["judge", "log", "missing"]


def test_a_variable_of_the_function_around_it_is_refused_by_name(session: Session) -> None:
    names = session(
        "def make(bonus):\n    def reward(record):\n        return bonus\n    return reward\n"
        "reward = make(2.0)\n"
    )
    with pytest.raises(ConfigError, match="bonus") as caught:
        text_of(names["reward"], "reward")
    assert caught.value.facts["names"] == ["bonus"]


def test_a_module_that_only_this_session_finds_travels_with_what_it_imports(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "beside_the_notebook.py": "import own_tools.part as p\ndef size(x):\n    return p.n(x)",
        "own_tools/__init__.py": "",
        "own_tools/part.py": "from another_beside import UNIT\ndef n(x):\n    return UNIT * len(x)",
        "another_beside.py": "import beside_the_notebook\nUNIT = 2",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    session("import beside_the_notebook as beside\nfrom another_beside import UNIT\n")
    session("from beside_the_notebook import size\n")
    names = session("def reward(record):\n    return beside.size(record) + size(record) + UNIT\n")
    text, written = files_of(names["reward"], "reward")
    assert {name: content.decode() for name, content in written.items()} == files
    assert "import beside_the_notebook as beside" in text
    monkeypatch.undo()
    job = tmp_path / "job"
    for name, content in {**written, "reward.py": text.encode()}.items():
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_bytes(content)
    reward = load_function(job / "reward.py", "reward")
    assert reward("four") == 18
    assert reward.__globals__["beside"].__file__ == str(job / "beside_the_notebook.py")


def test_a_module_that_reads_files_beside_it_stays_where_it_is(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is imported where a new process finds it in this directory, and else refused by name."""
    (tmp_path / "with_data.py").write_text(
        "from pathlib import Path\nWORDS = Path(__file__)\ndef size(text):\n    return len(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    session("import with_data\n")
    names = session("def reward(record):\n    return with_data.size(record)\n")
    with pytest.raises(ConfigError, match="does not find the module with_data"):
        files_of(names["reward"], "reward")
    monkeypatch.chdir(tmp_path)
    text, written = files_of(names["reward"], "reward")
    assert "import with_data" in text and not written


def test_a_function_of_a_module_that_stays_travels_as_its_source(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "HERE = __file__\nUNIT = 2\ndef size(text):\n    return UNIT * len(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    session("from only_here import size\n")
    names = session("def reward(record):\n    return size(record)\n")
    text = text_of(names["reward"], "reward")
    monkeypatch.undo()
    assert imported(text, tmp_path).reward("four") == 8


@pytest.mark.parametrize("unit", [2, 3])
def test_a_name_that_two_modules_define_otherwise_is_refused(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int
) -> None:
    """In one file a name has one meaning; equal values are one."""
    (tmp_path / "only_there.py").write_text(
        "HERE = __file__\nUNIT = 2\ndef size(text):\n    return UNIT * len(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    session(f"from only_there import size\nUNIT = {unit}\n")
    names = session("def reward(record):\n    return UNIT + size(record)\n")
    if unit == 2:
        assert imported(text_of(names["reward"], "reward"), tmp_path).reward("four") == 10
        return
    with pytest.raises(ConfigError, match="UNIT: functions of several modules") as caught:
        text_of(names["reward"], "reward")
    assert caught.value.facts["names"] == ["UNIT"]


@pytest.mark.parametrize(
    "value",
    [lambda record: 1.0, functools.partial(len), len, object()],
    ids=["lambda", "partial", "builtin", "object"],
)
def test_what_has_no_source_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="no source that can travel"):
        text_of(value, "reward")


def test_a_function_of_a_plain_prompt_is_refused() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def reward(record):\n    return 1.0\n", names)
    with pytest.raises(ConfigError, match="source of reward is not known"):
        text_of(names["reward"], "reward")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.binary()
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(PLAIN)
def test_a_plain_value_comes_back_from_its_text_equal_or_has_none(value: Any) -> None:
    text = literal(value)
    holds_infinity = "inf" in repr(value)
    assert text is not None or holds_infinity
    if text is not None:
        assert eval(text) == value  # noqa: S307


def test_a_pattern_comes_back_with_its_flags() -> None:
    pattern = re.compile("a.b", re.DOTALL | re.IGNORECASE)
    text = literal(pattern)
    assert text is not None
    assert eval(text) == pattern  # noqa: S307


CHANGED = {
    "a call that wraps it": ["def reward(r):\n    return 1", "reward = around(reward)"],
    "a call under another name": ["def plain(r):\n    return 1", "reward = around(plain)"],
    "a helper that a call wraps": [
        "def helper(r):\n    return 1",
        "helper = around(helper)",
        "def reward(r):\n    return helper(r)",
    ],
    "a decorator that is defined again": [
        "@around\ndef reward(r):\n    return 1",
        "def around(f):\n    @functools.wraps(f)\n    def g(r):\n        return 2\n    return g",
    ],
    "a value that its decorator has read": [
        "def times(n):\n    def outer(f):\n        @functools.wraps(f)\n        def g(r):\n"
        "            return f(r) * n\n        return g\n    return outer\nN = 2",
        "@times(N)\ndef reward(r):\n    return 1",
        "N = 5",
    ],
    "attributes that it reads": ["def reward(r):\n    return reward.k\nreward.k = 5"],
    "defaults that its def lacks": ["def reward(r):\n    return 1\nreward.__defaults__ = (7,)"],
    "a default that cannot be written": ["def reward(r, s=object()):\n    return 1"],
    "other code": [
        "def reward(r):\n    return 1\ndef other(r):\n    return 2\n"
        "reward.__code__ = other.__code__"
    ],
}


@pytest.mark.parametrize("way", CHANGED)
def test_a_function_that_its_source_does_not_give_again_is_refused(
    way: str, session: Session
) -> None:
    session(
        "import functools\ndef around(f):\n    @functools.wraps(f)\n    def g(r):\n"
        "        return f(r) + 1\n    return g"
    )
    for cell in CHANGED[way]:
        names = session(cell)
    with pytest.raises(ConfigError, match="does not give the function that this session has"):
        files_of(names["reward"], "reward")


@pytest.mark.parametrize(
    "cells",
    [
        ["LIMIT = 3", "def reward(r, s=LIMIT):\n    return s", "LIMIT = 5"],
        ["import random\ndef reward(r, s=random.random()):\n    return s"],
        [
            "def reward(r, *, é='ä', s=1 +\n           2):\n    return s",
            "reward.__kwdefaults__['s'] = 9",
        ],
        ["def reward(r, seen=[]):\n    seen.append(r)\n    return seen[:1]\nreward('first')"],
        ["for i in range(3):\n    def reward(r, i=i):\n        return i"],
        ["import re\ndef reward(r, s=re.compile('a+', re.I)):\n    return s.findall(r + 'aA')"],
        ["def reward(r, s=sorted, key=lambda r: r):\n    return key(s(r))"],
    ],
)
def test_a_default_travels_as_the_value_that_it_has(
    cells: list[str], session: Session, tmp_path: Path
) -> None:
    for cell in cells:
        names = session(cell)
    written = imported(text_of(names["reward"], "reward"), tmp_path)
    assert written.reward("x") == names["reward"]("x")


@pytest.mark.parametrize("after", ["import os\n\n{}", "{}"])
def test_a_function_whose_file_was_edited_since_is_refused(
    after: str, session: Session, tmp_path: Path
) -> None:
    file = tmp_path / "script.py"
    before = "def reward(r):\n    return r > 1\n"
    file.write_text(before)
    names = session("")
    exec(compile(before, str(file), "exec"), names)
    assert imported(text_of(names["reward"], "reward"), tmp_path).reward(2)
    file.write_text(after.format(before.replace(">", "<")))
    linecache.checkcache()
    with pytest.raises(ConfigError, match=re.escape(f"{file} was edited after it was defined")):
        text_of(names["reward"], "reward")
