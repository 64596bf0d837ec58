"""Opens data sets for the plugin ``data/hub``.

The library ``datasets``, which takes most of a second to import, is left alone where it is not
needed: for one local file of JSON or CSV.
"""

from __future__ import annotations

from pathlib import Path

from gcore_core.contract.errors import DataError
from gcore_data.config import HubConfig
from gcore_data.exact_files import Rows, exact_file


def open_rows(config: HubConfig) -> Rows:
    """Returns the rows that the settings mean, all of them in the same order every time.

    Images stay encoded. Raises DataError for what is not there; it says what is.
    """
    found = _one_file(config)
    if found is None:
        from gcore_data.with_datasets import rows_of

        found = rows_of(config)
    if not len(found):
        raise DataError("has no rows", where=where_of(config))
    return found


def where_of(config: HubConfig) -> str:
    """Returns what errors call the data set."""
    parts = [config.path, config.subset, config.split]
    return ", ".join(part for part in parts if part)


def unreadable(
    config: HubConfig,
    error: BaseException,
    more: str = "",
    todo: str = "correct data.config.path, subset or split",
) -> DataError:
    """Returns our error for another one, whose first line says what there is.

    more: is said behind that line.
    """
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    what = "the data set cannot be opened"
    return DataError(what, where=where_of(config), why=f"{first}{more}"[:300], todo=todo)


def _one_file(config: HubConfig) -> Rows | None:
    """Returns the rows of a local file of JSON or CSV; None where the settings mean another."""
    if not config.is_local or config.subset or config.revision or config.streaming:
        return None
    try:
        return exact_file(Path(config.path), config.split, config.limit)
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise unreadable(config, error) from error
