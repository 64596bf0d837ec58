"""A policy acts in an environment: samples are asked of it, weights of the generator inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import runs

NODS = """
from dataclasses import dataclass
from pathlib import Path

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_testing import fake
from gcore_testing.fake_environment import FakeEnvironment


class Told(fake.FakeGenerator):
    def __init__(self, config, context):
        super().__init__(config, context)
        assert context.acts

    def close(self):
        with open(f"closed.{self.version}", "a") as file:
            file.write("generator ")


class Nods(FakeEnvironment):
    def close(self):
        super().close()
        with open(f"closed.{self._generator.version}", "a") as file:
            file.write("environment ")


@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(summary="-", factory="nods:Told", config=fake.AbleGeneratorConfig)


@hookimpl
def gcore_environments():
    yield p.EnvironmentProvider(summary="-", factory="nods:Nods", columns=("turn",))
"""


def job(directory: Path, **changes: Any) -> dict[str, Any]:
    directory.mkdir(exist_ok=True)
    (directory / "nods.py").write_text(NODS)
    made = runs.job(run={"deterministic": True}, **changes)
    made["local"] = [*made["local"], "nods.py"]
    made["roles"] = {"policy": {"use": "trouble/recording"}, "rollout": {"use": "nods"}}
    made["environment"] = {"use": "nods"}
    return made


def test_a_run_in_processes_trains_on_episodes_under_the_pushed_weights(tmp_path: Path) -> None:
    code, run = runs.finish(tmp_path / "apart", job(tmp_path / "apart"))
    assert code == 0, run.output
    rows = run.metrics()[1:]
    assert rows and all(0 < row["masked_share"] < 0.5 for row in rows), "nothing is masked"
    assert max(row["logprob_gap_max"] for row in rows) < 1e-4, "weights did not reach the generator"


def test_episodes_are_those_of_any_number_of_controllers(tmp_path: Path) -> None:
    """An environment is closed before the generator that it is built around."""
    inline = {"launcher": {"use": "core/inline"}}
    weights = []
    for count in (1, 2):
        directory = tmp_path / str(count)
        code, run = runs.finish(directory, job(directory, **inline), f"controller.shards={count}")
        assert code == 0, run.output
        weights.append(run.weights())
        (closed,) = directory.glob("closed.*")
        assert closed.read_text() == "environment generator "
    assert weights[0] == weights[1]
