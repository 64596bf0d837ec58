"""Tests start processes, which must not inherit that signals are ignored or blocked. No test waits
for ever.

Signals are ignored under nohup, in a script's `&` and after `trap '' TERM`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gcore_core.node.inherited import reset_signals

#: Tests with one of these markers may take an hour; others what pyproject.toml says (``timeout``).
LONG = ("engine", "gpu", "slow")
LONG_S = 3600
#: Marks of single tests; where only such are asked for, files that do not say the mark hold none.
FEW = ("protects", "rest")

reset_signals(keep={signal.SIGHUP})
# Tests under nohup outlive their terminal. What has a handler is not ignored by the processes that
# are started, so pytest-xdist's own need it too; they end with the one that has started them.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or "PYTEST_XDIST_WORKER" in os.environ:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Opens no file in vain for ``-m "rest and ..."``: most of them import a library of models."""
    mark = config.option.markexpr.partition(" ")[0]
    if mark not in FEW or collection_path.suffix != ".py":
        return None
    return f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in LONG):
            item.add_marker(pytest.mark.timeout(LONG_S))
