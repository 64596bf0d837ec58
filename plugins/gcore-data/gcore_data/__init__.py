"""The plugin ``data``: prompts from Parquet files and from what Hugging Face datasets save to
disk.
"""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_data.config import ParquetConfig


@hookimpl
def gcore_datasets() -> Iterable[p.DatasetProvider]:
    yield p.DatasetProvider(
        name="parquet",
        summary="Parquet files, or what save_to_disk of Hugging Face datasets wrote",
        factory="gcore_data.parquet:Parquet",
        config=ParquetConfig,
        needs=("pyarrow>=18",),
    )
