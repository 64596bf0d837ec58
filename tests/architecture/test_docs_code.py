"""The code in the documentation is code: Python blocks run, YAML blocks load.

The convention: a ``python`` block runs by itself in a fresh process; a piece of something else has
the word ``piece`` after ``python`` in the line that begins it, and is only compiled. A ``yaml``
block is a job, or sections of one: those that it lacks are taken from the README's job. Roles that
name neither the policy nor its generator stand beside that job's.
docs/tutorials/first-plugin.md is followed command by command in
tests/integration/test_first_plugin.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gcore_testing.installed import InstalledPlugins

from gcore_core.config.plan import load_plan
from tests.support import made_pages

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *made_pages.committed(),
    *sorted((ROOT / "plugins").glob("*/README.md")),
]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)

#: Plugins that the pages name and that need not be installed here.
NAMED = {
    "mine": """
        from gcore_core import hookimpl
        from gcore_core.contract import providers

        @hookimpl
        def gcore_balancers():
            yield providers.BalancerProvider(summary="-", factory="gcore_testing.fake:FakeBalancer")

        @hookimpl
        def gcore_roles():
            yield providers.RoleProvider(name="teacher", summary="-", kind="annotator", columns=("teacher_logp",))

        @hookimpl
        def gcore_annotators():
            yield providers.AnnotatorProvider(summary="-", factory="gcore_testing.fake:FakeAnnotator")
        """,  # noqa: E501
}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> InstalledPlugins:
    installed = InstalledPlugins(tmp_path_factory.mktemp("installed"))
    for name, source in NAMED.items():
        installed.add(name, source)
    return installed


def blocks(language: str) -> Iterator[Any]:
    """(text, mark) of every block in a language; its id says where it begins."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match[1] == language and page.name != "first-plugin.md":
                line = text.count("\n", 0, match.start()) + 1
                yield pytest.param(
                    match[3], match[2].strip(), id=f"{page.relative_to(ROOT)}:{line}"
                )


@pytest.mark.parametrize(("text", "mark"), [*blocks("python")])
def test_a_python_block_runs(text: str, mark: str, named: InstalledPlugins, tmp_path: Path) -> None:
    compile(text, "<block>", "exec")
    assert mark in ("", "piece")
    if mark == "piece":
        return
    paths = [named.directory, ROOT, *(ROOT / "plugins").iterdir()]
    done = subprocess.run(
        [sys.executable, "-"],
        input=text,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("text", "mark"), [*blocks("yaml")])
def test_a_yaml_block_is_a_job_or_sections_of_one(
    text: str, mark: str, named: InstalledPlugins, tmp_path: Path
) -> None:
    for module in ("gcore_torch", "gcore_algorithms", "gcore_report", "gcore_vllm"):
        pytest.importorskip(module)
    assert mark == ""
    whole = next(
        match[3]
        for match in BLOCK.finditer(PAGES[0].read_text(encoding="utf-8"))
        if match[1] == "yaml"
    )
    readme, shown = yaml.safe_load(whole), yaml.safe_load(text)
    job = {**readme, **shown}
    if not {"policy", "rollout"} & set(job["roles"]):
        job["roles"] = {**readme["roles"], **job["roles"]}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with named:
        load_plan(tmp_path / "job.yaml")


def test_the_pages_contain_code_blocks() -> None:
    assert len(list(blocks("python"))) > 5
    assert len(list(blocks("yaml"))) > 3
