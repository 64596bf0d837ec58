"""Opens a causal language model, or a reward model, with a value head; and names it when exported.

What is saved is what gcore-torch saves: a sequence classifier of transformers with one output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from gcore_language.model_files import ModelFiles
from gcore_language.models import check_classifier, new_head
from gcore_language.values import SCORE
from torch import Tensor

from gcore_core.contract.errors import DataError
from gcore_megatron.convert import Piece
from gcore_megatron.model import Architecture

_OUTPUT = "lm_head.weight"


def with_values(model: Architecture) -> Architecture:
    """Returns the architecture with a value head; its embedding is nobody's output layer."""
    return replace(model, tied=False, values=True)


def files_with_head(files: ModelFiles, hf_config: Any, hidden: int) -> ModelFiles:
    """Returns what the directory holds as far as a value model reads it, and its head.

    The output layer is not read. A head that is not there is counted too: it will be a new one.

    Raises DataError for a classifier with several outputs.
    """
    check_classifier(hf_config, str(files.directory))
    shapes = {name: shape for name, shape in files.shapes.items() if name != _OUTPUT}
    return replace(files, shapes={SCORE: (1, hidden), **shapes})


def read_pieces(files: ModelFiles, pieces: Sequence[Piece]) -> list[Piece]:
    """Returns the pieces that the directory has: all, or all but the head."""
    return [piece for piece in pieces if piece.name != SCORE or SCORE in files.shapes]


@torch.no_grad()
def fill_new_head(parameters: Mapping[str, Tensor], std: float, seed: int) -> None:
    """Fills the head of the last stage, with the same numbers on every rank."""
    weight = parameters.get("output_layer.weight")
    if weight is not None:
        weight.copy_(new_head(tuple(weight.shape), std, seed))


def name_classifier(hf_config: Any, path: str) -> None:
    """Changes a config of transformers to that of a sequence classifier with one output.

    Raises DataError for a family that has none.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES,
    )

    name = NAMES.get(hf_config.model_type)
    if name is None:
        raise DataError(
            "the model cannot have a value head.",
            where=path,
            why=f"transformers has no sequence classifier of the family {hf_config.model_type!r}",
        )
    hf_config.architectures = [name]
    hf_config.num_labels = 1
