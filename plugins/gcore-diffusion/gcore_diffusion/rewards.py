"""Rewards of images.

A record's image is uint8[H, W, C]: its medium ``image``, or else its column of that name.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import REWARD_FAILED
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_diffusion.config import ClassifierConfig


def image_of(record: ScoredRecord) -> np.ndarray:
    """Returns a record's image, uint8[H, W, C].

    Raises ValueError, which says what is wrong, when there is none.
    """
    image = record.media["image"] if "image" in record.media else record.columns.get("image")
    if image is None:
        raise ValueError("the record has no image")
    if image.dtype != np.uint8 or image.ndim != 3 or not image.size:
        raise ValueError(f"the image is {image.dtype}{list(image.shape)}, not uint8[H, W, C]")
    return image


class ImageReward:
    """Base of rewards that score each image alone; a record without an image fails alone."""

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        return [self._score(record) for record in records]

    def _score(self, record: ScoredRecord) -> Score:
        try:
            return Score(value=self.value(image_of(record)))
        except ValueError as error:
            return Score(value=None, status=REWARD_FAILED, reason=str(error))

    def value(self, image: np.ndarray) -> float:
        """Returns the score of an image, uint8[H, W, C]."""
        raise NotImplementedError


class Brightness(ImageReward):
    """The mean of the pixels, from 0 (black) to 1 (white)."""

    def __init__(self, config: None, context: WorkerContext) -> None:
        pass

    def value(self, image: np.ndarray) -> float:
        return float(image.mean(dtype=np.float64) / 255)


class Compressibility(ImageReward):
    """How well zlib compresses an image at 16 levels a channel.

    The score is 1 - (bytes after) / (bytes before): near 1 for one colour.
    """

    def __init__(self, config: None, context: WorkerContext) -> None:
        pass

    def value(self, image: np.ndarray) -> float:
        coarse = (image >> 4).tobytes()
        return 1 - len(zlib.compress(coarse, 9)) / len(coarse)


#: Most pixels that go through a classifier at once. At its default width its activations take some
#: 300 bytes a pixel, so that a batch of any size needs some 80 MiB.
_PASS_PIXELS = 2**18


class Classifier:
    """Scores an image by what a small classifier says of the class that a row's field names.

    A record fails alone whose image or class the classifier does not know.
    """

    def __init__(self, config: ClassifierConfig, context: WorkerContext) -> None:
        import torch

        from gcore_diffusion.tiny import load_classifier

        torch.set_num_threads(config.threads)
        self._config = config
        self._net = load_classifier(self._directory(config, context) / config.file)

    def _directory(self, config: ClassifierConfig, context: WorkerContext) -> Path:
        """Returns the classifier's directory; makes it when ``path`` is a Python file.

        Raises ConfigError when the directory does not exist and no function is named.
        """
        path = Path(config.path)
        if path.is_dir():
            return path
        if not config.name:
            raise ConfigError(
                "no such directory",
                where=f"rewards: classifier path {config.path}",
                todo="or give path and name",
            )
        from gcore_core.kits.models import make_model, models_cache

        make = {"path": config.path, "name": config.name, "config": dict(config.config)}
        return make_model(make, models_cache(), lambda *_: context.progress())

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """See ``Scorer.score``."""
        scores: list[Score] = [Score(value=None, status=REWARD_FAILED, reason="not scored")] * len(
            records
        )
        scorable: list[int] = []
        for place, record in enumerate(records):
            try:
                self._check_image(image_of(record))
                self._label(record)
                scorable.append(place)
            except ValueError as error:
                scores[place] = Score(value=None, status=REWARD_FAILED, reason=str(error))
        if scorable:
            values = self._values([records[place] for place in scorable])
            for place, value in zip(scorable, values, strict=True):
                scores[place] = Score(value=value)
        return scores

    def _check_image(self, image: np.ndarray) -> None:
        """Raises ValueError for an image of another size than the classifier's."""
        side = self._net.side
        if image.shape != (side, side, 1):
            raise ValueError(
                f"the image is uint8{list(image.shape)}, and the classifier takes "
                f"uint8[{side}, {side}, 1]"
            )

    def _label(self, record: ScoredRecord) -> int:
        """Returns the class that the row names; raises ValueError when it is none."""
        from gcore_diffusion.tiny import class_of

        label = record.prompt.fields.get(self._config.label)
        number = class_of(label, self._net.out.out_features)
        if number is None:
            raise ValueError(
                f"the row's field {self._config.label!r} is {label!r}, which is no class"
            )
        return number

    def _values(self, records: Sequence[ScoredRecord]) -> list[float]:
        """Returns the score of each image.

        Images go through the network in parts, so that memory does not grow with the batch. The
        other images of a part must not change an image's score.
        """
        size = max(1, _PASS_PIXELS // self._net.side**2)
        values: list[float] = []
        for start in range(0, len(records), size):
            values += self._values_at_once(records[start : start + size])
        return values

    def _values_at_once(self, records: Sequence[ScoredRecord]) -> list[float]:
        import torch

        from gcore_diffusion.tiny import floats

        labels = torch.tensor([self._label(record) for record in records])
        with torch.no_grad():
            logits = self._net(floats(np.stack([image_of(record) for record in records])))
        if self._config.measure == "correct":
            return [float(value) for value in logits.argmax(-1) == labels]
        return [float(v) for v in logits.double().softmax(-1)[torch.arange(len(labels)), labels]]
