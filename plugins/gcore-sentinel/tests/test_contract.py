"""Held to what every plugin and every sentinel must keep, in float32 and in low precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gcore_sentinel

from gcore_core.contract.sentinel import SentinelContext
from gcore_core.testing import PluginContract, SentinelContract

TABLES = sorted((Path(gcore_sentinel.__file__).parent / "tables").glob("*.json"))


class TestPlugin(PluginContract):
    provider = "sentinel"


class TestFloat32(SentinelContract):
    provider = "sentinel"


class TestWithoutATable(SentinelContract):
    provider = "sentinel"
    band = 4.0


class TestLowPrecision(SentinelContract):
    provider = "sentinel"
    band = 4.0
    config: ClassVar[Mapping[str, Any]] = {"table": str(TABLES[0])}

    def _context(self, directory: Any) -> SentinelContext:
        from dataclasses import replace

        from gcore_sentinel.tables import read

        file = read(TABLES[0].read_bytes(), TABLES[0].name)
        return replace(super()._context(directory), pair=file.pair)
