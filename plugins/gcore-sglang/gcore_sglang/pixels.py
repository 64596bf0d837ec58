"""Keeps the pixels of running samples in files that SGLang reads (``gcore_sglang.processors``)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from gcore_language.images import Images

from gcore_core.contract.errors import DataError, WorkerError

#: Numbers of a patch: 2 frames, 3 colours, 14 x 14 pixels. SGLang takes any other number for images
#: that are encoded already.
_NUMBERS = 1176


def check_patches(config: Any, where: str) -> None:
    """Raises DataError for a model that takes images and whose patches SGLang would misread.

    config: transformers' config of the model.
    where: what the error names as its place.
    """
    vision = config.vision_config
    numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    if numbers != _NUMBERS:
        raise DataError(
            (
                f"SGLang does not encode this model's images: a patch has {numbers} numbers, not "
                f"{_NUMBERS}."
            ),
            where=where,
            todo="Take a model with patches of 14 x 14 pixels, or another generator.",
        )


class PixelFiles:
    """Keeps one file for all samples that show the same images, as long as any of them runs.

    directory: where the files lie; SGLang's processes must see it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._users: Counter[Path] = Counter()

    def show(self, images: Images) -> str:
        """Counts one more sample of these images and returns the path of their file.

        The first one writes the file. Raises WorkerError when it cannot be written.
        """
        file = self._file(images)
        if not self._users[file]:
            try:
                np.savez(file, pixels=images.pixels, grid=images.grid)
            except OSError as error:
                raise WorkerError(
                    f"pixels of {images.pixels.nbytes} bytes cannot be written.",
                    where=str(self._directory),
                    why=str(error),
                    todo="Give this machine, or its container, more shared memory.",
                ) from error
        self._users[file] += 1
        return str(file)

    def release(self, images: Images) -> None:
        """Counts one sample of these images less; the last one removes their file."""
        file = self._file(images)
        self._users[file] -= 1
        if not self._users[file]:
            del self._users[file]
            file.unlink(missing_ok=True)

    def _file(self, images: Images) -> Path:
        """Returns the path of the file for these images."""
        # The object's id is unique while it lives, and running samples keep it alive.
        return self._directory / f"{id(images):x}.npz"
