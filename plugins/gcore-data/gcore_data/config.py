"""What may be set under ``config:`` of the datasets."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.rows import RowsConfig
from gcore_core.contract.traits import Traits
from gcore_data.extraction import require_rule

#: Suffix of a file -> the reader of ``datasets`` for it.
FILE_SUFFIXES = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}


@dataclass(frozen=True, kw_only=True)
class ParquetConfig(RowsConfig):
    """A Parquet file, a directory of them, or a directory written by ``save_to_disk`` of Hugging
    Face datasets.
    """


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """A data set of the Hugging Face hub, or the same formats in local files."""

    path: str
    """Name on the hub, such as openai/gsm8k; or a file (Parquet, Arrow, JSON, JSON lines, CSV), a
    folder of them as on the hub, or what ``save_to_disk`` wrote, relative to the YAML's directory.
    """
    subset: str = ""
    """Which of the data set's configurations, such as main. Empty: its only or default one."""
    split: str = "train"
    """Which split, such as test, or a part of one, such as train[:1000]. Files of a folder whose
    names begin with train_sft and train_gen are two splits of these names.
    """
    revision: str = ""
    """Commit, branch or tag on the hub. Empty: its main branch, which may change between runs."""
    streaming: bool = False
    """Whether only the first ``limit`` rows are fetched, not the whole data set. They are kept in
    the cache, and read from there from then on.
    """
    limit: int | None = None
    """Number of rows to use, from the first on; at least 1. Empty: all rows."""
    columns: dict[str, str] = field(default_factory=dict)
    """Field -> the column it is read from; dots lead into columns that hold objects. Columns that
    are not named here are fields by their own names.
    """
    template: str = ""
    """Text of the prompt, with fields in braces: "{question} Answer with a number." Empty: the
    prompt is the field prompt, a text or a chat, or else messages, or else what the answers chosen
    and rejected both begin with.
    """
    form: Literal["auto", "text", "chat"] = "auto"
    """chat: a prompt that is a text becomes a turn of the user. text: a prompt must be a text.
    auto: it is what it is.
    """
    system: str = ""
    """Text of a system turn that every chat begins with, but for those that have one, which stays.
    Empty: none is added.
    """
    last_answer: Literal["keep", "take"] = "keep"
    """take: the assistant's last turn of a chat is taken off and becomes the field completion,
    which the row must not have.
    keep: it stays, as supervised fine-tuning needs it.
    """
    extract: dict[str, str] = field(default_factory=dict)
    """Field -> how its value is found in its text: gsm8k (behind the last ####), boxed (in the last
    \\boxed{}), number (the plain number at its end), or a text with {answer} where the value
    stands, such as "The answer is {answer}." whose last occurrence counts.
    """
    images: str | None = None
    """Column of the prompt's images: paths relative to the directory of the data, or the images
    themselves, which are written into the cache. In a text that becomes a chat, "<image>" stands
    for each. Empty: prompts have no images.
    """

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"must be at least 1, is {self.limit}", where="limit")
        if self.streaming and self.limit is None:
            raise ConfigError("needs a number of rows to fetch; set limit", where="streaming")
        if self.system and self.form == "text":
            raise ConfigError("is a turn of a chat, and form is text", where="system")
        for name, rule in self.extract.items():
            require_rule(rule, f"extract.{name}")

    @property
    def is_local(self) -> bool:
        """Whether the path means files here, not a name on the hub."""
        path = self.path
        explicit = path.startswith(("/", "~", ".")) or path.count("/") > 1
        return explicit or Path(path).suffix in FILE_SUFFIXES or Path(path).exists()

    def traits(self) -> Traits:
        # Offline the rows are in the cache or nowhere.
        downloads = not (self.is_local or _is_offline())
        return Traits(downloads=downloads, shows_images=self.images is not None)


def _is_offline() -> bool:
    """Whether the libraries of the hub may not ask it."""
    words = [os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")]
    return any(word.lower() in ("1", "true", "yes", "on") for word in words)
