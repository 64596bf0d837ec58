"""Naming a plugin costs little: its root and its descriptions import no engine."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gcore_core.config import catalog

ROOT = Path(__file__).parents[2]
ENGINES = [*catalog.HEAVY, "diffusers", "pyarrow"]

DESCRIBE = f"""
import importlib, sys
from gcore_core.contract.providers import KINDS
root = importlib.import_module(sys.argv[1])
hooks = [getattr(root, hook, None) for hook, _ in KINDS.values()]
print(sum(len(list(hook())) for hook in hooks if hook))
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & set({ENGINES})))
"""


def roots() -> Iterator[tuple[str, str]]:
    """(folder, module) of each plugin, and of each distribution that is a library."""
    for file in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        folder = file.parent.name
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        plugins = project.get("entry-points", {}).get("gcore", {})
        for module in sorted({folder.replace("-", "_"), *plugins.values()}):
            yield folder, module


@pytest.mark.parametrize(("folder", "module"), list(roots()))
def test_the_root_of_a_plugin_and_its_descriptions_import_no_engine(
    folder: str, module: str
) -> None:
    paths = [str(ROOT), str(ROOT / "plugins" / folder)]
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE, module],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, engines = done.stdout.splitlines()
    assert engines == ""
