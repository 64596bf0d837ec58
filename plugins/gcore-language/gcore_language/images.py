"""Reads the images of prompts, cuts them into patches and makes room for them in the text.

This is for the image-text models of Qwen2-VL's kind. An image takes as many tokens as it has
patches, divided by the square of the model's merge size.

Legend of shapes:

    N   patches of some images
    F   numbers of one patch
    I   images
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gcore_core.contract.columns import Columns
from gcore_core.contract.errors import DataError
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt
from gcore_language.prompts import LOAD_ERRORS, first_lines, unreadable

FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl"})
#: A record of a prompt with images holds the patches among its media by this name.
PIXELS = "pixel_values"
#: It holds how the patches lie among its columns by this name.
GRID = "image_grid_thw"


def takes_images(config: Any) -> bool:
    """Whether a Hugging Face config is of one of ``FAMILIES``."""
    return getattr(config, "model_type", "") in FAMILIES


@dataclass(frozen=True, kw_only=True)
class Images:
    """The images of one prompt.

    pixels: float32[N, F], the patches of all images.
    grid: int64[I, 3], how many patches each image has in time, height and width; N is the sum of
        the products of its rows.
    """

    pixels: np.ndarray
    grid: np.ndarray

    @staticmethod
    def of(columns: Columns, media: Columns) -> Images | None:
        """Returns the images of a record; None when it has none.

        Records of one prompt share the array of pixels.
        """
        return Images(pixels=media[PIXELS], grid=columns[GRID]) if PIXELS in media else None


class ImageReader:
    """Opens the images of prompts with the image processor that lies beside a model's weights."""

    def __init__(self, path: str, config: Any, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoImageProcessor

        try:
            self._processor = AutoImageProcessor.from_pretrained(
                path, trust_remote_code=trust_remote_code
            )
        except LOAD_ERRORS as error:
            raise unreadable("image processor", path, error) from error
        self._token = int(config.image_token_id)
        self._merged = int(config.vision_config.spatial_merge_size) ** 2

    def read(self, requests: Sequence[SampleRequest]) -> dict[int, Images]:
        """Returns ordinal -> images, for the requests that show images.

        A prompt's files come first, then the request's arrays. All requests of one ordinal have the
        same images, so those of the first are opened for all.

        Raises DataError for an image that cannot be shown.
        """
        first = {request.ordinal: request for request in reversed(requests)}
        requests_with_images = {
            ordinal: request
            for ordinal, request in first.items()
            if request.prompt.images or request.images
        }
        return {ordinal: self._open(request) for ordinal, request in requests_with_images.items()}

    def _open(self, request: SampleRequest) -> Images:
        prompt = request.prompt
        pictures = [_picture(prompt, path) for path in prompt.images] + [
            _picture_of(array) for array in request.images
        ]
        try:
            processed = self._processor(images=pictures, return_tensors="np")
        except ValueError as error:  # of a size that it refuses
            what = f"the images of {_owner(prompt, has_images=True)} cannot be cut into patches."
            raise DataError(what, where=_where(prompt), why=first_lines(error)) from error
        return Images(
            pixels=np.asarray(processed[PIXELS], np.float32),
            grid=np.asarray(processed[GRID], np.int64),
        )

    def lay(self, prompt: Prompt, ids: np.ndarray, images: Images | None) -> np.ndarray:
        """Returns the prompt's tokens with each image token repeated as often as its image needs.

        ids: the encoded prompt, with one image token for each image.
        images: the prompt's images; None without any.

        Raises DataError when the numbers of images and places differ, or when no token stands
        between two images.
        """
        places = (ids == self._token).nonzero()[0]
        tokens = (
            images.grid.prod(1) // self._merged if images is not None else np.zeros(0, np.int64)
        )
        where = _where(prompt)
        owner = _owner(prompt, has_images=images is not None)
        if len(places) != len(tokens):
            raise DataError(
                f"{owner} names {len(tokens)} images, and its prompt has places for {len(places)}.",
                where=where,
                why=(
                    "A place is the model's image token, which its chat template writes for a "
                    "part of type image."
                ),
            )
        if (np.diff(places) == 1).any():
            raise DataError(
                f"the prompt of {owner} has two images without a token between them.",
                where=where,
                todo="Write the tokens that begin and end an image around each.",
            )
        counts = np.ones(len(ids), np.int64)
        counts[places] = tokens
        return np.repeat(ids, counts)


def _where(prompt: Prompt) -> str:
    return prompt.images[0] if prompt.images else ""


def _owner(prompt: Prompt, *, has_images: bool) -> str:
    """Names whose images they are, for an error.

    Images that are not files of the prompt belong to a question, all others to a row.

    has_images: whether there are images.
    """
    return "a question" if has_images and not prompt.images else f"row {prompt.row}"


def _picture_of(array: np.ndarray) -> Any:
    """Makes an RGB image of uint8[H, W, C], where C is 1 or 3.

    Raises DataError for any other array.
    """
    from PIL import Image

    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3) or not array.size:
        kind = f"{array.dtype}{list(array.shape)}"
        raise DataError(
            f"what a question shows is {kind}, not uint8[height, width, 1 or 3].", where="images"
        )
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).convert("RGB")


def _picture(prompt: Prompt, path: str) -> Any:
    """Opens an image file in RGB. Raises DataError when it cannot be read."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        why = (
            "There is no such file."
            if isinstance(error, FileNotFoundError)
            else f"{type(error).__name__}: {error}"
        )
        raise DataError(
            f"an image of row {prompt.row} cannot be read.", where=path, why=why[:300]
        ) from error
