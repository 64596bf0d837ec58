"""What may be set under ``config:`` of the datasets."""

from __future__ import annotations

from dataclasses import dataclass

from gcore_core.contract.rows import RowsConfig


@dataclass(frozen=True, kw_only=True)
class ParquetConfig(RowsConfig):
    """A Parquet file, a directory of them, or a directory written by ``save_to_disk`` of Hugging
    Face datasets.
    """
