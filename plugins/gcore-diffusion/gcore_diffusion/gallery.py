"""Makes pictures of a run from its evaluated images.

There is a grid for each evaluation, and one sheet of the first and the last. They are made from
what the core writes of evaluated records, whose prompts and seeds are the same at every evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore_core.contract.records import RunFacts, StepReport
from gcore_core.contract.run_files import SAMPLES, read_samples

if TYPE_CHECKING:
    from PIL.Image import Image

CONTACT_SHEET = "contact_sheet.png"
_CELL = 96  # pixels of an image in a grid, at least
_TEXT = 14  # pixels of a line of text
_COLUMNS = 10
_LINES = 2


def after_step(run: RunFacts, report: StepReport) -> None:
    """Writes ``samples/step_N.png`` where an evaluation has left images."""
    rows = _read_images(Path(run.directory), report.step) if report.samples else []
    if rows:
        grid(rows).save(Path(run.directory, SAMPLES, f"step_{report.step:06d}.png"))


def contact_sheet(run: RunFacts) -> None:
    """Writes ``contact_sheet.png``: the first evaluation's images above the last one's."""
    directory = Path(run.directory)
    steps = sorted(
        int(path.stem.removeprefix("step_")) for path in (directory / SAMPLES).glob("step_*.png")
    )
    if not steps:
        return
    from PIL import Image

    parts = [
        _titled(f"step {step}", grid(_read_images(directory, step)))
        for step in dict.fromkeys((steps[0], steps[-1]))
    ]
    sheet = Image.new("RGB", (max(p.width for p in parts), sum(p.height for p in parts)), "white")
    top = 0
    for part in parts:
        sheet.paste(part, (0, top))
        top += part.height
    sheet.save(directory / CONTACT_SHEET)


def grid(rows: Sequence[Mapping[str, Any]]) -> Image:
    """Draws images in a grid, with the prompt and the first reward below each.

    rows: mappings with image uint8[H, W, C], prompt and rewards.
    """
    from PIL import Image, ImageDraw

    pictures = [_picture(row["image"]) for row in rows]
    width = max(p.width for p in pictures)
    height = max(p.height for p in pictures) + _LINES * _TEXT + 4
    columns = min(_COLUMNS, len(rows))
    sheet = Image.new("RGB", (columns * (width + 4), -(-len(rows) // columns) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for place, (row, picture) in enumerate(zip(rows, pictures, strict=True)):
        left = place % columns * (width + 4)
        top = place // columns * height
        sheet.paste(picture, (left, top))
        first = next(iter(row["rewards"].items()), None)
        lines = [
            str(row["prompt"])[: width // 6],
            "" if first is None else f"{first[0][:9]} {first[1]:.2f}",
        ]
        for line, text in enumerate(lines):
            draw.text((left, top + picture.height + line * _TEXT), text, fill="black")
    return sheet


def _picture(image: np.ndarray) -> Image:
    """Makes a picture at least 96 pixels wide.

    Small images are enlarged by a whole factor, large ones are reduced.
    """
    from PIL import Image

    pixels = image[..., 0] if image.shape[-1] == 1 else image
    picture = Image.fromarray(pixels).convert("RGB")
    if picture.width >= _CELL:
        picture.thumbnail((2 * _CELL, 2 * _CELL))
        return picture
    factor = -(-_CELL // picture.width)
    return picture.resize(
        (picture.width * factor, picture.height * factor), Image.Resampling.NEAREST
    )


def _titled(title: str, picture: Image) -> Image:
    """Adds a line of text above a picture."""
    from PIL import Image, ImageDraw

    sheet = Image.new("RGB", (picture.width, picture.height + _TEXT + 6), "white")
    ImageDraw.Draw(sheet).text((2, 2), title, fill="black")
    sheet.paste(picture, (0, _TEXT + 6))
    return sheet


def _read_images(directory: Path, step: int) -> list[dict[str, Any]]:
    """Returns the rows of an evaluation that have an image.

    When some of them are greedy samples, only those are returned.
    """
    images = []
    for row in read_samples(directory, step):
        file = row.get("arrays", {}).get("image")
        if file:
            image = np.load(directory / SAMPLES / file, allow_pickle=False)
            if image.dtype == np.uint8 and image.ndim == 3:
                images.append({**row, "image": image, "prompt": _text(row["prompt"])})
    return [row for row in images if row["mode"] == "greedy"] or images


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
