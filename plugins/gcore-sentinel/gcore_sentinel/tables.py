"""Finds the table of healthy gaps of a pair and a model, and writes new ones.

A table is JSON: the pair, facts of the model, quantiles and shares, and how it was made. Gaps
depend on the model (its depth, width and vocabulary), so ``auto`` takes a shipped table only for
the very model that it was made on, told by its ``config.json``.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.sentinel import Pair
from gcore_sentinel.evidence import BINS, STREAMS, Table

#: Keys of a model's config.json by which a table knows its model.
MODEL_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """Holds what a file says.

    pair: whose log-probs were compared.
    model: those of MODEL_KEYS that the model's config.json has.
    quantiles: BINS rows of the .9 and the .99 quantile, in nats.
    worst_shares: of healthy actions above them, one for each of STREAMS; the largest over WINDOW
        steps of a held-out run.
    worst_slope: largest slope of healthy gaps against log-prob + entropy over WINDOW steps of a
        held-out run; 0: not known.
    actions, runs: how much it was made from.
    made: how, for a person.
    """

    pair: Pair
    model: dict[str, Any]
    quantiles: list[list[float]]
    worst_shares: list[float]
    actions: int
    runs: int
    made: str = ""
    worst_slope: float = 0.0

    def table(self) -> Table:
        return Table(
            quantiles=np.array(self.quantiles),
            worst_shares=np.array(self.worst_shares),
            worst_slope=self.worst_slope,
        )


def read(content: bytes, where: str) -> TableFile:
    """Reads a table. Raises DataError, naming ``where``, when it is none."""
    try:
        file = msgspec.json.decode(content, type=TableFile)
    except msgspec.MsgspecError as error:
        raise DataError(
            f"this is no table of gaps: {error}",
            where=where,
            todo="make one: g-core sentinel calibrate",
        ) from error
    shape = np.shape(file.quantiles) if len({len(row) for row in file.quantiles}) == 1 else ()
    if shape != (BINS, 2) or len(file.worst_shares) != len(STREAMS):
        raise DataError(
            f"the table has quantiles {shape} and {len(file.worst_shares)} shares, not "
            f"{(BINS, 2)} and {len(STREAMS)}",
            where=where,
            todo="make it anew: g-core sentinel calibrate",
        )
    values = np.r_[np.ravel(file.quantiles), file.worst_shares, file.worst_slope]
    if not (np.isfinite(values) & (values >= 0)).all() or max(file.worst_shares) >= 1:
        raise DataError("the table has a value that is no quantile or share", where=where)
    return file


def find(choice: str, pair: Pair, model: Mapping[str, Any]) -> TableFile | None:
    """Returns the table for a pair and a model; None where there is none.

    choice: ``sentinel.config.table``.
    model: the policy's ``model:`` mapping.
    Raises ConfigError for a file that cannot be read or is of another pair.
    """
    if not choice:
        return None
    if choice != "auto":
        return _named(Path(choice).expanduser(), pair)
    facts = model_facts(model)
    files = (read(item.read_bytes(), item.name) for item in _shipped())
    return next((file for file in files if file.pair == pair and file.model == facts), None)


def _shipped() -> list[Any]:
    folder = importlib.resources.files("gcore_sentinel") / "tables"
    items = [item for item in folder.iterdir() if item.name.endswith(".json")]
    return sorted(items, key=lambda item: item.name)


def _named(path: Path, pair: Pair) -> TableFile:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}.", where="sentinel.config.table"
        ) from error
    file = read(content, str(path))
    if file.pair != pair:
        raise ConfigError(
            f"{path} is of {shown(file.pair)}, this run is of {shown(pair)}.",
            where="sentinel.config.table",
            todo="make a table from runs like this one: g-core sentinel calibrate",
        )
    return file


def shown(pair: Pair) -> str:
    """Returns a pair as a person reads it."""
    generator = f"{pair.generator} in {pair.generator_precision or 'an unknown dtype'}"
    return f"{generator} with {pair.trainer} in {pair.trainer_precision or 'an unknown dtype'}"


def model_facts(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of MODEL_KEYS that the model's config.json has; empty when it has no file."""
    file = Path(str(model.get("path", ""))) / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}
    return {key: config[key] for key in MODEL_KEYS if key in config}
