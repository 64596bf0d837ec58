"""contrib/codemod-0.3 rewrites what a plugin of 0.2 imported and required to what there is now."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gcore_core.config.homes import GONE
from gcore_core.contract.factories import import_file

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "contrib/codemod-0.3/rename_packages.py"
codemod = import_file(SCRIPT)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "from gcore_critic.loss import ValueLoss",
            "from gcore_algorithms.critic.loss import ValueLoss",
        ),
        ("from gcore_human import page", "from gcore_rewards.human import page"),
        (
            "import gcore_queueing.step\ngcore_queueing.step.play()",
            "import gcore_placement.queueing.step\ngcore_placement.queueing.step.play()",
        ),
        ('factory="gcore_venv.commands:create"', 'factory="gcore_tools.venv.commands:create"'),
        ('"gcore-context>=0.2,<0.3"', '"gcore-language>=0.2,<0.3"'),
        ('"gcore-trackers[wandb, mlflow]"', '"gcore-report[wandb,mlflow]"'),
        (
            "from gcore_core.testing.runs import run_recipe",
            "from gcore_testing.runs import run_recipe",
        ),
        (
            "from gcore_core.controllers.window import Ahead, Schedule\n",
            "from gcore_core.kits.programs import Ahead, Schedule\n",
        ),
        (
            "from gcore_core.controllers.training import Training",
            "from gcore_core.controllers.training import Training",
        ),
        ('test = ["gcore-core[testing]>=0.2"]', 'test = ["gcore-testing>=0.2"]'),
        ('"gcore-ray[engine]"', '"gcore-nodes[ray]"'),
        ("gcore-jobs[notebook]", "gcore-tools[jobs,notebook]"),
        ("plugins/gcore-eval", "plugins/gcore-report[eval]"),
        ("roles: {policy: {use: ray}}", "roles: {policy: {use: ray}}"),
        (
            "my_gcore_sim.x, gcore_simple, gcore-simple",
            "my_gcore_sim.x, gcore_simple, gcore-simple",
        ),
    ],
)
def test_a_name_of_0_2_becomes_one_of_0_3(old: str, new: str) -> None:
    assert codemod.rewritten(old) == new
    assert codemod.rewritten(new) == new, "what is new stays"


def test_every_package_of_0_3_is_there_and_every_one_that_went_is_known() -> None:
    for package in codemod.PACKAGES.values():
        assert importlib.util.find_spec(package) is not None, package
    known = {name.replace("_", "-") for name in codemod.PACKAGES}
    assert known == set(GONE) - {"gcore-museum", "gcore-tree"}


def test_the_page_has_every_name_that_went() -> None:
    page = (ROOT / "docs/how-to/move-to-0.3.md").read_text(encoding="utf-8")
    assert f"pip uninstall -y {' '.join(GONE)}\n" in page
    for old, new in codemod.PACKAGES.items():
        name = old.replace("_", "-")
        row = f"| `{name}` | `{codemod.rewritten(name)}` | `{old}` | `{new}` |\n"
        assert row in page, name


def test_every_extra_that_it_writes_is_declared() -> None:
    written = [codemod.rewritten(name) for name in codemod.OWN_EXTRA]
    written += [codemod.rewritten(f"{name}[{extra}]") for name, extra in codemod.EXTRAS]
    for requirement in written:
        name, _, extra = requirement.rstrip("]").partition("[")
        file = ROOT / "plugins" / name / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        assert extra in project["optional-dependencies"], requirement


def test_files_are_rewritten_in_place_and_named(tmp_path: Path) -> None:
    (tmp_path / "changed.py").write_text("import gcore_sim\n")
    (tmp_path / "kept.py").write_text("import gcore_torch\n")
    (tmp_path / "data.bin").write_bytes(b"gcore_sim\xff")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(tmp_path / "changed.py")]
    assert (tmp_path / "changed.py").read_text() == "import gcore_placement.sim\n"
    assert (tmp_path / "kept.py").read_text() == "import gcore_torch\n"
