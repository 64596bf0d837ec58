"""A dataset whose rows differ between two processes ends the run: an answer would otherwise get the
reward of another row.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import runs

SHUFFLED = """
import random
from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.records import Prompt
from gcore_testing import fake


class Rows(fake.FakeDataset):
    def __init__(self, config):
        super().__init__(config)
        draw = random.Random(self.seed())
        self._texts = [f"{draw.randrange(10**9)}+1=" for _ in range(len(self))]

    def seed(self):
        return 7

    def __getitem__(self, row):
        super().__getitem__(row)
        return Prompt(row=row, text=self._texts[row], fields={"answer": "2"})


class Unseeded(Rows):
    def seed(self):
        return None


@hookimpl
def gcore_datasets():
    for name, cls in (("seeded", Rows), ("unseeded", Unseeded)):
        yield p.DatasetProvider(
            name=name, summary="-", factory=f"shuffled:{cls.__name__}", config=fake.FakeDataConfig
        )
"""


def finish(directory: Path, data: str, evaluation: str) -> tuple[int, runs.Run]:
    job = runs.job(
        launcher={"use": "core/inline"},
        data={"use": f"shuffled/{data}"},
        evaluation={"every": 1, "data": {"use": f"shuffled/{evaluation}", "config": {"rows": 6}}},
    )
    job["local"] = [*job["local"], "shuffled.py"]
    directory.mkdir(exist_ok=True)
    (directory / "shuffled.py").write_text(SHUFFLED)
    return runs.finish(directory, job)


def test_rows_that_a_seed_shuffles_train(tmp_path: Path) -> None:
    code, run = finish(tmp_path, "seeded", "seeded")
    assert code == 0, run.output
    assert len(run.metrics()) == 4, "three steps, and the evaluation before them"


@pytest.mark.protects
@pytest.mark.parametrize(
    ("data", "evaluation", "section"),
    [("unseeded", "seeded", "data"), ("seeded", "unseeded", "evaluation.data")],
)
def test_rows_that_differ_between_processes_end_the_run_and_are_named(
    data: str, evaluation: str, section: str, tmp_path: Path
) -> None:
    code, run = finish(tmp_path, data, evaluation)
    assert code == 4, run.output
    assert f"{section}: dataset shuffled/unseeded: row " in run.output
    assert "An answer would get the reward of another row." in run.output
    assert "DatasetContract opens a dataset twice" in run.output
