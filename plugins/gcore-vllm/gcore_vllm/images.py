"""Builds vLLM's prompts with images, from patches that the worker has made.

The worker makes the patches with the image processor beside the weights. So the engine and the
trainer see the same numbers, and an image is opened once for all samples of its prompt.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import xxhash
from gcore_language.images import GRID, PIXELS, Images

#: Architectures of Hugging Face configs -> what stands in for vLLM's own class where torchvision is
#: missing.
_WITHOUT_TORCHVISION = {
    "Qwen2VLForConditionalGeneration": "gcore_vllm.image_models:Qwen2VL",
    "Qwen2_5_VLForConditionalGeneration": "gcore_vllm.image_models:Qwen25VL",
}


def register_models() -> None:
    """Lets models that take images start without torchvision; does nothing where it is installed.

    vLLM calls it, as an entry point, in each of its processes.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return
    from vllm import ModelRegistry

    for architecture, stand_in in _WITHOUT_TORCHVISION.items():
        ModelRegistry.register_model(architecture, stand_in)


class Showing:
    """Turns prompts of a model that takes images into vLLM's inputs.

    config: transformers' config of the model.
    """

    def __init__(self, config: Any) -> None:
        self._token = int(config.image_token_id)
        self._merge = int(config.vision_config.spatial_merge_size)

    def input(self, ids: np.ndarray, images: Images) -> dict[str, Any]:
        """Returns what ``add_request`` takes.

        ids: int32[P], the prompt, in which the tokens of each image lie together.
        images: the patches of its images, in the same order.
        """
        import torch
        from transformers import BatchFeature
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import (
            MultiModalFieldConfig,
            MultiModalKwargsItems,
            PlaceholderRange,
        )

        # An image of `patches` patches takes `counts` tokens. The tokens of image i begin at the
        # image token whose number is the sum of the counts of all images before it.
        patches = images.grid.prod(1)
        counts = patches // self._merge**2
        first = (ids == self._token).nonzero()[0][counts.cumsum() - counts]
        tensors = {PIXELS: torch.from_numpy(images.pixels), GRID: torch.from_numpy(images.grid)}
        fields = {
            PIXELS: MultiModalFieldConfig.flat_from_sizes("image", torch.from_numpy(patches)),
            GRID: MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        parts = np.split(images.pixels, patches.cumsum()[:-1])
        names = [_name(part, grid) for part, grid in zip(parts, images.grid, strict=True)]
        places = [
            PlaceholderRange(offset=int(at), length=int(n))
            for at, n in zip(first, counts, strict=True)
        ]
        items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(tensors), fields)
        return dict(mm_input(ids.tolist(), items, {"image": names}, {"image": places}))


def _name(pixels: np.ndarray, grid: np.ndarray) -> str:
    """Returns the hash by which vLLM tells images apart in its caches."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(pixels).data)
    digest.update(grid.data)
    return digest.hexdigest()
