"""Megatron-Core's value head in this process: what it begins with, its dtype, what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.models import load_value_model

from gcore_core.contract.errors import ConfigError, DataError
from tests.support import language_models as tiny
from tests.support.alike_ranks import SETTINGS
from tests.support.value_ranks import Squares

pytestmark = pytest.mark.engine


@pytest.fixture
def open_values(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> Iterator[Callable[..., Any]]:
    """Makes a trainer of an objective, by default of values, and closes it after the test."""
    from gcore_megatron.config import MegatronTrainerConfig
    from gcore_megatron.trainer import make_trainer

    trainers = []

    def make(
        path: Path = models["llama"][0], objective: Any = None, seed: int = 0, **config: Any
    ) -> Any:
        objective = objective or Squares()
        context = tiny.make_context(
            path, objective, role="critic", directory=str(tmp_path), seed=seed
        )
        trainers.append(make_trainer(MegatronTrainerConfig(**SETTINGS | config), context))
        return trainers[-1]

    yield make
    for trainer in reversed(trainers):
        trainer.close()


def head_of(trainer: Any) -> np.ndarray:
    """Returns the exported head."""
    heads = [
        np.frombuffer(array.tobytes(), np.float32)
        for spec, array in trainer.export_weights()
        if spec.name == "score.weight"
    ]
    (head,) = heads
    return head


def test_a_new_head_is_gcore_torchs_and_one_that_is_there_is_kept(
    open_values: Any, models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    model = models["llama"][0]
    first = open_values(seed=3)
    expected = load_value_model(str(model), std=SETTINGS["value_head_std"], seed=3)
    np.testing.assert_array_equal(head_of(first), expected.score.weight.detach().flatten())
    assert not head_of(open_values(value_head_std=0.0)).any()
    first.save_pretrained(tmp_path / "saved")
    again = open_values(tmp_path / "saved", value_head_std=0.0)
    np.testing.assert_array_equal(head_of(again), head_of(first))


def test_values_are_in_float32_whatever_the_trunk_computes_in(open_values: Any) -> None:
    """In bfloat16 values are those of float32 to bfloat16's two digits, and have more digits."""
    records = tiny.make_records()
    exact = [own.copy() for own in open_values().values(records)]
    trainer = open_values(dtype="bfloat16")
    rounded = trainer.values(records)
    for own, other in zip(rounded, exact, strict=True):
        np.testing.assert_allclose(own, other, atol=0.2)
    joined = torch.from_numpy(np.concatenate(rounded))
    assert (joined != joined.bfloat16().float()).any()
    trainer.prepare(records, frozenset())
    assert np.isfinite(trainer.train(0, tiny.make_advantages(records), 1, 2)["loss"])


def test_a_value_model_of_several_outputs_is_refused(
    open_values: Any, models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    model = load_value_model(str(models["llama"][0]))
    model.config.num_labels = 3
    model.score = torch.nn.Linear(model.score.in_features, 3, bias=False)
    model.save_pretrained(tmp_path / "three")
    with pytest.raises(DataError, match="has 3 outputs; a value head has one"):
        open_values(tmp_path / "three")


def test_a_reference_is_refused_beside_a_value_head(open_values: Any) -> None:
    with pytest.raises(ConfigError, match="no log-probs to compare with a reference's"):
        open_values(reference=True)


@pytest.mark.parametrize("checkpoint", ["distributed", "whole"])
def test_a_policys_state_is_refused_by_a_value_head(
    checkpoint: str, open_values: Any, tmp_path: Path
) -> None:
    """Its output layer is not read in part, as if it were a head."""
    open_values(objective=tiny.Reinforce(), checkpoint=checkpoint).save(tmp_path / "state")
    with pytest.raises(DataError):
        open_values().load(tmp_path / "state")
