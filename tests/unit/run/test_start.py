"""What is seen of a run that ends before its first process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import StepReport
from gcore_core.run import start
from gcore_core.run.restart_supervisor import Start

JOB = """\
run: {name: job}
launcher: {use: core/inline}
data: {use: letters}
advantage: {use: letters}
objective: {use: letters}
roles:
  policy: {use: letters}
  rollout: {use: letters}
rewards:
  letters: {use: letters}
"""


class Recorded:
    """A display that keeps what it was closed with."""

    def __init__(self) -> None:
        self.closed: list[list[str]] = []

    def phase(self, text: str, share: float | None = None) -> None:
        pass

    def step(self, report: StepReport) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self, lines: Iterable[str] = ()) -> None:
        self.closed.append(list(lines))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConfigError("the disk is full")])
def test_what_ends_a_run_while_it_is_prepared_leaves_the_terminal_as_it_was(
    error: BaseException,
    installed: InstalledPlugins,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    installed.add("letters", "from gcore_testing.fake import *\n")
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    monkeypatch.setattr(start.environment, "write", fail)
    display = Recorded()
    with contextlib.suppress(ConfigError):
        job = Start(file=file, overrides=[f"run.dir={tmp_path / 'run'}"])
        start.run_job(job, display_of=lambda steps: display)
    assert display.closed == [[]]
