"""Reads the stores of trackers back, each as that tracker's own readers see it.

Every function returns step -> name -> value of the rows of one run; of a step that came twice, the
later row counts.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Rows = dict[int, dict[str, float]]

# -- W&B -------------------------------------------------------------------------------------------

#: The file begins with ``:W&B``, a magic number and a version, as W&B writes it.
_HEAD_BYTES = 7
#: Records lie in LevelDB's log format: blocks, and parts with checksum, length and type.
_BLOCK_BYTES = 32768
_PART = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def wandb_records(file: Path) -> Iterator[Any]:
    """Yields W&B's own messages of an offline run's file, each part checked by its checksum."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    assert content[:4] == b":W&B"
    at = _HEAD_BYTES
    whole = b""
    while at < len(content):
        room = _BLOCK_BYTES - at % _BLOCK_BYTES
        if room < _PART.size:
            at += room
            continue
        checksum, size, kind = _PART.unpack_from(content, at)
        part = content[at + _PART.size : at + _PART.size + size]
        assert checksum == zlib.crc32(part, zlib.crc32(bytes([kind]))), "a damaged part"
        at += _PART.size + size
        whole = part if kind in (_FULL, _FIRST) else whole + part
        if kind in (_FULL, _LAST):
            yield Record.FromString(whole)


def wandb_files(directory: Path) -> list[Path]:
    """Returns the files of the offline runs below a run's directory, the oldest first."""
    files = directory.glob("trackers/wandb/offline-run-*/run-*.wandb")
    return sorted(files, key=lambda file: file.stat().st_ctime_ns)


def wandb_history(files: list[Path]) -> list[dict[str, Any]]:
    """Returns every row of the history, by the names that were logged."""
    rows = []
    for file in files:
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "history":
                row: dict[str, Any] = {}
                for item in record.history.item:
                    *outer, name = list(item.nested_key) or [item.key]
                    place = row
                    for key in outer:
                        place = place.setdefault(key, {})
                    place[name] = json.loads(item.value_json)
                rows.append(row)
    return rows


def wandb_rows(files: list[Path]) -> Rows:
    rows: Rows = {}
    for row in wandb_history(files):
        numbers = {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float | str) and not name.startswith("_")
        }
        step = int(numbers.pop("step"))
        if numbers:
            rows[step] = {**rows.get(step, {}), **numbers}
    return rows


# -- MLflow ----------------------------------------------------------------------------------------


def mlflow_run(uri: str, project: str) -> tuple[Any, Any]:
    """Returns MLflow's client and the only run of an experiment."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(project)
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def mlflow_rows(client: Any, run: Any) -> Rows:
    rows: Rows = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            rows.setdefault(metric.step, {})[name] = metric.value
    return rows


# -- trackio ---------------------------------------------------------------------------------------


def trackio_rows(project: str, name: str) -> tuple[Rows, list[Any]]:
    """Returns the rows of a run, and its tables; ``TRACKIO_DIR`` names the store."""
    from trackio.sqlite_storage import SQLiteStorage

    rows: Rows = {}
    tables = []
    for row in SQLiteStorage.get_logs(project, name):
        step = int(row["step"])
        values = {key: value for key, value in row.items() if key not in ("step", "timestamp")}
        if "samples" in values:
            tables.append(values.pop("samples"))
        numbers = {key: float(value) for key, value in values.items()}
        rows[step] = {**rows.get(step, {}), **numbers}
    return rows, tables


# -- what all must hold ----------------------------------------------------------------------------


def metrics_file_rows(rows: list[Mapping[str, Any]]) -> Rows:
    """Returns what ``metrics.jsonl`` holds in numbers, by the names that trackers have."""
    return {
        row["step"]: {
            **row["metrics"],
            **{f"evaluation/{name}": value for name, value in row["evaluation"].items()},
            "version": float(row["version"]),
        }
        for row in rows
    }


def same(one: Rows, other: Rows) -> bool:
    """Whether two stores hold the same numbers; a NaN is equal to itself."""
    return _by_text(one) == _by_text(other)


def _by_text(rows: Rows) -> dict[int, dict[str, str]]:
    return {
        step: {
            name: "nan" if math.isnan(value) else repr(float(value)) for name, value in row.items()
        }
        for step, row in rows.items()
    }
