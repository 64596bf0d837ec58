"""DeepSpeed's value head in this process: what it begins with, its dtype, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.lora_settings import LoraSettings
from gcore_language.models import load_value_model

from gcore_core.contract.errors import ConfigError, DataError
from tests.support import language_models as tiny
from tests.support.alike_ranks import SETTINGS
from tests.support.value_ranks import Squares

pytestmark = pytest.mark.engine


@pytest.fixture
def open_values(model_dirs: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a trainer of values, and closes it after the test."""
    from gcore_deepspeed.config import DeepSpeedTrainerConfig
    from gcore_deepspeed.trainer import make_trainer

    trainers = []

    def make(path: Path = model_dirs["llama"], **config: Any) -> Any:
        context = tiny.make_context(path, Squares(), role="critic", directory=str(tmp_path))
        trainers.append(make_trainer(DeepSpeedTrainerConfig(**SETTINGS | config), context))
        return trainers[-1]

    yield make
    for trainer in reversed(trainers):
        trainer.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_values_are_in_float32_whatever_the_trunk_computes_in(stage: int, open_values: Any) -> None:
    """In bfloat16 values are those of float32 to bfloat16's two digits, and have more digits."""
    records = tiny.make_records()
    exact = [own.copy() for own in open_values().values(records)]
    trainer = open_values(dtype="bfloat16", stage=stage)
    rounded = trainer.values(records)
    for own, other in zip(rounded, exact, strict=True):
        np.testing.assert_allclose(own, other, atol=0.2)
    joined = torch.from_numpy(np.concatenate(rounded))
    assert (joined != joined.bfloat16().float()).any()
    trainer.prepare(records, frozenset())
    assert np.isfinite(trainer.train(0, tiny.make_advantages(records), 1, 2)["loss"])


def test_a_value_model_of_several_outputs_is_refused(
    open_values: Any, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    model = load_value_model(str(model_dirs["llama"]))
    model.config.num_labels = 3
    model.score = torch.nn.Linear(model.score.in_features, 3, bias=False)
    model.save_pretrained(tmp_path / "three")
    with pytest.raises(DataError, match="has 3 outputs; a value head has one"):
        open_values(tmp_path / "three")


def test_adapters_and_a_reference_are_refused_beside_a_value_head(open_values: Any) -> None:
    with pytest.raises(ConfigError, match="a model with a value head takes no adapters"):
        open_values(lora=LoraSettings(rank=2))
    with pytest.raises(ConfigError, match="no log-probs to compare with a reference's"):
        open_values(reference=True)
