"""What an objective has learned goes to the same objective of a resumed run, and to no other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from gcore_language.objective_state import learned, restore

from gcore_core.contract.local_files import import_file

OBJECTIVE = """
class Adapts:
    beta = 0.0

    def observe(self, metrics):
        pass

    def state(self):
        return {"beta": self.beta}

    def restore(self, state):
        self.beta = state["beta"]
"""


def objective(file: Path) -> Any:
    file.parent.mkdir(exist_ok=True)
    file.write_text(OBJECTIVE)
    return import_file(file).Adapts()


def test_an_objective_of_another_module_with_the_same_class_name_gets_nothing(
    tmp_path: Path,
) -> None:
    first, second = objective(tmp_path / "first.py"), objective(tmp_path / "second.py")
    first.beta = 0.5
    restore(second, learned(first))
    assert second.beta == 0.0


def test_an_objective_in_a_file_that_was_moved_keeps_what_it_has_learned(tmp_path: Path) -> None:
    first = objective(tmp_path / "a" / "mine.py")
    first.beta = 0.5
    state = learned(first)
    moved = objective(tmp_path / "b" / "mine.py")
    shutil.rmtree(tmp_path / "a")
    restore(moved, state)
    assert moved.beta == 0.5


@pytest.mark.parametrize("state", [{}, {"Adapts": {"beta": 0.25}}])
def test_a_checkpoint_with_the_class_alone_is_read(state: dict[str, Any], tmp_path: Path) -> None:
    one = objective(tmp_path / "mine.py")
    restore(one, state)
    assert one.beta == (0.25 if state else 0.0)
