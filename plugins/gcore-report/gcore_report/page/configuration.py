"""Makes the panel of the configuration: every key, its value in each run, and who set it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gcore_core.contract import run_files
from gcore_report.page.runs import Run

UNKNOWN = "not recorded"


def configuration(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the configuration of all runs side by side.

    rows: [key, values, origins], a value and an origin for each run; None: it has no such key.
    plugins: [plugin, versions]; ran_on: [fact, values], of the last start of each run.
    """
    flats = [dict(_flat(run.config)) for run in runs]
    origins = [run_files.read_origins(run.directory) for run in runs]
    keys = list(dict.fromkeys(key for flat in flats for key in flat))
    rows = [
        [
            key,
            [flat.get(key) for flat in flats],
            [origin.get(key, UNKNOWN) if origin else UNKNOWN for origin in origins],
        ]
        for key in keys
    ]
    versions = [_versions(run) for run in runs]
    plugins = sorted({name for each in versions for name in each})
    environments = [_environment(run) for run in runs]
    facts = list(dict.fromkeys(name for each in environments for name in each))
    return {
        "rows": rows,
        "plugins": [[name, [each.get(name) for each in versions]] for name in plugins],
        "ran_on": [[name, [each.get(name) for each in environments]] for name in facts],
    }


def _versions(run: Run) -> dict[str, str]:
    return {
        name: f"{facts.get('distribution', '')} {facts.get('version', '')}".strip()
        for name, facts in run_files.read_lock(run.directory).items()
    }


def _environment(run: Run) -> dict[str, str]:
    last = run.rows[-1]["step"] if run.rows else 0
    environment = run_files.read_environment(run.directory, last)
    if environment is None:
        return {}
    return dict(environment.machine) | dict(environment.versions)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields each leaf below a value: its dotted key, and the value as JSON."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, ensure_ascii=False, default=str)
