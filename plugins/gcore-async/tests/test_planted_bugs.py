"""The bugs that the benchmark plants in the asynchronous program find their lines in the code."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_every_planted_bug_finds_its_lines_in_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the benchmark that hunts them fails after minutes."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = ("protocol_async_mutants", "protocol_mutants")
    try:
        mutants = importlib.import_module(names[0]).ASYNC_MUTANTS
        planted = importlib.import_module(names[1]).planted
    finally:
        for name in names:
            sys.modules.pop(name, None)
    assert len(mutants) >= 10
    for bug, (owner, function, _, _) in mutants.items():
        original = owner.__dict__[function]
        with planted(bug, mutants):
            assert owner.__dict__[function] is not original
        assert owner.__dict__[function] is original
