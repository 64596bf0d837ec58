"""A run goes on as what it was: what a checkpoint's run and the job must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.config.plan import Plan
from gcore_core.config.yaml_source import flat
from gcore_core.contract.errors import ConfigError
from gcore_core.run.checkpoint_service import CONFIG, Resumed

#: What a resumed run must not change: it would be another run.
_FIXED = ("run.seed", "data", "advantage", "roles.policy.model", "rewards")


def check_same(resumed: Resumed, plan: Plan, rows: int) -> None:
    """Raises ConfigError where the run would go on as another one, saying what differs."""
    saved = msgspec.json.decode((Path(resumed.path) / CONFIG).read_bytes(), type=dict[str, Any])
    before, now = _fixed(saved), _fixed(plan.config)
    wrong = [
        f"{key}: {before.get(key)!r} was saved, {now.get(key)!r} is asked for"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    rows_before = resumed.state.get("ledger", {}).get("rows", rows)
    if rows_before != rows:
        wrong.append(f"data: it had {rows_before} rows, it has {rows}")
    if wrong:
        raise ConfigError(
            "the run cannot go on with another configuration.",
            where=resumed.path,
            why="\n".join(wrong[:3]),
            todo="leave these as they were, or begin a new run from the exported weights",
            differences=wrong,
        )


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat(config).items() if key.startswith(_FIXED)}
