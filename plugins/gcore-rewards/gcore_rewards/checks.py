"""Has verifiers tried on rows of the job, before it runs: see ``gcore_rewards.looks``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.looking import Look
from gcore_core.contract.rows import same_value, spread

#: Verifier -> the key of its settings that names the field which it reads, and how many rows of a
#: dataset it is tried on.
TRIED = {
    "rewards/exact-match": ("answer", 1000),
    "rewards/numeric": ("answer", 1000),
    "rewards/math": ("answer", 50),
    "rewards/code": ("tests", 20),
}


def looks(plan: Mapping[str, Any], here: bool, datasets: Mapping[str, Dataset]) -> Iterator[Look]:
    """Yields a look at each verifier of the job; see ``gcore_check_files``."""
    for name, reward in plan["rewards"].items():
        use = reward["use"]
        # Whether code can be confined is a matter of the machine that runs it.
        if use not in TRIED or (use == "rewards/code" and not here):
            continue
        key, most = TRIED[use]
        config = reward.get("config") or {}
        field = config.get(key, key)
        rows = [
            {"row": row, "dataset": where, "fields": fields}
            for where, dataset in datasets.items()
            for row, fields in _rows(dataset, reward.get("when") or {}, field, most)
        ]
        if rows:
            arguments = {"where": f"rewards.{name}", "use": use, "config": config, "rows": rows}
            yield Look(
                where=f"rewards.{name}",
                function="gcore_rewards.looks:problems",
                arguments=arguments,
            )


def _rows(
    dataset: Dataset, when: Mapping[str, Any], field: str, most: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields number and fields of rows that a reward is for, spread evenly over a dataset.

    Of the fields there are all names, for errors to tell, and the value of one alone. Rows that
    cannot be read, or of which JSON cannot tell the value, are left out: others tell of them.
    """
    for row in spread(len(dataset), most):
        try:
            fields = dataset[row].fields
            json.dumps(fields.get(field))
        except (GcoreError, TypeError, ValueError):
            continue
        if all(_has(fields.get(name), values) for name, values in when.items()):
            yield row, {name: value if name == field else "" for name, value in fields.items()}


def _has(value: Any, wanted: Any) -> bool:
    values = wanted if isinstance(wanted, list) else [wanted]
    return any(same_value(value, one) for one in values)
