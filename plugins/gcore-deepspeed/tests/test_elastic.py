"""What one stage and number of ranks saves, any other goes on from, and so does the torch trainer;
and back.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_language import elastic
from gcore_language.elastic import TORCH, Job, Layout

pytestmark = pytest.mark.engine

SHARED_OUT = {"zero_optimization": {"stage3_param_persistence_threshold": 200}}


def zero(stage: int, ranks: int, checkpoint: str = "whole") -> Layout:
    return Layout(
        trainer="gcore_deepspeed.trainer:DeepSpeedTrainer",
        config="gcore_deepspeed.config:DeepSpeedTrainerConfig",
        ranks=ranks,
        settings={"stage": stage, "checkpoint": checkpoint},
        engine=SHARED_OUT if stage == 3 else {},
    )


TARGETS = {f"zero{stage} of {ranks}": zero(stage, ranks) for stage in (1, 2, 3) for ranks in (1, 2)}
UNIVERSAL = {f"zero{stage} of 2, universal": zero(stage, 2, "universal") for stage in (1, 2, 3)}
SOURCES = {"torch": TORCH, **TARGETS, **UNIVERSAL}


def goes(source: str, target: str) -> bool:
    """DeepSpeed's universal states are of stage 3, or not."""
    return source not in UNIVERSAL or (
        UNIVERSAL[source].settings["stage"] == 3
    ) == target.startswith("zero3")


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def whole(works: Path, model_dirs: dict[str, Path]) -> dict[str, str]:
    return elastic.run_sources(
        {"torch": TORCH, **TARGETS}, model_dirs["qwen2"], works, "room of whole ones"
    )


@pytest.fixture(scope="module")
def universal(works: Path, model_dirs: dict[str, Path]) -> dict[str, str]:
    return elastic.run_sources(UNIVERSAL, model_dirs["qwen2"], works, "room of universal ones")


@pytest.fixture(scope="module")
def in_torch(works: Path, whole: dict[str, str], model_dirs: dict[str, Path]) -> Path:
    job = Job(
        layout=TORCH, model=str(model_dirs["qwen2"]), work=str(works / "in torch"), states=whole
    )
    elastic.run_jobs([job], works / "torch")
    return Path(job.work)


@pytest.fixture(scope="module")
def in_all(
    works: Path, whole: dict[str, str], universal: dict[str, str], model_dirs: dict[str, Path]
) -> dict[str, Path]:
    return elastic.run_targets(TARGETS, whole | universal, goes, model_dirs["qwen2"], works)


@pytest.mark.parametrize("source", [name for name in SOURCES if name not in UNIVERSAL])
def test_torch_continues_from_a_deepspeed_state(source: str, works: Path, in_torch: Path) -> None:
    expected = elastic.outcome(works / source)
    resumed = elastic.outcome(in_torch, source)
    elastic.assert_goes_on(resumed, expected, exact=source == "torch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"), [(s, t) for s in SOURCES for t in TARGETS if goes(s, t)]
)
def test_deepspeed_continues_from_a_state_of_any_layout(
    source: str, target: str, works: Path, in_all: dict[str, Path]
) -> None:
    expected = elastic.outcome(works / source)
    resumed = elastic.outcome(in_all[target], source)
    elastic.assert_goes_on(resumed, expected, exact=source.removesuffix(", universal") == target)
