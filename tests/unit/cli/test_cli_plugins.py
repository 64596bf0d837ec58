"""``g-core plugins`` and what selects plugins: show, check, --no-plugins."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel
from gcore_testing.plugin_commands.check import check_one
from gcore_testing.plugin_commands.descriptions import field_help

from gcore_core import cli
from gcore_core.config.interpreters import Interpreter

HEAD = (
    "from dataclasses import dataclass\nfrom gcore_core import hookimpl\nfrom "
    "gcore_core.contract import providers as p\n"
)

DOCUMENTED = (
    HEAD
    + '''
@dataclass
class Inner:
    depth: int = 3
    """How deep,
    in layers."""

@dataclass
class Base:
    """Settings.

    rate: how fast,
        per second
    low, high: the range
    other: no field
    """

    rate: float
    low: int = 0
    high: int = 9

@dataclass
class Config(Base):
    high: int = 8
    """The top."""
    name: str = "x"
    inner: Inner = None
'''
)


@pytest.fixture
def path(installed: InstalledPlugins, monkeypatch: pytest.MonkeyPatch) -> InstalledPlugins:
    """Fabricated distributions that processes started from here see too."""
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (str(installed.directory), before)))
    )
    monkeypatch.delenv("G_CORE_PLUGINS", raising=False)
    return installed


def test_help_of_a_field_is_the_string_under_it_or_its_line_in_the_docstring(
    installed: InstalledPlugins,
) -> None:
    installed.add("documented", DOCUMENTED)
    import importlib

    module = importlib.import_module("gcore_documented")
    assert field_help(module.Config) == {
        "rate": "how fast, per second",
        "low": "the range",
        "high": "The top.",
    }
    assert field_help(module.Inner) == {"depth": "How deep, in layers."}


def test_show_lists_settings_with_type_default_help_and_whether_needs_are_met(
    installed: InstalledPlugins, capsys: pytest.CaptureFixture[str]
) -> None:
    source = DOCUMENTED.replace(
        "inner: Inner = None", "inner: Inner = field(default_factory=Inner)"
    )
    installed.add(
        "documented",
        "from dataclasses import field\n"
        + source
        + "@hookimpl\ndef gcore_filters():\n"
        + (
            "    yield p.FilterProvider(summary='keeps', factory='gcore_documented:Config', "
            "config=Config,\n"
        )
        + "        needs=('numpy>=2.0', 'numpy>=99', 'no-such-engine'))\n",
    )
    assert cli.main(["plugins", "show", "documented"]) == 0
    import numpy

    assert capsys.readouterr().out.splitlines() == [
        "documented (gcore-documented 0.1.0, gcore_documented)",
        "",
        "filter documented: keeps",
        "  factory: gcore_documented:Config",
        "  needs numpy>=2.0 (met)",
        f"  needs numpy>=99 (NOT met: found {numpy.__version__})",
        "  needs no-such-engine (NOT met: found none)",
        "  config.rate: float (must be given)",
        "      how fast, per second",
        "  config.low: int = 0",
        "      the range",
        "  config.high: int = 8",
        "      The top.",
        "  config.name: str = 'x'",
        "  config.inner.depth: int = 3",
        "      How deep, in layers.",
    ]
    assert cli.main(["plugins", "show", "documented", "--json"]) == 0
    (provider,) = json.loads(capsys.readouterr().out)["provides"]
    assert [need["met"] for need in provider["needs"]] == [True, False, False]
    assert provider["config"][0] == {
        "name": "rate",
        "type": "float",
        "default": None,
        "required": True,
        "help": "how fast, per second",
    }


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("True", "  traits: takes_stale"),
        ("self.limit > 1", "  traits: takes_stale"),
        ("self.path == 'x'", "  traits: depend on a setting without a default"),
    ],
)
def test_show_has_the_traits_of_a_provider_with_a_setting_that_must_be_given(
    path: InstalledPlugins, capsys: pytest.CaptureFixture[str], value: str, line: str
) -> None:
    path.add(
        "mine",
        HEAD + "from gcore_core.contract.traits import Traits\n"
        "@dataclass(kw_only=True)\nclass C:\n    path: str\n    limit: int = 2\n"
        f"    def traits(self) -> Traits:\n        return Traits(takes_stale={value})\n"
        "@hookimpl\ndef gcore_objectives():\n    yield p.ObjectiveProvider(summary='', "
        "factory='no.such:F', config=C)",
    )
    assert cli.main(["plugins", "show", "mine"]) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_every_setting_that_the_core_offers_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins", "show", "core", "--json"]) == 0
    provided = json.loads(capsys.readouterr().out)["provides"]
    silent = [
        f"{item['name']}: {s['name']}" for item in provided for s in item["config"] if not s["help"]
    ]
    assert provided and silent == []


def test_check_imports_the_plugin_in_a_process_of_its_own(
    path: InstalledPlugins, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plugins", "check", "fake"]) == 0
    assert capsys.readouterr().out == "plugin 'fake': nothing wrong found\n"
    assert "gcore_fake" not in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import jinja9", "failed to import: ModuleNotFoundError: No module named 'jinja9'"),
        (
            "import os; os._exit(7)",
            "plugin 'bad' ended the process that imported it (exit code 7): no output",
        ),
        (
            "@hookimpl\ndef gcore_filter():\n    pass",
            "no hook 'gcore_filter' (did you mean 'gcore_filters'?)",
        ),
        (
            (
                "@hookimpl\ndef gcore_filters():\n    yield p.FilterProvider(summary='', "
                "factory='gcore_bad:No')"
            ),
            "filter bad: 'gcore_bad:No': gcore_bad has no 'No'",
        ),
        (
            (
                "V = 5\n@hookimpl\ndef gcore_filters():\n    yield p.FilterProvider(summary='', "
                "factory='gcore_bad:V')"
            ),
            "filter bad: its factory 'gcore_bad:V' cannot be called.",
        ),
        (
            "@dataclass\nclass C:\n    x: set\n"
            "@hookimpl\ndef gcore_filters():\n    yield p.FilterProvider(summary='', "
            "factory='gcore_bad:C', config=C)",
            "filter bad: its config class C cannot be a schema: ",
        ),
        (
            "print('[]')\nimport torch",
            "importing gcore_bad imports torch, which every job then pays for",
        ),
        (
            "@dataclass\nclass C:\n    def take_stale(self) -> bool:\n        return True\n"
            "@hookimpl\ndef gcore_objectives():\n    yield p.ObjectiveProvider(summary='', "
            "factory='no.such:F', config=C)",
            "objective bad: its config class C: the core never calls take_stale(); did you mean "
            "Traits(takes_stale=...) of traits()?",
        ),
        (
            "@dataclass\nclass C:\n    traits: bool = True\n"
            "@hookimpl\ndef gcore_objectives():\n    yield p.ObjectiveProvider(summary='', "
            "factory='no.such:F', config=C)",
            "config class C: 'traits' is no method; write def traits(self) -> Traits",
        ),
    ],
)
def test_check_reports_problems_and_exits_with_3(
    path: InstalledPlugins, capsys: pytest.CaptureFixture[str], source: str, message: str
) -> None:
    path.add("bad", HEAD + source)
    if "torch" in source:
        path.add("engine", files={"torch/__init__.py": ""})
    assert cli.main(["plugins", "check", "bad"]) == 3
    assert message in capsys.readouterr().out


def test_check_does_not_import_factories_whose_engine_is_missing(
    path: InstalledPlugins, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = (
        "@hookimpl\ndef gcore_filters():\n    yield p.FilterProvider(summary='', "
        "factory='no.such:F', needs=('nope',))"
    )
    path.add("heavy", HEAD + hook)
    assert cli.main(["plugins", "check", "heavy"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "note: filter heavy: no.such:F was not imported, it needs nope (found none)",
        "plugin 'heavy': nothing wrong found",
    ]


UNWRITTEN = """
class Base:
    def submit(self):
        raise NotImplementedError

class Engine(Base):
    def submit(self):
        return []
    def step(self, record):
        if record is None:
            raise IndexError
        raise NotImplementedError(record)
    def abort(self, keys):
        raise NotImplementedError("it claims nothing")
    def read(self, kind):
        if kind == "text":
            return 1
        raise NotImplementedError(kind)

def helper():
    raise NotImplementedError()
"""


@pytest.mark.parametrize("needs", [(), ("nope",)])
def test_check_reports_what_nobody_has_written_also_where_the_engine_is_missing(
    path: InstalledPlugins, capsys: pytest.CaptureFixture[str], needs: tuple[str, ...]
) -> None:
    for claims, methods in (("", ["step"]), ("abort=True", ["step", "abort"])):
        hook = (
            "from gcore_core.contract.traits import Traits\n@dataclass\nclass C:\n"
            f"    def traits(self):\n        return Traits({claims})\n"
            "@hookimpl\ndef gcore_generators():\n    yield p.GeneratorProvider(summary='', "
            f"factory='gcore_fresh_parts:Engine', needs={needs}, config=C)"
        )
        path.add("fresh", HEAD + hook, files={"gcore_fresh_parts.py": UNWRITTEN})
        assert cli.main(["plugins", "check", "fresh"]) == 3
        file = path.directory / "gcore_fresh_parts.py"
        lines = UNWRITTEN.splitlines()
        places = [(f"def {name}(self, ", f"Engine.{name}") for name in methods]
        places.append(("def helper(", "helper"))
        numbered = [
            (number, name)
            for begins, name in places
            for number, line in enumerate(lines, 1)
            if line.strip().startswith(begins)
        ]
        assert [
            line for line in capsys.readouterr().out.splitlines() if not line.startswith("note: ")
        ] == [
            f"{file}:{number}: {name} raises NotImplementedError; write what it is to do."
            for number, name in numbered
        ]


def test_check_accepts_a_local_file_of_the_project(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(HEAD + "@hookimpl\ndef gcore_filterz():\n    return []")
    assert cli.main(["plugins", "check", str(tmp_path / "mine.py")]) == 3
    assert "plugin 'mine'" in capsys.readouterr().out


def test_check_in_another_interpreter_brings_what_checks_along(tmp_path: Path) -> None:
    """An engine's interpreter need not have gcore-testing."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    report = check_one("core", Interpreter(python=str(python), path=()))
    assert (report.problems, report.notes) == ([], [])


@pytest.mark.rest
def test_check_of_all_shows_which_are_broken_and_why(
    path: InstalledPlugins, capsys: pytest.CaptureFixture[str]
) -> None:
    path.add("bad", "import jinja9")
    path.add("old", wheel=Wheel(requires=["gcore-core<0.1"]))
    assert cli.main(["plugins", "check", "--json"]) == 3
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["fake"]["state"], rows["bad"]["state"], rows["old"]["state"]) == (
        "ok",
        "broken",
        "incompatible",
    )
    assert "No module named 'jinja9'" in rows["bad"]["reason"]


def test_no_plugins_leaves_only_the_core(
    path: InstalledPlugins,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    job: Callable[..., Path],
) -> None:
    monkeypatch.setenv("G_CORE_PLUGINS", "on")  # so that it is put back
    assert cli.main(["--no-plugins", "plugins", "list", "--json"]) == 0
    rows = {row["name"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert rows.pop("core") == "ok" and set(rows.values()) == {"disabled"}
    assert cli.main(["--no-plugins", "check", str(job())]) == 3
    assert "plugin 'fake' is disabled: G_CORE_PLUGINS=off." in capsys.readouterr().err


def test_a_missing_name_and_an_unknown_action_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plugins", "show"]) == 2
    assert (
        capsys.readouterr().err
        == "g-core plugins show: the name of a plugin is missing.\n  g-core plugins show NAME\n"
    )
    with pytest.raises(SystemExit) as caught:
        cli.main(["plugins", "shwo", "core"])
    assert caught.value.code == 2 and "invalid choice: 'shwo'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main(["plugins", "new", "foo"])
    assert caught.value.code == 2
    assert "argument action: to begin a plugin: g-core new" in capsys.readouterr().err
