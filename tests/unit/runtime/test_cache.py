"""Everything that outlives a run lies below one directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gcore_core.kits.cache import cache_root

ROOT = Path(__file__).parents[3]


def test_the_directory_is_the_variable_s_or_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("~/kept", str(tmp_path / "kept")):
        monkeypatch.setenv("G_CORE_CACHE", value)
        assert cache_root() == tmp_path / "kept"
    monkeypatch.setenv("G_CORE_CACHE", "")
    assert cache_root() == tmp_path / ".cache" / "g-core"


def test_no_other_module_looks_the_directory_up() -> None:
    shipped = [*(ROOT / "gcore_core").rglob("*.py"), *ROOT.glob("plugins/*/gcore_*/**/*.py")]
    looks_up = re.compile(r"environ[^\n]*G_CORE_CACHE")
    found = [path for path in shipped if looks_up.search(path.read_text(encoding="utf-8"))]
    assert shipped and found == []
