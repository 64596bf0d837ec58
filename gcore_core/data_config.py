"""What may be set under ``config:`` of datasets and of the reward that the core brings."""

from __future__ import annotations

from dataclasses import dataclass

from gcore_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """What every dataset of rows in files takes. Fields of a row that are not the prompt go along
    with it.
    """

    path: str
    """The file, or the directory where the format has one; relative to the YAML's directory."""
    prompt: str = "prompt"
    """Field that holds the prompt as text."""
    messages: str | None = None
    """Field that holds the prompt as chat messages, [{role, content}, ...]; takes the place of
    ``prompt``.
    """
    images: str | None = None
    """Field that holds the paths of the prompt's images, [path, ...], relative to the directory of
    the data.
    """
    limit: int | None = None
    """Use this many rows, from the first on."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"must be at least 1, is {self.limit}", where="limit")

    def shows_images(self) -> bool:
        return self.images is not None


@dataclass(frozen=True, kw_only=True)
class JsonLinesConfig(RowsConfig):
    """A file with one JSON object a line."""

    index_dir: str | None = None
    """Where the index of the file is kept. Empty: $G_CORE_CACHE/index, else
    ~/.cache/g-core/index.
    """


@dataclass(frozen=True, kw_only=True)
class FunctionRewardConfig:
    """A function in a Python file."""

    path: str
    """The file; relative to the YAML's directory."""
    name: str
    """The function: of one record, ``def f(record) -> float``, or of many when ``batch`` is set. It
    may be async.
    """
    batch: bool = False
    """Call it with a list of records; it returns a list of as many numbers."""
