"""What ``g-core conformance data`` runs: contracts of providers that need settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gcore_testing import DatasetContract


class TestParquet(DatasetContract):
    provider = "data/parquet"

    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Any:
        file = tmp_path / "rows.parquet"
        rows = pa.table(
            {"prompt": [f"{i}+1=" for i in range(20)], "answer": [str(i + 1) for i in range(20)]}
        )
        pq.write_table(rows, file, row_group_size=7)
        return self.build(path=str(file))


class TestHub(DatasetContract):
    provider = "data/hub"

    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Any:
        file = tmp_path / "rows.jsonl"
        rows = [
            {"question": f"{i}+1=", "answer": f"{i} and 1 are {i + 1}.\n#### {i + 1}"}
            for i in range(20)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return self.build(
            path=str(file), columns={"prompt": "question"}, extract={"answer": "gsm8k"}
        )
