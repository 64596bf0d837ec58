"""Opens data sets with the library ``datasets``: of the hub, its cache, or local files."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetsError

from gcore_core.contract.errors import DataError, did_you_mean
from gcore_core.contract.rows import data_files_in, require_there
from gcore_core.kits.cache import cache_root
from gcore_data.config import FILE_SUFFIXES, HubConfig
from gcore_data.exact_files import Rows, exact_rows
from gcore_data.opening import unreadable, where_of
from gcore_data.splits import finer_splits

#: What ``datasets`` raises for what it cannot open: no such name, subset, split, file or format.
_ERRORS = (DatasetsError, OSError, ValueError, KeyError)


def rows_of(config: HubConfig) -> Rows:
    """Returns the rows that the settings mean; see ``gcore_data.opening.open_rows``."""
    datasets.disable_progress_bars()
    found: Rows = _of_files(config) if config.is_local else _of_name(config)
    if isinstance(found, datasets.Dataset) and len(found):
        if config.limit is not None:
            found = found.select(range(min(config.limit, len(found))))
        found = _with_images_encoded(found)
    return found


def _of_files(config: HubConfig) -> Any:
    path = Path(config.path)
    require_there(path)
    hub_only = "revision" if config.revision else "streaming" if config.streaming else ""
    if hub_only:
        raise DataError(
            f"{hub_only} means the hub, and this is a local path",
            where=config.path,
            todo=f"leave data.config.{hub_only} out",
        )
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(path, config)
    if path.is_dir():
        return _loaded(config, str(path), name=config.subset or None)
    if path.suffix not in FILE_SUFFIXES:
        raise DataError(
            f"is a file of no known format: {path.suffix or 'no suffix'}",
            where=str(path),
            why=f"formats: {', '.join(FILE_SUFFIXES)}",
            todo=data_files_in(path.parent),
        )
    return _loaded(config, FILE_SUFFIXES[path.suffix], data_files=str(path))


def _saved(path: Path, config: HubConfig) -> datasets.Dataset:
    """Returns what ``save_to_disk`` has written: the rows of one split, or a folder of splits."""
    try:
        found = datasets.load_from_disk(str(path))
    except _ERRORS as error:
        raise _unreadable(config, error) from error
    if isinstance(found, datasets.DatasetDict):
        if config.split not in found:
            raise _no_split(config, list(found))
        return found[config.split]
    own = str(found.split or "train")
    if config.split != own:
        raise _no_split(config, [own])
    return found


def _of_name(config: HubConfig) -> Any:
    if config.streaming:
        return _fetched(config)
    return _loaded(
        config, config.path, name=config.subset or None, revision=config.revision or None
    )


def _loaded(config: HubConfig, path: str, **options: Any) -> Any:
    try:
        if config.is_local:
            builder = datasets.load_dataset_builder(path, **options)
            finer = _finer_splits(path, builder)
            if finer is not None:
                path, options = builder.name, {"data_files": finer}
                builder = datasets.load_dataset_builder(path, **options)
                _require_split(config, list(finer))
            exact = exact_rows(builder, config.split, config.limit)
            if exact is not None:
                return exact
        found = datasets.load_dataset(path, split=config.split, **options)
    except DataError:
        raise
    except _ERRORS as error:
        raise _unreadable(config, error) from error
    _refuse_guessed_times(found, config)
    return found


def _finer_splits(path: str, builder: datasets.DatasetBuilder) -> dict[str, list[str]] | None:
    """Returns split -> files of a folder in which ``datasets`` would take two splits for one.

    None: it does not, or the folder's README says what the splits are.
    """
    folder = Path(path)
    card = folder / "README.md"
    if not folder.is_dir() or (card.is_file() and "data_files:" in card.read_text("utf-8")):
        return None
    files = builder.config.data_files or {}
    return finer_splits(folder, {str(split): list(paths) for split, paths in files.items()})


def _require_split(config: HubConfig, there: list[str]) -> None:
    """Raises DataError where ``split`` names one that is not there, as in "train+test[:10]"."""
    names = [part.partition("[")[0].strip() for part in config.split.split("+")]
    missing = next((name for name in names if name not in there), None)
    if missing is not None:
        raise _no_split(config, there, missing)


def _refuse_guessed_times(found: Any, config: HubConfig) -> None:
    """Raises DataError where texts of JSON were taken for times: what they were is lost."""
    for name, feature in (found.features or {}).items():
        if found.builder_name == "json" and "Value('timestamp" in repr(feature):
            raise DataError(
                f"column {name!r} has texts that look like times, and datasets made times of them",
                where=where_of(config),
                why="JSON knows no times, and a row must have what its file says",
                todo="download the files, and set data.config.path to their folder",
            )


def _fetched(config: HubConfig) -> datasets.Dataset:
    """Returns the first rows of a data set on the hub, which are fetched once.

    They are written beside their place in the cache and then moved there, so that several
    processes may do it at once: whichever comes first counts.
    """
    place = cache_root() / "data" / _key(config)
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=place.parent, prefix=".fetching-"))
        try:
            rows = datasets.Dataset.from_list(list(islice(_stream(config), config.limit)))
            rows.save_to_disk(str(beside))
            os.replace(beside, place)
        except OSError:
            if not place.is_dir():
                raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    found = datasets.load_from_disk(str(place))
    if not isinstance(found, datasets.Dataset):
        raise DataError("the cache holds no rows", where=str(place), todo="delete it")
    return found


def _stream(config: HubConfig) -> Iterator[dict[str, Any]]:
    try:
        stream = datasets.load_dataset(
            config.path,
            name=config.subset or None,
            split=config.split,
            revision=config.revision or None,
            streaming=True,
        )
        _refuse_guessed_times(stream, config)
        yield from _with_images_encoded(stream)
    except _ERRORS as error:
        raise _unreadable(config, error) from error


def _key(config: HubConfig) -> str:
    named = (config.path, config.subset, config.split, config.revision, config.limit)
    return hashlib.blake2b(repr(named).encode(), digest_size=16).hexdigest()


def _with_images_encoded(found: Any) -> Any:
    """Returns the rows with images as they lie in the file, which nothing need decode here."""
    for name, feature in (found.features or {}).items():
        if isinstance(feature, datasets.Image):
            found = found.cast_column(name, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            found = found.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return found


# -- errors ----------------------------------------------------------------------------------------


def _no_split(config: HubConfig, there: list[str], missing: str = "") -> DataError:
    name = missing or config.split
    return DataError(
        f"no split {name!r}{did_you_mean(name, there)}",
        where=config.path,
        why=f"there are: {', '.join(there)}",
        todo="set data.config.split to one of them",
    )


def _unreadable(config: HubConfig, error: BaseException) -> DataError:
    """Returns our error for one of ``datasets``; offline it says what is in the cache."""
    if config.is_local or not datasets.config.HF_HUB_OFFLINE:
        return unreadable(config, error)
    offline = f"in the cache: {', '.join(_cached()) or 'nothing'}"
    return unreadable(config, error, " (HF_HUB_OFFLINE is set)", offline)


def _cached() -> list[str]:
    """Returns the names of the hub's data sets that lie in the cache of ``datasets``."""
    home = Path(datasets.config.HF_DATASETS_CACHE)
    folders = [entry.name for entry in home.iterdir() if entry.is_dir()] if home.is_dir() else []
    return sorted(name.replace("___", "/") for name in folders if "___" in name)[:8]
