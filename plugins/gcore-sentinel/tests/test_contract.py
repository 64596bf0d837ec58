"""Held to what every plugin and every sentinel must keep, in float32 and in low precision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import gcore_sentinel
import pytest
from gcore_sentinel.tables import find, read
from gcore_testing import PluginContract, SentinelContract

from gcore_core.contract.sentinel import SentinelContext

FOLDER = Path(gcore_sentinel.__file__).parent / "tables"


class TestPlugin(PluginContract):
    provider = "sentinel"


class TestFloat32(SentinelContract):
    provider = "sentinel"


class TestWithoutATable(SentinelContract):
    provider = "sentinel"
    band = 4.0


class _WithTable(SentinelContract):
    provider = "sentinel"
    band = 4.0
    table: ClassVar[Path]

    @property
    def config(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {"table": str(self.table)}

    def _context(self, directory: Any) -> SentinelContext:
        pair = read(self.table.read_bytes(), self.table.name).pair
        return replace(super()._context(directory), pair=pair)


class TestTorchWithTorch(_WithTable):
    table = FOLDER / "torch-torch-bfloat16-quickstart.json"


class TestVllmWithTorch(_WithTable):
    table = FOLDER / "vllm-torch-bfloat16-quickstart.json"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_is_found_for_its_pair_and_model_alone(path: Path, tmp_path: Path) -> None:
    file = read(path.read_bytes(), path.name)
    (tmp_path / "config.json").write_text(json.dumps({**file.model, "torch_dtype": "bfloat16"}))
    model = {"path": str(tmp_path)}
    assert find("auto", file.pair, model) == file
    assert find("auto", replace(file.pair, trainer="another"), model) is None
    (tmp_path / "config.json").write_text(json.dumps({**file.model, "vocab_size": 7}))
    assert find("auto", file.pair, model) is None
