"""What plugins have looked at is answered before a job starts, where somebody answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins

from gcore_core import cli
from gcore_core.run import preflight

Job = Callable[..., Path]

PLUGIN = """
from gcore_core import hookimpl
from gcore_core.contract.looking import Look

@hookimpl
def gcore_check_files(plan, datasets):
    rows = [len(datasets[path]) for path in sorted(datasets)]
    yield Look(where="roles.policy", function="gcore_parts_made:find", arguments={"rows": rows})
    yield Look(where="roles.policy", function="nothing", arguments={"rows": rows})
    yield Look(where="roles.policy", function="a:b", arguments={"rows": b"bytes"})
"""
PARTS = """
def find(arguments):
    yield f"roles.policy: looked at {arguments['rows']}."
"""


def test_check_tells_what_looks_of_plugins_find_in_the_opened_data(
    job: Job,
    installed: InstalledPlugins,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("G_CORE_CACHE", str(tmp_path / "cache"))
    installed.add("parts", PLUGIN, files={"gcore_parts_made.py": PARTS})
    monkeypatch.setenv("PYTHONPATH", str(installed.directory))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 3)
    data = ("data.use=core/jsonl", f"data.config.path={tmp_path / 'rows.jsonl'}")
    assert cli.main(["check", str(job()), "plugins=[parts]", *data]) == 2
    shown = capsys.readouterr().err
    assert "roles.policy: looked at [3]. [plugin parts]" in shown
    assert "a look that is not valid: function: 'nothing' is not module:function" in shown
    assert "a look that is not valid: arguments: no plain JSON: Object of type bytes" in shown


def test_without_gcore_tools_nobody_looks_and_check_says_so(
    job: Job,
    installed: InstalledPlugins,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plugin = PLUGIN.replace('"nothing"', '"a:b"').replace('b"bytes"', "rows")
    installed.add("parts", plugin, files={"gcore_parts_made.py": PARTS})
    monkeypatch.setattr(preflight, "ESTIMATES", "no_such_plugin")
    assert cli.main(["check", str(job()), "plugins=[parts]"]) == 0
    shown = capsys.readouterr().out
    assert "note: nobody looks at models, templates and functions" in shown
