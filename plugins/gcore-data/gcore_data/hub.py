"""Reads prompts from data sets of the Hugging Face hub, and from local files in its formats.

The rows lie in Arrow files that are mapped into memory; one is decoded when it is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from gcore_language.floats import converted, converters

from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import shortened
from gcore_core.kits.cache import cache_root, replacing
from gcore_data.config import HubConfig
from gcore_data.formats import prompt_of
from gcore_data.opening import open_rows, where_of


class Hub:
    """Gives the rows of a data set as prompts, in the order in which it has them."""

    def __init__(self, config: HubConfig) -> None:
        self._config = config
        self._where = where_of(config)
        self._found = open_rows(config)
        features = getattr(self._found, "features", None)
        self._narrow = converters(features.arrow_schema) if features else {}
        if config.images is not None:
            self._require_column(config.images)
        self._prompt(0)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < len(self._found):
            raise IndexError(f"row {row} of {len(self._found)}")
        return self._prompt(row)

    def _prompt(self, row: int) -> Prompt:
        where = f"{self._where}, row {row}"
        values = converted(self._found[row], self._narrow)
        images: list[str] = []
        if self._config.images is not None:
            given = values.pop(self._config.images)
            many = given if isinstance(given, list) else [given] if given is not None else []
            images = [self._image(image, where) for image in many]
        prompt = prompt_of(row, values, self._config, where)
        return msgspec.structs.replace(prompt, images=images)

    def _require_column(self, name: str) -> None:
        there = self._found.column_names
        if name not in there:
            raise DataError(
                f"no column {name!r}",
                where=self._where,
                why=f"there are: {', '.join(there)}",
                todo="correct data.config.images",
            )

    def _image(self, image: Any, where: str) -> str:
        """Returns the path of an image: of its file, or of one in the cache that it goes to."""
        if isinstance(image, str):
            image = {"path": image}
        if not isinstance(image, Mapping):
            raise DataError(f"{shortened(repr(image).encode())} is no image", where=where)
        content, path = image.get("bytes"), image.get("path")
        if content is None and path:
            return str(_folder(self._config) / str(path))
        if not isinstance(content, bytes) or not content:
            raise DataError("an image has neither content nor a path", where=where)
        return str(_kept(content, Path(str(path or "")).suffix))


def _folder(config: HubConfig) -> Path:
    """Returns the directory that paths in the data are relative to."""
    data = Path(config.path).absolute()
    return data if data.is_dir() else data.parent


def _kept(content: bytes, suffix: str) -> Path:
    """Writes an image into the cache, unless it is there; its name is a hash of its content."""
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    place = cache_root() / "images" / digest[:2] / f"{digest}{suffix}"
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as fresh:
            fresh.write_bytes(content)
    return place
