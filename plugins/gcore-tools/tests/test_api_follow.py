"""How a call of Python ends when the process of its run has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gcore import follow as followed_module

from gcore_core.contract.errors import WorkerDied


@pytest.mark.parametrize(
    ("code", "interrupts", "expected"),
    [(130, 1, KeyboardInterrupt), (-9, 3, KeyboardInterrupt), (-9, 0, WorkerDied)],
)
def test_a_run_that_ctrl_c_has_ended_is_interrupted_however_it_ended(
    code: int, interrupts: int, expected: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third Ctrl-C kills the process; nobody else's signal is an interruption."""

    def ended(file: Any, overrides: Any, resume: Any, output: Any, followed: Any) -> int:
        followed.interrupts = interrupts
        return code

    monkeypatch.setattr(followed_module, "_run", ended)
    with pytest.raises(expected):
        followed_module.follow(Path("job.yaml"), [])
