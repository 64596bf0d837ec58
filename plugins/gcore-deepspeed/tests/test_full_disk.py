"""Two ranks whose disk has no room for one of a state's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gcore_testing.runs import run_together

from tests.support import deepspeed_trainers as tools

pytestmark = pytest.mark.engine

LIMIT_S = 540
#: ``config.checkpoint`` -> files of a state, in the order in which they are written
FILES = {
    "universal": [
        "deepspeed/mp_rank_00_model_states.pt",
        "deepspeed/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "deepspeed/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "state.json",
    ],
    "whole": ["state-00000.safetensors", "state.json"],
}


@pytest.mark.parametrize("checkpoint", FILES)
def test_every_rank_has_the_error_of_the_one_that_cannot_write(
    checkpoint: str, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    spec = {
        "model": str(model_dirs["llama"]),
        "work": str(tmp_path),
        "settings": {
            **tools.SETTINGS,
            "stage": 2,
            "checkpoint": checkpoint,
            "dump_dir": str(tmp_path),
        },
        "full": FILES[checkpoint],
    }
    ranks = [
        ["-m", "tests.support.full_disk_ranks", "deepspeed", str(rank), json.dumps(spec)]
        for rank in range(2)
    ]
    run_together(ranks, LIMIT_S)
    found = [json.loads((tmp_path / f"errors{rank}.json").read_text()) for rank in range(2)]
    assert found[0][:-2] == found[1][:-2]
    errors = [error for error, _ in found[0][:-2]]
    assert all("trainer state could not be written" in error for error in errors[:-1]), errors
    assert errors[-1] == ""
    assert len({weights for _, weights in found[0]}) == 1
    # Final weights: rank 0 alone writes, the other one does not wait for ever, and both go on.
    final = [[error for error, _ in of_rank[-2:]] for of_rank in found]
    assert final[0][0] in ("FileExistsError", "NotADirectoryError") and final[0][1] == ""
    assert final[1] == ["", ""]
    assert list((tmp_path / "final").glob("*.safetensors"))
