"""The contract of a filter holds for one that looks at a named reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gcore_testing import FilterContract


class TestVariedByOneReward(FilterContract):
    provider = "core/varied"
    config: ClassVar[Mapping[str, Any]] = {"reward": "straight"}
