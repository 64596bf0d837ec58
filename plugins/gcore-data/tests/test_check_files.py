"""Data that cannot be opened are told before anything starts; nothing is downloaded for it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gcore_data import gcore_check_files
from gcore_data.config import HubConfig, ParquetConfig


def told(use: str, config: Any) -> list[str]:
    node = {"use": use, "config": asdict(config)}
    return list(gcore_check_files({"data": node, "evaluation": {"data": None}}))


def test_a_parquet_file_that_is_missing_or_has_no_prompt_is_told_with_its_columns(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rows.parquet"
    [missing] = told("data/parquet", ParquetConfig(path=str(file)))
    assert missing.startswith(f"data.config.path: {file}: no such file")
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), file)
    [problem] = told("data/parquet", ParquetConfig(path=str(file)))
    assert "row 0: no field 'prompt'; it has: question, answer; set data.config.prompt" in problem
    assert told("data/parquet", ParquetConfig(path=str(file), prompt="question")) == []


def test_a_name_on_the_hub_is_looked_for_only_where_the_hub_may_not_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    assert told("data/hub", HubConfig(path="org/nowhere")) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # it reads its variable once
    [problem] = told("data/hub", HubConfig(path="org/nowhere"))
    assert problem.startswith("data.config.path: org/nowhere") and "in the cache: " in problem
