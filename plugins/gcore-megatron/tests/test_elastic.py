"""What one split saves, in either format, any other goes on from, and so does the torch trainer;
and back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gcore_language import elastic
from gcore_language.elastic import TORCH, Job, Layout

pytestmark = pytest.mark.engine


def megatron(ranks: int, **settings: Any) -> Layout:
    return Layout(
        trainer="gcore_megatron.trainer:MegatronTrainer",
        config="gcore_megatron.config:MegatronTrainerConfig",
        ranks=ranks,
        settings=settings,
    )


TARGETS = {
    "one": megatron(1),
    "tensor": megatron(2, tensor_parallel=2),
    "pipeline": megatron(2, pipeline_parallel=2),
    "data": megatron(2),
    "data, whole optimizer": megatron(2, distributed_optimizer=False),
}
WHOLE = {
    f"{n}: whole": megatron(t.ranks, **t.settings, checkpoint="whole") for n, t in TARGETS.items()
}
DISTRIBUTED = {f"{n}: distributed": t for n, t in TARGETS.items()}
SOURCES = {"torch": TORCH, **WHOLE, **DISTRIBUTED}


def goes(source: str, target: str) -> bool:
    """Distributed states are loaded with the same ``distributed_optimizer``."""
    return source not in DISTRIBUTED or ("whole optimizer" in source) == (
        "whole optimizer" in target
    )


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def whole(works: Path, models: dict[str, tuple[Path, Path]]) -> dict[str, str]:
    return elastic.run_sources(
        {"torch": TORCH, **WHOLE}, models["qwen2"][0], works, "room of whole ones"
    )


@pytest.fixture(scope="module")
def distributed(works: Path, models: dict[str, tuple[Path, Path]]) -> dict[str, str]:
    return elastic.run_sources(DISTRIBUTED, models["qwen2"][0], works, "room of distributed ones")


@pytest.fixture(scope="module")
def in_torch(works: Path, whole: dict[str, str], models: dict[str, tuple[Path, Path]]) -> Path:
    job = Job(
        layout=TORCH, model=str(models["qwen2"][0]), work=str(works / "in torch"), states=whole
    )
    elastic.run_jobs([job], works / "torch targets")
    return Path(job.work)


@pytest.fixture(scope="module")
def in_all(
    works: Path,
    whole: dict[str, str],
    distributed: dict[str, str],
    models: dict[str, tuple[Path, Path]],
) -> dict[str, Path]:
    return elastic.run_targets(TARGETS, whole | distributed, goes, models["qwen2"][0], works)


@pytest.mark.parametrize("source", ["torch", *WHOLE])
def test_torch_continues_from_a_megatron_state(source: str, works: Path, in_torch: Path) -> None:
    expected = elastic.outcome(works / source)
    resumed = elastic.outcome(in_torch, source)
    elastic.assert_goes_on(resumed, expected, exact=source == "torch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"), [(s, t) for s in SOURCES for t in TARGETS if goes(s, t)]
)
def test_megatron_continues_from_a_state_of_any_split(
    source: str, target: str, works: Path, in_all: dict[str, Path]
) -> None:
    expected = elastic.outcome(works / source)
    resumed = elastic.outcome(in_all[target], source)
    elastic.assert_goes_on(resumed, expected, exact=source.partition(":")[0] == target)
