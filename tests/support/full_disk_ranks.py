"""One rank of a trainer on whose disk some files find no room.

``python -m tests.support.full_disk_ranks KIND RANK SPEC``; two ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import CheckpointError
from tests.support.language_models import Reinforce, make_context

RANKS = 2


def open_trainer(kind: str, spec: dict[str, Any], rank: int) -> Any:
    context = make_context(
        Path(spec["model"]),
        Reinforce(),
        rank=rank,
        ranks=RANKS,
        rendezvous=spec["work"],
        directory=spec["work"],
    )
    if kind == "megatron":
        from gcore_megatron.config import MegatronTrainerConfig
        from gcore_megatron.trainer import MegatronTrainer

        return MegatronTrainer(MegatronTrainerConfig(**spec["settings"]), context)
    from gcore_deepspeed.config import DeepSpeedTrainerConfig
    from gcore_deepspeed.trainer import DeepSpeedTrainer

    return DeepSpeedTrainer(DeepSpeedTrainerConfig(**spec["settings"]), context)


def run(kind: str, rank: int, spec: dict[str, Any]) -> None:
    """Saves once for each of the files, which has no room, and once where all have room.

    Each save begins with links to /dev/full, so it writes over them. Writes the errors, "" for
    none, and how many weights it exported after each to errors<rank>.json. Then it does the same
    with the final weights, whose directory cannot be made at first.
    """
    trainer = open_trainer(kind, spec, rank)
    ranks = trainer._engine.ranks
    errors: list[tuple[str, int]] = []
    for file in [*spec["full"], ""]:
        directory = Path(spec["work"]) / f"save-{len(errors)}"
        if file and rank == 0:
            (directory / file).parent.mkdir(parents=True)
            (directory / file).symlink_to("/dev/full")
        ranks.wait()
        error = ""
        try:
            trainer.save(directory)
        except CheckpointError as raised:
            error = str(raised)
        # As in a run: a save that failed does not end it. The collectives must still match.
        errors.append((error, sum(1 for _ in trainer.export_weights())))
    _save_final(trainer, Path(spec["work"]), rank, errors)
    trainer.close()
    (Path(spec["work"]) / f"errors{rank}.json").write_text(json.dumps(errors))


def _save_final(trainer: Any, work: Path, rank: int, errors: list[tuple[str, int]]) -> None:
    ranks = trainer._engine.ranks
    place = work / "final"
    if rank == 0:
        place.write_text("a file where a directory should be")
    ranks.wait()
    for is_free in (False, True):
        if is_free and rank == 0:
            place.unlink()
        ranks.wait()
        error = ""
        try:
            trainer.save_pretrained(place)
        except OSError as raised:
            error = type(raised).__name__
        errors.append((error, sum(1 for _ in trainer.export_weights())))


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
