"""How a trainer's state is saved: as whole tensors that any trainer can load, or in DeepSpeed's universal format."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from gcore_language.ranks import Ranks
from gcore_language.state_files import load_numbers, load_parts, save_state

from gcore_core.errors import DataError
from gcore_deepspeed.optimizer import OptimizerState

_OWN, _UNIVERSAL = "deepspeed", "universal"


def save_whole(optimizer: OptimizerState, directory: Path, numbers: dict[str, Any], ranks: Ranks) -> None:
    """In the form of ``gcore_language.state_files``, a tensor at a time."""
    steps = optimizer.steps
    trained = [name for name, tensor in optimizer.tensors.items() if tensor.requires_grad]
    counted = dict.fromkeys(trained, float(steps)) if steps else {}
    save_state(directory, optimizer.parts(), {**numbers, "optimizer_steps": counted}, writes=ranks.rank == 0)
    ranks.wait()


def load_whole(optimizer: OptimizerState, directory: Path) -> dict[str, Any]:
    """Returns the numbers. Raises DataError."""
    numbers = load_numbers(directory)
    steps = set(numbers.pop("optimizer_steps").values())
    if len(steps) > 1:
        raise DataError(
            f"this state counts {len(steps)} different numbers of steps, and ZeRO counts one for all tensors.",
            where=str(directory / "state.json"),
        )
    optimizer.prepare(int(max(steps, default=0)))
    for part, name, whole in load_parts(directory, optimizer.shapes):
        optimizer.set(part, name, whole)
    return numbers


def save_universal(
    engine: Any, optimizer: OptimizerState, directory: Path, numbers: dict[str, Any], ranks: Ranks
) -> None:
    """DeepSpeed's own checkpoint of this number of ranks, turned into the one for any number."""
    if not optimizer.steps:
        optimizer.prepare(0)  # its conversion wants moments
    directory.mkdir(parents=True, exist_ok=True)
    engine.save_checkpoint(str(directory), tag=_OWN, save_latest=False)
    ranks.wait()
    if ranks.rank == 0:
        _convert(directory)
        (directory / "state.json").write_text(json.dumps(numbers))
    ranks.wait()


def _convert(directory: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(directory / _UNIVERSAL, ignore_errors=True)
    arguments = Namespace(
        input_folder=str(directory / _OWN),
        output_folder=str(directory / _UNIVERSAL),
        num_extract_workers=1,  # more are processes that fork this one
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,  # of Megatron's layouts, which a Hugging Face model has none of
    )
    with contextlib.redirect_stdout(io.StringIO()):
        ds_to_universal.main(arguments)
    shutil.rmtree(directory / _OWN)


def load_universal(engine: Any, directory: Path) -> dict[str, Any]:
    """Returns the numbers. Raises DataError."""
    numbers = load_numbers(directory)
    if not (directory / _UNIVERSAL).is_dir():
        raise DataError(
            "this state is not in DeepSpeed's universal format.",
            where=str(directory),
            why="It was saved with checkpoint: whole, or by another trainer.",
            todo="Use checkpoint: whole.",
        )
    groups = engine.optimizer.param_groups
    kept = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    engine.load_checkpoint(str(directory), tag=_UNIVERSAL)
    # what DeepSpeed restores is for one parameter group: the others got its settings, and count steps in its tensor
    for group, settings in zip(groups, kept, strict=True):
        group.update(settings)
    for state in engine.optimizer.optimizer.state.values():
        state["step"] = state["step"].clone()
    return numbers
