"""Saves and loads a trainer's state.

There are two formats: whole tensors, which any trainer can load, and DeepSpeed's universal format.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from gcore_language.agreed_saves import agreed, errors_put_off
from gcore_language.ranks import Ranks
from gcore_language.state_files import (
    load_numbers,
    load_parts,
    read_numbers,
    save_state,
    take_steps,
    write_numbers,
)

from gcore_core.contract.errors import DataError
from gcore_deepspeed.optimizer import OptimizerState

_OWN = "deepspeed"
_UNIVERSAL = "universal"


def save_whole(
    optimizer: OptimizerState, directory: Path, numbers: dict[str, Any], ranks: Ranks
) -> None:
    """Saves the state in the format of ``gcore_language.state_files``, one tensor at a time.

    Every rank calls it. Raises CheckpointError on every rank when rank 0 could not write.
    """
    steps = optimizer.steps
    trained = [name for name, tensor in optimizer.tensors.items() if tensor.requires_grad]
    counted = dict.fromkeys(trained, float(steps)) if steps else {}
    with agreed(ranks, directory):
        save_state(
            directory,
            optimizer.parts(),
            {**numbers, "optimizer_steps": counted},
            writes=ranks.rank == 0,
        )


def load_state(engine: Any, optimizer: OptimizerState, directory: Path) -> dict[str, Any]:
    """Loads a state of either format; returns its numbers.

    Raises DataError when this trainer cannot load the state.
    """
    if (directory / _UNIVERSAL).is_dir():
        return _load_universal(engine, optimizer, directory)
    return _load_whole(optimizer, directory)


def _load_whole(optimizer: OptimizerState, directory: Path) -> dict[str, Any]:
    numbers = load_numbers(directory)
    optimizer.prepare(take_steps(numbers, directory))
    for part, name, whole in load_parts(directory, optimizer.shapes):
        optimizer.set(part, name, whole)
    return numbers


def save_universal(
    engine: Any, optimizer: OptimizerState, directory: Path, numbers: dict[str, Any], ranks: Ranks
) -> None:
    """Saves the state in DeepSpeed's universal format; every rank calls it.

    DeepSpeed first writes its own checkpoint, which is for this number of ranks. Rank 0 converts
    that to the universal one, which is for any number.

    Raises CheckpointError on every rank when one of them could not write.
    """
    if not optimizer.steps:
        optimizer.prepare(0)  # DeepSpeed's conversion requires moments
    with agreed(ranks, directory):
        directory.mkdir(parents=True, exist_ok=True)
    files = engine.checkpoint_engine
    # DeepSpeed meets after each of these; rank 0 alone copies a script.
    writes = (files, "makedirs"), (files, "save"), (engine, "_copy_recovery_script")
    with agreed(ranks, directory), errors_put_off(*writes):
        engine.save_checkpoint(str(directory), tag=_OWN, save_latest=False)
    with agreed(ranks, directory):
        if ranks.rank == 0:
            _convert(directory)
            write_numbers(directory, {**numbers, "stage": optimizer.stage}, _UNIVERSAL)


def _convert(directory: Path) -> None:
    """Turns DeepSpeed's own checkpoint into the universal one, and removes the former."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(directory / _UNIVERSAL, ignore_errors=True)
    arguments = Namespace(
        input_folder=str(directory / _OWN),
        output_folder=str(directory / _UNIVERSAL),
        num_extract_workers=1,  # more of them would be processes that fork this one
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        # fills in the state of Megatron's layouts, which a Hugging Face model does not have
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        ds_to_universal.main(arguments)
    shutil.rmtree(directory / _OWN)


def _load_universal(engine: Any, optimizer: OptimizerState, directory: Path) -> dict[str, Any]:
    _, numbers = read_numbers(directory)
    stage = int(numbers.pop("stage", optimizer.stage))
    if (stage == 3) != (optimizer.stage == 3):
        raise DataError(
            (
                f"this universal state was saved with stage {stage}, and DeepSpeed cannot load it "
                f"with {optimizer.stage}."
            ),
            where=str(directory),
            why="Universal states go from stage 1 to 2 and back, and from 3 to 3.",
            todo=(
                f"Go on for a step with stage {stage} and config.checkpoint: whole, then with "
                "this one."
            ),
        )
    groups = engine.optimizer.param_groups
    settings_of = [
        {name: value for name, value in group.items() if name != "params"} for group in groups
    ]
    engine.load_checkpoint(str(directory), tag=_UNIVERSAL)
    # DeepSpeed restores as if there were one parameter group: the other groups get its settings and
    # share its tensor of steps. So put the settings back and give each its own tensor.
    for group, settings in zip(groups, settings_of, strict=True):
        group.update(settings)
    for state in engine.optimizer.optimizer.state.values():
        state["step"] = state["step"].clone()
    return numbers
