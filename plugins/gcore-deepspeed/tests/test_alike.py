"""Every kind of loss, on one and two ranks of ZeRO 1 and 3, trains as on gcore-torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_language.elastic import Layout

from tests.support import alike_ranks
from tests.support.alike_ranks import OBJECTIVES, TORCH, WITH_HEAD, Job, assert_alike

pytestmark = pytest.mark.engine

#: Stage 3 shares out every tensor, however small.
SHARED_OUT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
LAYOUTS = {
    f"zero{stage} of {ranks}": Layout(
        trainer="gcore_deepspeed.trainer:make_trainer",
        config="gcore_deepspeed.config:DeepSpeedTrainerConfig",
        ranks=ranks,
        settings={"stage": stage},
        engine=SHARED_OUT if stage == 3 else {},
    )
    for ranks in (1, 2)
    for stage in (1, 3)
}


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each job left its numbers: torch's first, from whose states the others go on."""
    works = tmp_path_factory.mktemp("alike")
    models = alike_ranks.save_models(works / "models")

    def job(name: str, layout: Layout, objective: str, resume: str = "") -> Job:
        state = str(works / resume / objective) if resume else ""
        work = str(works / name / objective)
        model = models[objective]
        return Job(layout=layout, objective=objective, model=model, work=work, resume=state)

    for objective in OBJECTIVES:
        alike_ranks.run(job("torch", TORCH, objective))
    # one rank goes on from torch's state, two from that of one
    before = {1: "torch", 2: "zero1 of 1"}
    for ranks, resume in before.items():
        jobs = [
            job(name, layout, objective, resume)
            for name, layout in LAYOUTS.items()
            for objective in OBJECTIVES
            if layout.ranks == ranks
        ]
        alike_ranks.run_jobs(jobs, works / f"room of {ranks}")
    for objective in WITH_HEAD:
        alike_ranks.run(job("back", TORCH, objective, "zero3 of 2"))
    return works


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_updates_and_a_resumed_one_give_torchs_losses_and_weights(
    layout: str, objective: str, works: Path
) -> None:
    assert_alike(works / layout / objective, works / "torch" / objective)


@pytest.mark.parametrize("objective", WITH_HEAD)
def test_torch_goes_on_from_a_value_head_of_two_ranks(objective: str, works: Path) -> None:
    assert_alike(works / "back" / objective, works / "torch" / objective)


@pytest.mark.parametrize("objective", WITH_HEAD)
def test_an_exported_value_model_opens_as_a_classifier(objective: str, works: Path) -> None:
    from gcore_language.models import load_reward_model

    for layout in LAYOUTS:
        directory = works / layout / objective / "pretrained"
        load_reward_model(str(directory), dtype="float32")
