"""Provides the reward ``diffusion/preference``: how well an image answers its prompt, by a CLIP.

A CLIP that was trained on what people preferred, such as PickScore, gives an image and a text the
score s = exp(t) cos(text, image), where t is the model's own logit scale. Of two images of one
prompt the first is preferred with probability 1 / (1 + exp(s2 - s1)). An ordinary CLIP gives the
CLIP score in the same way.

Source: Kirstain et al., "Pick-a-Pic: An Open Dataset of User Preferences for Text-to-Image
Generation", arXiv:2305.01569, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gcore_language.model_files import open_model_files
from gcore_language.models import DTYPES, choose_device, refuse_engine
from gcore_language.pretrained import CLIP, open_pretrained
from gcore_language.prompts import LOAD_ERRORS, unreadable

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.scorer import Score, ScoredRecord, failure
from gcore_diffusion.config import PreferenceConfig
from gcore_diffusion.rewards import image_of


class Preference:
    """Scores images with a CLIP; see ``gcore_core.contract.scorer.Scorer``.

    A record fails alone that has no image, or whose prompt is no text. A prompt is cut to the
    tokens that the model takes, as its authors do.
    """

    def __init__(self, config: PreferenceConfig, context: WorkerContext) -> None:
        refuse_engine(context)
        path = str(open_model_files(context, config.path).directory)
        self._device = choose_device(config.device, context, config.threads, path)
        self._batch = config.batch_images
        beside = config.processor and str(open_model_files(context, config.processor).directory)
        self._model, self._tokenizer, self._images = _load(path, beside or path, config.dtype)
        self._model.to(self._device)
        self._longest = int(self._model.config.text_config.max_position_embeddings)

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Returns the score of each record, in their order."""
        scores: list[Score] = [failure("")] * len(records)
        scorable: list[int] = []
        for place, record in enumerate(records):
            try:
                image_of(record)
                _text_of(record)
                scorable.append(place)
            except ValueError as error:
                scores[place] = failure(str(error))
        for start in range(0, len(scorable), self._batch):
            part = scorable[start : start + self._batch]
            values = self._forward([records[place] for place in part])
            for place, value in zip(part, values, strict=True):
                finite = math.isfinite(value)
                scores[place] = Score(value=value) if finite else failure(f"the model gave {value}")
        return scores

    @torch.no_grad()
    def _forward(self, records: Sequence[ScoredRecord]) -> list[float]:
        """Returns a score for each record; a text that several share is encoded once."""
        texts = list(dict.fromkeys(_text_of(record) for record in records))
        tokens = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._longest, return_tensors="pt"
        )
        images = [_colour(image_of(record)) for record in records]
        pixels = self._images(images=images, return_tensors="pt")["pixel_values"]
        logits = self._model(
            input_ids=tokens["input_ids"].to(self._device),
            attention_mask=tokens["attention_mask"].to(self._device),
            pixel_values=pixels.to(self._device, self._model.dtype),
        ).logits_per_image  # [images, texts]
        own = torch.tensor([texts.index(_text_of(record)) for record in records])
        values: list[float] = logits.float().cpu()[torch.arange(len(records)), own].tolist()
        return values


def _load(path: str, beside: str, dtype: str) -> tuple[Any, Any, Any]:
    """Opens the model in evaluation mode, its tokenizer and its image processor.

    Raises DataError where one of them cannot be read.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    model, _ = open_pretrained(Path(path), CLIP, dtype=DTYPES[dtype])
    try:
        tokenizer = AutoTokenizer.from_pretrained(beside)
        images = AutoImageProcessor.from_pretrained(beside)
    except LOAD_ERRORS as error:
        raise unreadable("preference model", path, error) from error
    return model.eval(), tokenizer, images


def _text_of(record: ScoredRecord) -> str:
    """Returns the text of a record's prompt. Raises ValueError where it is none."""
    if not record.prompt.text:
        raise ValueError("the prompt is no text")
    return record.prompt.text


def _colour(image: np.ndarray) -> np.ndarray:
    """Returns an image with three channels, uint8[H, W, 3]; grey ones have one."""
    return image.repeat(3, axis=2) if image.shape[2] == 1 else image
