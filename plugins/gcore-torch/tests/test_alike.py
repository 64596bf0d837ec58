"""Every kind of loss trains on two and four ranks as on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import alike_ranks
from tests.support.alike_ranks import OBJECTIVES, TORCH, Job, assert_alike

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each job left its numbers; two ranks go on from the state of one, four from two's."""
    works = tmp_path_factory.mktemp("alike")
    models = alike_ranks.save_models(works / "models")

    def job(ranks: int, objective: str, resume: str) -> Job:
        return Job(
            layout=replace(TORCH, ranks=ranks),
            objective=objective,
            model=models[objective],
            work=str(works / str(ranks) / objective),
            resume=str(works / resume / objective) if resume else "",
        )

    for ranks, resume in ((1, ""), (2, "1"), (4, "2")):
        jobs = [job(ranks, objective, resume) for objective in OBJECTIVES]
        alike_ranks.run_jobs(jobs, works / f"room of {ranks}")
    return works


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_two_updates_and_a_resumed_one_give_the_losses_and_weights_of_one_rank(
    ranks: int, objective: str, works: Path
) -> None:
    assert_alike(works / str(ranks) / objective, works / "1" / objective)
