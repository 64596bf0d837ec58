"""The plugin ``data``: prompts from data sets of the Hugging Face hub and from Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.rows import datasets_of, problem_of
from gcore_data.config import HubConfig, ParquetConfig


@hookimpl
def gcore_datasets() -> Iterable[p.DatasetProvider]:
    yield p.DatasetProvider(
        name="hub",
        summary="a data set of the Hugging Face hub by its name, or its formats in local files",
        factory="gcore_data.hub:Hub",
        config=HubConfig,
        twin="gcore_data.twins:twin_of_hub",
        needs=("datasets>=4",),
    )
    yield p.DatasetProvider(
        name="parquet",
        summary="Parquet files, or what save_to_disk of Hugging Face datasets wrote",
        factory="gcore_data.parquet:Parquet",
        config=ParquetConfig,
        needs=("pyarrow>=18",),
    )


@hookimpl
def gcore_check_files(plan: Mapping[str, Any]) -> Iterable[str]:
    """Yields a problem for each data set that cannot be opened.

    One of the hub is opened where HF_HUB_OFFLINE is set: its rows are in the cache or nowhere.
    Otherwise a run downloads it first.
    """
    import msgspec

    for where, config in datasets_of(plan, "data/parquet"):
        yield from filter(None, [problem_of(where, partial(_open_parquet, config))])
    for where, config in datasets_of(plan, "data/hub"):
        settings = msgspec.convert(config, HubConfig)
        if not settings.downloads():
            yield from filter(None, [problem_of(where, partial(_open_hub, settings))])


def _open_parquet(config: Mapping[str, Any]) -> None:
    import msgspec

    from gcore_data.parquet import Parquet

    Parquet(msgspec.convert(config, ParquetConfig))


def _open_hub(config: HubConfig) -> None:
    from gcore_data.hub import Hub

    Hub(config)
