"""Runs the forward pass of image-text models of Qwen2-VL's kind.

Only a prompt's image tokens stand for images here. Rejected: the forward pass of transformers,
which takes every image token of its input for an image, even a token that was sampled.

Legend of shapes:

    R   rows
    W   tokens of a row
    D   hidden size
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcore_language.images import Images


def show(model: Any, ids: Tensor, images: Sequence[Images | None]) -> tuple[Tensor, Tensor, Tensor]:
    """Embeds rows of tokens and puts their images in.

    Returns (embeddings [R, W, D], positions int64[3, R, W], shift int64[R]). A later token at place
    w of its row has position w + shift in all three dimensions.

    Rows that share an array of pixels are encoded once. Without any image a blank one is encoded
    and has no effect, so that ranks that share the model run the same modules.

    ids: int64[R, W].
    images: the images of each row; None for a row without any.
    """
    inner = model.base_model
    vision = model.config.vision_config
    rows = [image for image in images if image is not None]
    distinct = list({id(image.pixels): image for image in rows}.values()) or [blank(vision)]
    pixels = torch.from_numpy(np.concatenate([image.pixels for image in distinct])).to(ids.device)
    features = inner.get_image_features(
        pixels, _grid(distinct, ids.device), return_dict=True
    ).pooler_output
    embeddings = inner.get_input_embeddings()(ids)
    encoded = torch.cat(list(features)).to(embeddings.dtype)
    merged = int(vision.spatial_merge_size) ** 2
    tokens = torch.tensor(
        [0 if image is None else len(image.pixels) // merged for image in images], device=ids.device
    )
    is_image = ids == model.config.image_token_id
    # only the first image tokens are the prompt's: those after them were sampled
    is_image &= is_image.cumsum(1) <= tokens[:, None]
    if rows:
        parts = encoded.split([len(image.pixels) // merged for image in distinct])
        embedded_of = {id(image.pixels): part for image, part in zip(distinct, parts, strict=True)}
        embedded = torch.cat([embedded_of[id(image.pixels)] for image in rows])
        embeddings = embeddings.masked_scatter(is_image[..., None], embedded)
    else:
        embeddings = embeddings + 0.0 * encoded.sum()  # keeps the blank image in the graph
    grid = _grid(rows, ids.device) if rows else None
    positions, shift = inner.get_rope_index(
        ids, mm_token_type_ids=is_image.int(), image_grid_thw=grid
    )
    return embeddings, positions, shift[:, 0]


def _grid(images: Sequence[Images], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([image.grid for image in images])).to(device)


def blank(vision: Any) -> Images:
    """Makes the smallest image: as many patches as one token takes, all zeros."""
    side = int(vision.spatial_merge_size)
    numbers = int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    return Images(
        pixels=np.zeros((side * side, numbers), np.float32), grid=np.array([[1, side, side]])
    )


def hidden_states(model: Any, ids: Tensor, images: Sequence[Images | None]) -> Tensor:
    """Returns the last hidden states [R, W, D] of rows that are padded on the right."""
    embeddings, positions, _ = show(model, ids, images)
    text = model.base_model.language_model
    hidden: Tensor = text(
        inputs_embeds=embeddings, position_ids=positions, use_cache=False
    ).last_hidden_state
    return hidden
