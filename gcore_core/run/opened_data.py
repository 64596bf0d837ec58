"""Opens a job's datasets to check them, and reads some rows of each.

What cannot be opened or read is a problem of the job, whichever plugin the dataset is of. Plugins
get the datasets for checks of their own; a row that several of them read is read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from gcore_core.config.plan import Plan
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import GcoreError, PluginError
from gcore_core.contract.factories import build
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import spread
from gcore_core.contract.traits import traits_of

#: Where a job names datasets, and what their rows are called.
DATASETS = {"data": "train", "evaluation.data": "evaluation"}
_ROWS_READ = 2_000


def open_data(
    plan: Plan, opened: Mapping[str, Dataset], closing: ExitStack
) -> tuple[dict[str, Dataset], list[str]]:
    """Returns config path -> dataset, of those that can be read, and the problems of the others.

    One whose settings say that opening it downloads is left out. Up to 2,000 rows of each are read,
    spread evenly.

    opened: datasets that are opened already.
    closing: closes those that are opened here.
    """
    datasets: dict[str, Dataset] = {}
    problems = []
    for path in DATASETS:
        if path not in plan.provided:
            continue
        if path not in opened and traits_of(plan.objects[path]).downloads:
            continue
        row = None
        try:
            dataset = opened.get(path)
            if dataset is None:
                dataset = build(plan.factory(path))
                closing.callback(getattr(dataset, "close", _nothing))
            rows = _ReadOnce(dataset)
            for row in spread(len(rows), _ROWS_READ):
                rows[row]
            datasets[path] = rows
        except Exception as error:  # isolation point: a plugin's code
            problems.append(_problem(plan, path, row, error))
    return datasets, problems


def _problem(plan: Plan, path: str, row: int | None, error: Exception) -> str:
    """Returns what is wrong with a dataset, as a sentence that begins with the config path."""
    item = plan.provided[path]
    name = f" [plugin {item.plugin}]"
    if isinstance(error, PluginError):
        return f"{path}.use: {error.sentence()}.{name}"
    if isinstance(error, GcoreError):
        key = "path" if "path" in plan.at(f"{path}.config") else ""
        where = ".".join(filter(None, [path, "config", key]))
        # Advice of errors names the keys of ``data``, wherever the dataset stands.
        return f"{where}: {error.sentence().replace('data.config.', f'{path}.config.')}.{name}"
    what = "opening it" if row is None else f"reading row {row}"
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{path}.use: {item.reference}: {what} raised {cause}{name}"


def _nothing() -> None:
    """Closes a dataset that needs no closing."""


class _ReadOnce:
    """A dataset whose rows are kept once they were read."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._rows: dict[int, Prompt] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Prompt:
        if row not in self._rows:
            self._rows[row] = self._dataset[row]
        return self._rows[row]
