"""Passes on patches of images that the worker has made: SGLang and trainer see the same numbers.

SGLang's own processor for these models takes other sizes of images than the model directory says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from sglang.srt.models.qwen2_vl import Qwen2VLForConditionalGeneration
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor


class GivenPatches(BaseMultimodalProcessor):
    """Takes prompts whose image tokens are all there.

    ``image_data`` names one file, which holds ``pixels`` and ``grid``.
    """

    models = [Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration]
    prefer_tokenized_input = True

    def __init__(self, hf_config: Any, *_: Any, **__: Any) -> None:
        self._config = hf_config

    def clear_preprocess_cache(self) -> None:
        """Does nothing, because nothing is cached."""

    async def process_mm_data_async(
        self, image_data: Sequence[str], input_text: list[int], request_obj: Any, **_: Any
    ) -> MultimodalProcessorOutput:
        """Returns what SGLang passes to the model for one prompt.

        image_data: the path of one file with pixels, float32[patches, numbers], and grid,
            int64[images, 3], both in the order of the images.
        input_text: the prompt's token ids, in which the tokens of each image lie together.
        """
        config = self._config
        (file,) = image_data
        merge = config.vision_config.spatial_merge_size
        with np.load(file, allow_pickle=False) as arrays:
            pixels = torch.from_numpy(arrays["pixels"])
            grid = torch.from_numpy(arrays["grid"])
        patches = grid.prod(-1)
        ids = torch.tensor(input_text)
        places = (ids == config.image_token_id).nonzero()[:, 0]
        items = [
            MultimodalDataItem(
                modality=Modality.IMAGE,
                feature=feature,
                offsets=[(int(place[0]), int(place[-1]))],
                model_specific_data={"image_grid_thw": image_grid[None]},
            )
            for feature, image_grid, place in zip(
                pixels.split(patches.tolist()),
                grid,
                places.split((patches // merge**2).tolist()),
                strict=True,
            )
        ]
        positions, delta = MRotaryEmbedding.get_rope_index(
            spatial_merge_size=merge,
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            vision_start_token_id=config.vision_start_token_id,
            model_type=config.model_type,
            tokens_per_second=getattr(config.vision_config, "tokens_per_second", None),
            input_ids=ids[None],
            image_grid_thw=grid,
        )
        return MultimodalProcessorOutput(
            input_ids=input_text,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(input_text, items),
            mm_items=items,
            im_token_id=config.image_token_id,
            im_start_id=config.vision_start_token_id,
            im_end_id=config.vision_end_token_id,
            mrope_positions=positions[:, 0],
            mrope_position_delta=delta,
        )
