"""Two ranks whose disk has no room for one of a state's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gcore_testing.runs import run_together

from tests.support import megatron_trainers as tools

pytestmark = pytest.mark.engine

LIMIT_S = 540
#: ``config.checkpoint`` -> files of a state, in the order in which they are written
FILES = {
    "distributed": [
        "shards/common.pt",  # by rank 0, amid collectives
        "shards/__0_0.distcp",
        "shards/__1_0.distcp",
        "shards/.metadata.tmp",  # by rank 0, amid collectives
        "shards/metadata.json",  # by rank 0, amid collectives
    ],
    "whole": ["state-00000.safetensors", "state.json"],
}


@pytest.mark.parametrize("checkpoint", FILES)
def test_every_rank_has_the_error_of_the_one_that_cannot_write(
    checkpoint: str, models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    files = FILES[checkpoint]
    spec = {
        "model": str(models["llama"][0]),
        "work": str(tmp_path),
        "settings": {**tools.SETTINGS, "tensor_parallel": 2, "checkpoint": checkpoint},
        "full": files,
    }
    ranks = [
        ["-m", "tests.support.full_disk_ranks", "megatron", str(rank), json.dumps(spec)]
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
