"""Gathers pictures of evaluated records into galleries, a row for each prompt."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gcore_core.contract import run_files
from gcore_report.page import limits
from gcore_report.page.answers import halving, plain
from gcore_report.page.runs import Run

RULE = (
    f"At most {limits.PICTURES} pictures of {limits.PICTURE_PIXELS} pixels, "
    f"{limits.PICTURE_BYTES >> 20} MiB in all: those of the first and of the last evaluation, then "
    "those in between, from the middle outwards. g-core watch RUN shows the rest."
)


def pictures(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the pictures that are shown, and the rule.

    pictures: each [run, step, mode, prompt, name, rewards, address of the picture's data].
    """
    shown: list[list[Any]] = []
    total = 0
    nbytes = 0
    for number, run in enumerate(runs):
        for step in halving(run.sampled_steps()):
            for row in run_files.read_samples(run.directory, step):
                for name, file in row.get("arrays", {}).items():
                    total += 1
                    if len(shown) >= limits.PICTURES or nbytes >= limits.PICTURE_BYTES:
                        continue
                    address = address_of(run.directory / run_files.SAMPLES, file)
                    if address:
                        nbytes += len(address)
                        prompt = plain(row.get("prompt", ""))
                        rewards = row.get("rewards", {})
                        shown.append(
                            [number, step, row.get("mode", ""), prompt, name, rewards, address]
                        )
    shown.sort(key=lambda picture: (picture[0], picture[1]))
    return {"pictures": shown, "shown": len(shown), "total": total, "rule": RULE}


def address_of(samples: Path, file: str) -> str:
    """Returns a picture as the address of its own data; "" for a file that is none of the run's.

    A WebP of small size loses nothing that can be seen, and is a tenth of the array.
    """
    path = (samples / file).resolve()
    if not path.is_relative_to(samples.resolve()):
        return ""
    try:
        pixels = np.load(path, allow_pickle=False)
        picture = _picture(pixels)
    except (OSError, ValueError, TypeError):
        return ""
    content = io.BytesIO()
    picture.save(content, "WEBP", quality=85)
    return f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode()}"


def _picture(pixels: np.ndarray) -> Image.Image:
    """Makes a picture of uint8[H, W, C], C being 1, 3 or 4; small ones are made larger."""
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    longer = max(picture.size)
    if longer > limits.PICTURE_PIXELS:
        picture.thumbnail((limits.PICTURE_PIXELS, limits.PICTURE_PIXELS))
    elif longer <= limits.PICTURE_PIXELS // 4:
        times = limits.PICTURE_PIXELS // 2 // longer
        size = (picture.width * times, picture.height * times)
        picture = picture.resize(size, Image.Resampling.NEAREST)
    return picture
