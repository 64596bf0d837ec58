"""Has verifiers tried on rows of the job, before it runs: see ``gcore_rewards.looks``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from gcore_language.json_values import json_value

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.looking import Look
from gcore_core.contract.rows import is_meant, spread

#: Verifier -> the key of its settings that names the field which it reads, and how many rows of a
#: dataset it is tried on.
TRIED = {
    "rewards/exact-match": ("answer", 1000),
    "rewards/numeric": ("answer", 1000),
    "rewards/math": ("answer", 50),
    "rewards/code": ("tests", 20),
}
#: Verifiers that read a decimal of a row.
_READ_DECIMALS = ("rewards/numeric", "rewards/math")


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
            {"dataset": where, **row}
            for where, dataset in datasets.items()
            for row in _rows(dataset, reward.get("when") or {}, field, most, use in _READ_DECIMALS)
        ]
        if rows:
            arguments = {"where": f"rewards.{name}", "use": use, "config": config, "rows": rows}
            yield Look(
                where=f"rewards.{name}",
                function="gcore_rewards.looks:problems",
                arguments=arguments,
            )


def _rows(
    dataset: Dataset, when: Mapping[str, Any], field: str, most: int, reads_decimals: bool
) -> Iterator[dict[str, Any]]:
    """Yields number and fields of rows that a reward is for, spread evenly over a dataset.

    Of the fields there are all names, for errors to tell, and the value of one alone. Where JSON
    has no word for the value, the row has ``fault``, which says so. Rows that cannot be read are
    left out: the dataset's own check tells of them.
    """
    for row in spread(len(dataset), most):
        try:
            fields = dataset[row].fields
        except GcoreError:
            continue
        if is_meant(fields, when):
            value = fields.get(field)
            # Verifiers that read numbers read a decimal as its text.
            value = str(value) if isinstance(value, Decimal) and reads_decimals else value
            fault = _fault(field, value)
            shown = {name: value if name == field and not fault else "" for name in fields}
            yield {"row": row, "fields": shown, "fault": fault}


def _fault(field: str, value: Any) -> str:
    """Says that JSON has no word for the value of a field; "": it has."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        try:
            json_value({field: value})
        except (ValueError, RecursionError) as error:
            return str(error)
        return f"{field!r} holds a value of type {type(value).__qualname__}"
    return ""
