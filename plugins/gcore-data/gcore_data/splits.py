"""Reads from the names of files of which split they are.

On the hub, train_sft-00000-of-00003.parquet is the first of three files of the split train_sft.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

#: Words in the names of files -> the split that they mean, as on the hub.
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SUFFIXES = re.compile(r"(\.(parquet|arrow|jsonl?|csv|tsv|txt|gz|bz2|xz|zst|zip|snappy))+$")
#: What numbers the files of one split: 00000-of-00003, part-2, a hash, one letter.
_NUMBERS = re.compile(r"[a-z]?\d*|of|(part|shard|chunk|file)\d*|(?=.*\d)[0-9a-f]{8,}")
#: A file's number and how many there are.
_NUMBERED = re.compile(r"\b\d+-of-\d+\b")


def split_of(file: str | Path) -> str:
    """Returns the split that a file's name begins or ends with, such as train_sft.

    What stands before the word train, test or the like is the data set's name. Empty: the name has
    no such word.
    """
    words = re.split(r"[^a-z0-9]+", _SUFFIXES.sub("", Path(file).name.lower()))
    for first, word in enumerate(words):
        split = _SPLITS.get(word.rstrip("0123456789"))
        if split is not None:
            behind = "-".join(words[first + 1 :])
            names = _NUMBERED.split(behind)[0].split("-")  # a hash may follow
            more = (word for word in names if not _NUMBERS.fullmatch(word))
            return "_".join([split, *more])
    return ""


def _by_split(folder: Path, whole: str, files: Iterable[str]) -> dict[str, list[str]]:
    """Returns split -> its files, by their names or those of the folders, else ``whole``."""
    found: dict[str, list[str]] = {}
    for file in files:
        names = reversed(Path(os.path.relpath(file, folder)).parts)
        split = next(filter(None, map(split_of, names)), whole)
        found.setdefault(split, []).append(file)
    return found


def finer_splits(folder: Path, files: Mapping[str, Iterable[str]]) -> dict[str, list[str]] | None:
    """Returns split -> files where the names say more than ``datasets`` has read from them.

    It takes train_sft and train_gen for one split train, unless both lie in a folder "data".

    folder: that was opened.
    files: split -> files, as ``datasets`` has it.

    None: it has read what the names say.
    """
    parts = [_by_split(folder, whole, paths) for whole, paths in files.items()]
    if all(len(finer) == 1 for finer in parts):
        return None
    return {split: paths for finer in parts for split, paths in finer.items()}
