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
        ('test = ["gcore-core[testing]>=0.2"]', 'test = ["gcore-testing>=0.2"]'),
        ('"gcore-ray[engine]"', '"gcore-nodes[ray]"'),
        ("gcore-jobs[notebook]", "gcore-tools[jobs,notebook]"),
        ("f\"gcore-trackers[{','.join(names)}]\"", "f\"gcore-report[{','.join(names)}]\""),
        ("plugins/gcore-eval", "plugins/gcore-report[eval]"),
        ("roles: {policy: {use: ray}}", "roles: {policy: {use: ray}}"),
        ("install(gcore_ray=1)", "install(gcore_ray=1)"),
        (
            "my_gcore_sim.x, gcore_simple, gcore-simple",
            "my_gcore_sim.x, gcore_simple, gcore-simple",
        ),
        ("from gcore_core.kits.loopback import Door", "from gcore_report.loopback import Door"),
        ("from gcore_core.kits import loopback", "from gcore_report import loopback"),
        ("import gcore_core.kits.machines as m", "import gcore_nodes.machines as m"),
        ("from gcore_core.kits import machines", "from gcore_nodes import machines"),
        (
            "from gcore_core.kits.machines import Host, MachinesConfig",
            "from gcore_nodes.machines import Host\n"
            "from gcore_nodes.machines_config import MachinesConfig",
        ),
        (
            "from gcore_core.kits.launching import framed, make_identity, AgentSpec  # noqa",
            "from gcore_core.kits.wire import framed\n"
            "from gcore_nodes.identity import make_identity\n"
            "from gcore_core.kits.launching import AgentSpec  # noqa",
        ),
        (
            "    from gcore_core.kits.launching import (\n        framed,\n        Worker\n    )\n",
            "    from gcore_core.kits.wire import framed\n"
            "    from gcore_core.kits.launching import Worker\n",
        ),
        ("from gcore_core import load, train as t", "from gcore import load, train as t"),
        ("import gcore_core as gcore\ngcore.train()", "import gcore\ngcore.train()"),
        (">>> import gcore_core as g\n>>> g.run()", ">>> import gcore as g\n>>> g.run()"),
        (
            "import gcore_core as gcore\n@gcore.hookimpl\n",
            "import gcore_core as gcore\n@gcore.hookimpl\n",
        ),
        ('"gcore-core[loopback]>=0.2"', '"gcore-report>=0.2"'),
        ('"gcore-core[completion]"', '"gcore-tools[completion]"'),
        ('"gcore-core[tls]"', '"gcore-nodes"'),
        ("g-core plugins new mine --kind reward", "g-core new mine --kind reward"),
        ("await self.placement.rest()", "await self.placement.sleep()"),
    ],
)
def test_a_name_of_0_2_becomes_one_of_0_3(old: str, new: str) -> None:
    assert codemod.rewritten(old) == new
    assert codemod.rewritten(new) == new, "what is new stays"
    assert codemod.left(new) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "from gcore_core.controllers.window import (\n    Ahead,\n    Window as W,\n)\n",
            "from gcore_core.kits.programs import Ahead, Producer as W\n",
        ),
        (
            "from gcore_core.controllers.context import ControllerContext  # noqa: F401\n",
            "from gcore_core.kits.programs import ControllerContext  # noqa: F401\n",
        ),
        (
            "from gcore_core.controllers.window import Window, Taken\n",
            "from gcore_core.kits.programs import Producer as Window, StepBatch as Taken\n",
        ),
        (
            "from gcore_core.controllers.window.schedule import Told as Report\n",
            "from gcore_core.kits.programs import GroupReport as Report\n",
        ),
    ],
)
def test_step_programs_come_from_their_kit(old: str, new: str) -> None:
    assert codemod.rewritten(old) == new
    assert codemod.rewritten(new) == new, "what is new stays"
    assert codemod.left(new) == []


PRIVATE = "gcore_core.controllers is not public any more; use gcore_core.kits.programs"


@pytest.mark.parametrize(
    ("old", "new", "todo"),
    [
        (
            "\nfrom gcore_core.controllers.training import Training",
            "\nfrom gcore_core.controllers.training import Training",
            [(2, PRIVATE)],
        ),
        (
            "from gcore_core.controllers.window import Window, Drawing",
            "from gcore_core.kits.programs import Producer as Window\n"
            "from gcore_core.controllers.window import Drawing",
            [(2, PRIVATE)],
        ),
        (
            "from gcore_core import controllers",
            "from gcore_core import controllers",
            [(1, PRIVATE)],
        ),
        (
            "from gcore_core.kits.launching import (\n    Worker,  # one\n    framed,\n)",
            "from gcore_core.kits.launching import (\n    Worker,  # one\n    framed,\n)",
            [(1, "framed is in gcore_core.kits.wire; split this import")],
        ),
        (
            "from gcore_core.kits import launching\nlaunching.make_identity()",
            "from gcore_core.kits import launching\nlaunching.make_identity()",
            [
                (
                    2,
                    "it left gcore_core.kits.launching; docs/how-to/move-to-0.3.md says for where",
                )
            ],
        ),
        (
            "AgentSpec(\n    store=StoreSpec(),\n    lease_s=3,\n)",
            "AgentSpec(\n    store=StoreSpec(),\n    lease_s=3,\n)",
            [(1, "use gcore_nodes.agent.MachineAgentSpec, which has these fields")],
        ),
        (
            "import gcore_core as gcore\ngcore.hookimpl, gcore.train",
            "import gcore_core as gcore\ngcore.hookimpl, gcore.train",
            [(1, "train is in gcore, of gcore-tools; import gcore")],
        ),
        (
            "import gcore_core.contract\ngcore_core.train()",
            "import gcore_core.contract\ngcore_core.train()",
            [(2, "calls from Python are in gcore, of gcore-tools; import gcore")],
        ),
        (
            "from gcore_core import hookimpl, testing",
            "from gcore_core import hookimpl, testing",
            [(1, "import gcore_testing as testing")],
        ),
        (
            '"gcore-core[testing,tls]>=0.2"',
            '"gcore-core[testing,tls]>=0.2"',
            [
                (
                    1,
                    "require gcore-tools[completion] for completion, gcore-report for loopback, "
                    "gcore-testing for testing, gcore-nodes for tls",
                )
            ],
        ),
        (
            "gcore-refine",
            "gcore-refine",
            [(1, "gcore-refine is gone; write an environment in its place")],
        ),
        ("gcore-tree", "gcore-tree", [(1, "gcore-tree is gone; remove it")]),
        (
            "import gcore_museum",
            "import gcore_museum",
            [(1, "gcore-museum is gone; say `python -m tests.museum` in a checkout of G-Core")],
        ),
    ],
)
def test_what_is_no_plain_rename_is_said(old: str, new: str, todo: list[tuple[int, str]]) -> None:
    assert codemod.rewritten(old) == new
    assert codemod.left(new) == todo
    assert codemod.rewritten(new) == new, "a second time changes nothing"


def test_every_name_that_moved_is_where_it_says() -> None:
    for was_in, names in codemod.NAMES.items():
        for name, module in names.items():
            if was_in == "gcore_core.kits":
                assert importlib.util.find_spec(f"{module}.{name}") is not None, name
            else:
                assert hasattr(importlib.import_module(module), name), name
    programs = importlib.import_module("gcore_core.kits.programs")
    assert set(programs.__all__) == codemod.PROGRAMS
    fields = importlib.import_module("gcore_nodes.agent").MachineAgentSpec.__struct_fields__
    common = importlib.import_module("gcore_core.kits.launching").AgentSpec.__struct_fields__
    assert set(fields) - set(common) == codemod.AGENT_FIELDS


def test_the_page_has_every_name_that_went() -> None:
    page = (ROOT / "docs/how-to/move-to-0.3.md").read_text(encoding="utf-8")
    assert f"pip uninstall -y {' '.join(GONE)}\n" in page
    for old, new in codemod.MODULES.items():
        name = old.replace("_", "-")
        if name in GONE:
            assert f"| `{name}` | `{codemod.rewritten(name)}` | `{old}` | `{new}` |\n" in page, name


def test_every_extra_that_it_writes_is_declared() -> None:
    written = [codemod.rewritten(name) for name in codemod.OWN_EXTRA]
    written += [codemod.rewritten(f"{name}[{extra}]") for name, extra in codemod.EXTRAS]
    for requirement in written:
        name, _, extra = requirement.rstrip("]").partition("[")
        file = ROOT / "plugins" / name / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        assert extra in project["optional-dependencies"], requirement


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)


def test_files_are_rewritten_in_place_and_named(tmp_path: Path) -> None:
    (tmp_path / "changed.py").write_bytes(b"import gcore_sim\r\n")
    (tmp_path / "kept.py").write_text("import gcore_torch\n")
    (tmp_path / "data.bin").write_bytes(b"gcore_sim\xff")
    (tmp_path / "a.py").write_bytes(b"import gcore_sim\xff")
    (tmp_path / "left.py").write_text("\nimport gcore_tree\n")
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(tmp_path / "changed.py"),
        f"{tmp_path / 'a.py'}: skipped, since it is not UTF-8",
        f"{tmp_path / 'left.py'}:2: gcore-tree is gone; remove it",
    ]
    assert (tmp_path / "changed.py").read_bytes() == b"import gcore_placement.sim\r\n"
    assert (tmp_path / "kept.py").read_text() == "import gcore_torch\n"
    assert (tmp_path / "a.py").read_bytes() == b"import gcore_sim\xff"


@pytest.mark.parametrize("folder", [".venv", "node_modules", "build", "src/.tox"])
def test_folders_of_others_are_skipped(tmp_path: Path, folder: str) -> None:
    file = tmp_path / folder / "lib" / "one.py"
    file.parent.mkdir(parents=True)
    file.write_text("import gcore_sim\n")
    assert run(tmp_path).stdout == ""
    assert run(file).stdout == f"{file}\n", "one that is named is rewritten"


def test_wrong_arguments_are_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import gcore_sim\n")
    done = run(tmp_path, "no/such/path")
    assert (done.returncode, done.stderr) == (2, "There is no no/such/path.\n")
    assert (tmp_path / "one.py").read_text() == "import gcore_sim\n", "nothing is begun"
    done = run()
    assert done.returncode == 2
    assert done.stderr == "Give the files or folders that are to be rewritten.\n"


def test_help_says_what_it_does() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert codemod.__doc__ in done.stdout
