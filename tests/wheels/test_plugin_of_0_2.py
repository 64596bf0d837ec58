"""A plugin of 0.2 runs after the steps of docs/how-to/move-to-0.3.md.

Its files lie in the folder ``plugin_of_0_2``, as they were written for 0.2: a command, hooks, an
observer, a role with an annotator, a venv and a view.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.wheels import REPOSITORY, make_editable, make_venv, run_outside

OLD = Path(__file__).with_name("plugin_of_0_2")
DRAW = "import sys, pathlib, gcore_old.picture as p; print(p.view(pathlib.Path(sys.argv[1])).html)"
CODEMODS = REPOSITORY / "contrib/codemod-0.3"


def test_a_plugin_of_0_2_runs_after_the_steps_of_the_page(wheels: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "gcore-old"
    shutil.copytree(OLD, plugin)
    for file in plugin.rglob("*.txt"):  # so that nothing here takes them for its own
        if file.name.endswith(".py.txt"):
            file.rename(file.with_suffix(""))
    for script in ("rename_packages.py", "convert_traits.py"):
        assert [line for line in codemod(script, plugin) if ": " in line] == [], "nothing is left"
    project = plugin / "pyproject.toml"
    project.write_text(project.read_text().replace(">=0.2,<0.3", ">=0.3,<0.4"))

    programs = make_venv(tmp_path / "venv", wheels, ["gcore-testing", "gcore-tools", "setuptools"])
    make_editable(programs, plugin)
    g_core = programs / "g-core"
    run_outside(g_core, "plugins", "check", "old", directory=plugin)
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run_outside(programs / "python", *tests, directory=plugin)

    run_outside(g_core, "run", "job.yaml", directory=plugin)
    run = plugin / "runs/old/001"
    assert (run / "hooks.txt").read_text() == "0\n1\n2\n", "its hooks saw every step"
    assert (run / "observer.txt").read_text() == "0\n1\n2\n", "its observer saw every step"
    assert "step 2" in run_outside(g_core, "old", "say", str(run), directory=plugin)
    shown = run_outside(g_core, "plugins", "show", "old", directory=plugin)
    assert "venv old/mine: the core alone" in shown
    drawn = run_outside(programs / "python", "-c", DRAW, str(run), directory=plugin)
    assert drawn.startswith("<p>reward ")


def codemod(name: str, plugin: Path) -> list[str]:
    """Runs one script of the page over a plugin; what it prints."""
    command = [sys.executable, str(CODEMODS / name), str(plugin)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()
