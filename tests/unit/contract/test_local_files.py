"""A user's file imports what lies beside it, as ``python FILE`` would, and nobody else does."""

from __future__ import annotations

import importlib
import multiprocessing
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from gcore_core.config.user_functions import load_function
from gcore_core.contract.errors import DataError
from gcore_core.contract.factories import import_attribute, reference_to
from gcore_core.contract.installing import install_command
from gcore_core.contract.local_files import advice, files_beside, import_file


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """Writes files below a folder and returns the first one."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder / next(iter(files))


HELPER = "def score(text):\n    return len(text)\n"
FORMS = {
    "from helpers import score": "from helpers import score",
    "import helpers": "import helpers\nscore = helpers.score",
    "import helpers as other": "import helpers as other\nscore = other.score",
    "from helpers import *": "from helpers import *",
    "a relative import": "from .helpers import score",
    "a relative import of a module": "from . import helpers\nscore = helpers.score",
    "a function of a package": "from tools import score",
    "a module of a package": "from tools.lengths import score",
    "a module of a package by its name": "import tools.lengths\nscore = tools.lengths.score",
    "a module of a package as another": "import tools.lengths as lengths\nscore = lengths.score",
    "a relative import of a package": "from .tools.lengths import score",
    "a folder without __init__.py": "from plain.lengths import score",
    "an import in a function": "def score(x):\n    import helpers as h\n    return h.score(x)",
    "by importlib": (
        "import importlib\nscore = importlib.import_module('.helpers', __package__).score"
    ),
    "by __import__": "score = __import__('helpers').score",
    "where another one lacks": (
        "try:\n    from no_such_module import score\n"
        "except ImportError:\n    from helpers import score"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_imports_what_lies_beside_however_it_is_written(form: str, tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {
            "rewards.py": FORMS[form],
            "helpers.py": HELPER,
            "tools/__init__.py": "from .lengths import score",
            "tools/lengths.py": "from helpers import score\nfrom .names import NAME",
            "tools/names.py": "NAME = 'lengths'",
            "plain/lengths.py": "import helpers\nscore = helpers.score",
        },
    )
    assert load_function(file, "score")("four") == 4
    if "." not in form:  # what python itself would do
        words = [sys.executable, "-c", "import rewards; print(rewards.score('four'))"]
        assert (
            "relative" in form
            or "importlib" in form
            or (subprocess.run(words, cwd=tmp_path, capture_output=True, text=True).stdout == "4\n")
        )


def test_folders_have_modules_of_one_name_and_the_process_sees_none_of_them(tmp_path: Path) -> None:
    functions = []
    path = list(sys.path)
    for number in (1, 2):
        file = write(
            tmp_path / str(number),
            {
                "rewards.py": "import helpers, tools.part\n"
                "def score():\n    from later import L\n    return helpers.N, tools.part.N, L",
                "helpers.py": f"N = {number}",
                "later.py": f"L = {number}",
                "tools/__init__.py": "",
                "tools/part.py": "from helpers import N",
            },
        )
        functions.append(load_function(file, "score"))
    assert [function() for function in functions] == [(1, 1, 1), (2, 2, 2)]
    assert sys.path == path
    assert not {"rewards", "helpers", "later", "tools"} & set(sys.modules)


def test_files_of_a_folder_share_their_modules(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "one.py": "import state, two\nfrom state import SEEN\nSEEN.append('one')",
            "two.py": "import one\nfrom state import SEEN\nSEEN.append('two')",
            "state.py": "SEEN = []",
        },
    )
    one = import_file(tmp_path / "one.py")
    two = import_file(tmp_path / "two.py")
    assert one.SEEN is two.SEEN and one.SEEN == ["two", "one"]
    assert one.two is two and two.one is one


def test_what_lies_beside_comes_before_what_is_installed_for_this_folder_alone(
    tmp_path: Path,
) -> None:
    file = write(
        tmp_path,
        {"rewards.py": "import json, sys\nfrom json import MINE", "json.py": "MINE = 1"},
    )
    assert import_file(file).MINE == 1
    assert not hasattr(__import__("json"), "MINE")


def test_a_folder_of_data_hides_no_library_and_a_file_may_be_called_like_one(
    tmp_path: Path,
) -> None:
    file = write(
        tmp_path,
        {
            "msgspec.py": "import numpy\nfrom msgspec import Struct\nfrom numpy import float32",
            "numpy/rows.txt": "",
        },
    )
    assert import_file(file).Struct is __import__("msgspec").Struct


def test_what_lies_beside_and_is_installed_is_one_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a project in development, whose folder also has the job. Where a process was started does
    not count: workers are started elsewhere.
    """
    file = write(
        tmp_path,
        {
            "rewards.py": "import own_project_here\nfrom own_project_here import part",
            "own_project_here/__init__.py": "",
            "own_project_here/part.py": "",
        },
    )
    names = [str(one.relative_to(tmp_path)) for one in files_beside(file)]
    assert names == ["own_project_here/__init__.py", "own_project_here/part.py"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert len(files_beside(file)) == 2
    monkeypatch.setattr(sys, "path", [*sys.path[1:], str(tmp_path)])
    assert files_beside(file) == []
    assert import_file(file).part is importlib.import_module("own_project_here.part")
    del sys.modules["own_project_here.part"], sys.modules["own_project_here"]


@pytest.mark.parametrize("name", ["my-rewards.py", "rewards.v2.py", "a b.py", "rewards.py"])
def test_a_file_has_any_name_in_any_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "my jobs_2f é.d"
    files = {name: "from helpers import score", "helpers.py": HELPER}
    file = write(folder, {**files, "rewards/__init__.py": "raise RuntimeError"})
    assert load_function(file, "score")("four") == 4
    assert import_file(file) is import_file(file)


def test_a_file_behind_a_link_imports_what_lies_beside_it(tmp_path: Path) -> None:
    file = write(tmp_path / "real", {"rewards.py": "from helpers import *", "helpers.py": HELPER})
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "other.py").symlink_to(file)
    assert import_file(tmp_path / "folder/rewards.py") is import_file(file)
    assert import_file(tmp_path / "other.py") is import_file(file)


def test_a_class_of_a_file_beside_is_found_again_by_its_reference(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {
            "mine.py": "from config import C\nfrom tools.config import D",
            "config.py": "class C: pass",
            "tools/__init__.py": "",
            "tools/config.py": "from config import C\nclass D(C): pass",
        },
    )
    module = import_file(file)
    assert reference_to(module.C) == f"{tmp_path}/config.py:C"
    for cls in (module.C, module.D):
        assert import_attribute(reference_to(cls)) is cls
    found = "import sys; from gcore_core.contract.factories import import_attribute as found; "
    words = [sys.executable, "-c", f"{found}print(found(sys.argv[1]).__mro__[1].__name__)"]
    words.append(reference_to(module.D))
    assert subprocess.run(words, capture_output=True, text=True).stdout == "C\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_pool_finds_functions_of_users_however_it_starts_processes(
    method: str, tmp_path: Path
) -> None:
    file = write(
        tmp_path,
        {
            "rewards.py": "from helpers import score\ndef own(text):\n    return score(text) + 1",
            "helpers.py": HELPER,
        },
    )
    module = import_file(file)
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert list(pool.map(module.own, ["four"])) == [5]
        assert list(pool.map(module.score, ["four"])) == [4]


# -- what is not there -----------------------------------------------------------------------------


#: What a file holds, what is said of it, and what is advised.
BROKEN = [
    (
        "import missing",
        "rewards.py:1: does not import: ModuleNotFoundError",
        "put missing.py next to",
    ),
    ("from .missing import x", "No module named 'missing'", "put missing.py next to rewards.py"),
    (
        "import importlib\nimportlib.import_module('helpers')",
        "rewards.py:2: does not import: ModuleNotFoundError: No module named 'helpers'",
        "helpers lies next to it: write `import helpers`",
    ),
    ("from ..above import x", "beyond top-level package", "in its folder and below"),
    ("import helpers.missing", "No module named 'helpers.missing'", ""),
    ("from helpers import missing", "cannot import name 'missing'", ""),
    ("import broken", "rewards.py:1: does not import: ZeroDivisionError", ""),
]


@pytest.mark.parametrize(("content", "said", "advice"), BROKEN)
def test_what_does_not_import_is_told_with_its_line_and_what_to_do(
    content: str, said: str, advice: str, tmp_path: Path
) -> None:
    files = {"rewards.py": content, "helpers.py": HELPER, "broken.py": "1 / 0"}
    file = write(tmp_path, files)
    with pytest.raises(DataError) as caught:
        load_function(file, "score")
    assert said in str(caught.value)
    assert advice in caught.value.todo and bool(advice) == bool(caught.value.todo)


@pytest.mark.parametrize(
    ("module", "home"), [("gcore_testing", "gcore-testing"), ("gcore", "gcore-tools")]
)
def test_a_package_of_the_project_is_to_be_installed_and_not_put_beside(
    module: str, home: str, tmp_path: Path
) -> None:
    missing = ModuleNotFoundError(f"No module named {module!r}", name=module)
    said = advice(tmp_path / "stand_ins.py", missing)
    assert said == f"it comes with {home}: {install_command(home)}"


# -- what travels with a file ----------------------------------------------------------------------


def test_files_that_a_file_imports_are_known_without_importing_any(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {
            "rewards.py": "import os, numpy\nfrom helpers import score\nimport rewards\n"
            "def later():\n    from tools import part\n    from .near import x",
            "helpers.py": "import deep.down.module\nraise RuntimeError",
            "tools/__init__.py": "from . import shared",
            "tools/part.py": "from ..helpers import score\nfrom ...above import x",
            "tools/shared.py": "",
            "tools/unused.py": "",
            "deep/down/module.py": "no Python",
            "near.py": "import rewards",
            "unused.py": "",
        },
    )
    (tmp_path.parent / "above.py").write_text("")
    names = sorted(str(one.relative_to(tmp_path)) for one in files_beside(file))
    assert names == [
        "deep/down/module.py",
        "helpers.py",
        "near.py",
        "tools/__init__.py",
        "tools/part.py",
        "tools/shared.py",
    ]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/link.py").symlink_to(file)
    assert len(files_beside(tmp_path / "elsewhere/link.py")) == 6
    assert files_beside(tmp_path / "unused.py") == []
    assert files_beside(tmp_path / "none.py") == []
    assert files_beside(tmp_path) == []
