"""One rank of gcore-torch's trainer with adapters; it writes its numbers as JSON.

``python -m tests.support.lora_ranks RANK RANKS MODEL WORK [RESUME]``, by test_lora_ranks.py. For
each case two steps, a saved state, and two steps more: from the state of that name below RESUME,
which another number of ranks wrote, if that is given.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from gcore_language.lora_settings import LoraSettings

from gcore_core.contract.weights_hash import WeightsHash
from tests.support import exact_ranks

#: Name -> packing, whether the run is deterministic, dtype, number of the adapters' rank.
CASES: dict[str, tuple[exact_ranks.Packing, bool, str, int]] = {
    "exact": ("auto", True, "float32", 3),
    "exact, padded": ("padded", True, "float32", 3),
    "plain": ("auto", False, "float32", 3),
    "plain, padded": ("padded", False, "float32", 1),
    "bfloat16": ("padded", False, "bfloat16", 2),
}


def run(rank: int, ranks: int, model: Path, work: Path, resume: Path | None) -> dict[str, Any]:
    """Returns metrics and final weights of every case."""
    return {name: _case(name, rank, ranks, model, work / name, resume) for name in CASES}


def _case(
    name: str, rank: int, ranks: int, model: Path, work: Path, resume: Path | None
) -> dict[str, Any]:
    (work / "meet").mkdir(parents=True, exist_ok=True)
    packing, deterministic, dtype, size = CASES[name]
    # eps as large as gradients are: else Adam makes whole steps of what should be zero
    trainer = exact_ranks.make_trainer(
        model,
        packing,
        work,
        rank,
        ranks,
        deterministic=deterministic,
        dtype=dtype,
        eps=1e-3,
        lora=LoraSettings(rank=size, alpha=2.0 * size),
    )
    metrics = [exact_ranks.train(trainer, step, rank, ranks) for step in range(2)]
    trainer.save(work / "state")
    if resume is not None:
        trainer.load(resume / name / "state")
    metrics += [exact_ranks.train(trainer, step, rank, ranks) for step in (2, 3)]
    weights = WeightsHash()
    for spec, content in trainer.export_weights():
        if rank == 0:
            weights.add(spec, content.copy().data)
    adapter = {
        spec.name: content.copy().view("<f4").tolist()
        for spec, content in trainer.export_adapter()
        if rank == 0
    }
    trainer.save_pretrained(work / "weights")
    trainer.close()
    return {"metrics": metrics, "sha256": weights.hexdigest(), "adapter": adapter}


if __name__ == "__main__":
    own_rank, all_ranks = map(int, sys.argv[1:3])
    model_path, work_path = map(Path, sys.argv[3:5])
    from_path = Path(sys.argv[5]) if len(sys.argv) > 5 else None
    numbers = run(own_rank, all_ranks, model_path, work_path, from_path)
    if own_rank == 0:
        (work_path / "numbers.json").write_text(json.dumps(numbers))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
