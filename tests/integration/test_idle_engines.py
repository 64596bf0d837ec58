"""An engine whose steps return and end nothing is hung, unless it says that it goes on."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.support import runs

PATIENCE_S = 3.0

IDLE = """
import os, time
from dataclasses import dataclass
from pathlib import Path
from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_testing import fake


class Idle(fake.FakeGenerator):
    '''Ends nothing from its second version on: for ever, in the first process that comes there.'''

    def step(self):
        if self.version == 1 and not self._idle():
            return []
        return super().step()

    def _idle(self):
        if not hasattr(self, "first"):
            self.first = not os.path.exists("idle")
            Path("idle").touch()
        return not self.first


class Slow(Idle):
    '''Ends nothing for twice the patience; it counts an action now and then.'''

    def __init__(self, config, context):
        super().__init__(config, context)
        self._until_s = None

    def _idle(self):
        self._until_s = self._until_s or time.monotonic() + 6.0
        time.sleep(0.01)
        self._progress()
        return time.monotonic() > self._until_s


@dataclass(frozen=True, kw_only=True)
class Repeats(fake.FakeGeneratorConfig):
    def traits(self):
        return Traits(receives_weights=True, fingerprints=True, determinism=True, abort=True)


@hookimpl
def gcore_generators():
    for cls in (Idle, Slow):
        yield p.GeneratorProvider(
            name=cls.__name__.lower(), summary="-", factory=f"idle:{cls.__name__}",
            config=Repeats,
        )
"""


def job(directory: Path, rollout: str) -> dict[str, object]:
    """A job in which one process is a generator of this kind."""
    whole = runs.job(run={"patience_s": PATIENCE_S, "deterministic": True})
    whole["local"] = [*whole["local"], "idle.py"]
    whole["roles"] = {"policy": {"use": "trouble/recording"}, "rollout": {"use": rollout}}
    directory.mkdir(exist_ok=True)
    (directory / "idle.py").write_text(IDLE)
    return whole


def test_an_engine_that_returns_nothing_for_ever_is_noticed_and_restarted(tmp_path: Path) -> None:
    with runs.running(tmp_path / "idle", job(tmp_path / "idle", "idle/idle")) as run:
        notice = run.read_until("it is killed")
        noticed_s = time.time() - (run.directory / "idle").stat().st_mtime
        assert run.wait() == 0, run.output
    pattern = r"waits for rollout\.0: no sign of progress for 3 s in generate"
    assert re.search(pattern, notice), notice
    assert noticed_s < 3 * PATIENCE_S
    assert run.output.count("it is started again") == 1, run.output
    code, still = runs.finish(tmp_path / "calm", job(tmp_path / "calm", "fake"))
    assert code == 0, still.output
    assert run.weights() == still.weights()


def test_a_long_answer_of_an_engine_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    began_s = time.monotonic()
    code, run = runs.finish(tmp_path, job(tmp_path, "idle/slow"))
    assert code == 0, run.output
    assert time.monotonic() - began_s > 2 * PATIENCE_S
    assert "no sign of progress" not in run.output
