"""Every kind of loss, on one rank and on a model split in two ways, trains as on gcore-torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gcore_language.elastic import Layout

from tests.support import alike_ranks
from tests.support.alike_ranks import OBJECTIVES, OF_TOKENS, TORCH, WITH_HEAD, Job, assert_alike

pytestmark = pytest.mark.engine


def megatron(ranks: int, **settings: Any) -> Layout:
    return Layout(
        trainer="gcore_megatron.trainer:make_trainer",
        config="gcore_megatron.config:MegatronTrainerConfig",
        ranks=ranks,
        settings=settings,
    )


#: Saved as whole tensors by one rank, which torch goes on from; by two in Megatron-Core's own way.
LAYOUTS = {
    "one": megatron(1, checkpoint="whole"),
    "data": megatron(2),
    "tensor": megatron(2, tensor_parallel=2, sequence_parallel=True),
}
#: Of what is not one log-prob an action: of those test_split.py has split models so.
MORE_LAYOUTS = {
    "pipeline": megatron(2, pipeline_parallel=2, checkpoint="whole"),
    "context": megatron(2, context_parallel=2),
}
CASES = [(layout, objective) for layout in LAYOUTS for objective in OBJECTIVES]
CASES += [(layout, objective) for layout in MORE_LAYOUTS for objective in (*WITH_HEAD, *OF_TOKENS)]


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each job left its numbers: torch's first, from whose states the others go on."""
    works = tmp_path_factory.mktemp("alike")
    models = alike_ranks.save_models(works / "models")
    layouts = {**LAYOUTS, **MORE_LAYOUTS}

    def job(name: str, layout: Layout, objective: str, resume: str) -> Job:
        state = str(works / resume / objective) if resume else ""
        work = str(works / name / objective)
        model = models[objective]
        return Job(layout=layout, objective=objective, model=model, work=work, resume=state)

    for objective in OBJECTIVES:
        alike_ranks.run(job("torch", TORCH, objective, ""))
    # one rank goes on from torch's state; two from that of one, and of two that are split otherwise
    resumed = {"one": "torch", "data": "one", "tensor": "data", "pipeline": "one"}
    for ranks in (1, 2):
        jobs = [
            job(layout, layouts[layout], objective, resumed.get(layout, "tensor"))
            for layout, objective in CASES
            if layouts[layout].ranks == ranks
        ]
        alike_ranks.run_jobs(jobs, works / f"room of {ranks}")
    for objective in WITH_HEAD:
        alike_ranks.run(job("back", TORCH, objective, "pipeline"))
    return works


@pytest.mark.parametrize(("layout", "objective"), CASES)
def test_two_updates_and_a_resumed_one_give_torchs_losses_and_weights(
    layout: str, objective: str, works: Path
) -> None:
    assert_alike(works / layout / objective, works / "torch" / objective)


@pytest.mark.parametrize("objective", WITH_HEAD)
def test_torch_goes_on_from_a_value_head_of_two_stages(objective: str, works: Path) -> None:
    assert_alike(works / "back" / objective, works / "torch" / objective)


@pytest.mark.parametrize(("layout", "objective"), [c for c in CASES if c[1] in WITH_HEAD])
def test_an_exported_value_model_opens_as_a_classifier(
    layout: str, objective: str, works: Path
) -> None:
    from gcore_language.models import load_reward_model

    load_reward_model(str(works / layout / objective / "pretrained"), dtype="float32")
