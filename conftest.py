"""Tests start processes, which must not inherit that signals are ignored or blocked. No test waits
for ever.

Signals are ignored under nohup, in a script's `&` and after `trap '' TERM`.
"""

from __future__ import annotations

import os
import signal

import pytest

from gcore_core.node.inherited import reset_signals

#: Tests with one of these markers may take an hour; others what pyproject.toml says (``timeout``).
LONG = ("engine", "gpu", "slow")
LONG_S = 3600

reset_signals(keep={signal.SIGHUP})
# Tests under nohup outlive their terminal. What has a handler is not ignored by the processes that
# are started, so pytest-xdist's own need it too; they end with the one that has started them.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or "PYTEST_XDIST_WORKER" in os.environ:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in LONG):
            item.add_marker(pytest.mark.timeout(LONG_S))
