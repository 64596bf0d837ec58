"""Naming a plugin costs little: its root and its descriptions import no engine."""

from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.mark.parametrize(
    "folder", sorted(path.name for path in (ROOT / "plugins").iterdir() if path.is_dir())
)
def test_the_root_of_a_plugin_and_its_descriptions_import_no_engine(folder: str) -> None:
    paths = [str(ROOT), str(ROOT / "plugins" / folder)]
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE, folder.replace("-", "_")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, engines = done.stdout.splitlines()
    assert engines == ""
