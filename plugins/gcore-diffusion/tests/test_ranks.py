"""Several slots hold the model each and train as one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gcore_testing.runs import run_together
from safetensors.numpy import load_file, save_file

from tests.support import diffusion_models as kit

pytestmark = pytest.mark.rest


@pytest.mark.parametrize("objective", ["ppo_clip", "nft"])
def test_two_ranks_train_as_one(objective: str, tiny_dir: Path, tmp_path: Path) -> None:
    """Unequal shares of the records: the same metrics and weights.

    The forward process draws noise for each record, whichever rank has it.
    """
    (tmp_path / "meet").mkdir()
    records = kit.records_of(kit.sampled(kit.make_generator(tiny_dir), kit.make_requests(4, 3)))
    held = {
        f"{i}/{name}": np.array(array, copy=True)
        for i, record in enumerate(records)
        for name, array in {**record.columns, **record.media}.items()
    }
    save_file(held, tmp_path / "records.safetensors")
    program = ["-m", "tests.support.diffusion_ranks"]
    for ranks in (1, 2):
        run_together(
            [
                [*program, str(rank), str(ranks), str(tiny_dir), str(tmp_path), objective]
                for rank in range(ranks)
            ]
        )
    one, two = (json.loads((tmp_path / f"metrics-{ranks}.json").read_text()) for ranks in (1, 2))
    for alone, together in zip(one, two, strict=True):
        told = {
            name: value for name, value in alone.items() if name not in ("diversity", "replay_gap")
        }
        assert told == pytest.approx({name: together[name] for name in told}, rel=1e-3, abs=1e-6)
    alone, together = (load_file(tmp_path / f"weights-{ranks}.safetensors") for ranks in (1, 2))
    for name, values in alone.items():
        np.testing.assert_allclose(values, together[name], atol=1e-5, err_msg=name)
