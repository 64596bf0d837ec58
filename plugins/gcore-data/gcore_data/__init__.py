"""The plugin ``data``: prompts from data sets of the Hugging Face hub and from Parquet files."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract import providers as p
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
