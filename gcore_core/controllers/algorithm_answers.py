"""Asks the job's algorithms, and holds their answers against their contracts.

The algorithms are its advantage, filter and balancer.

What one of them raises or gets wrong ends the run with its provider's name and its line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gcore_core.contract.algorithms import (
    ActionAdvantage,
    Advantage,
    Balancer,
    Filter,
    GroupScalars,
    Work,
)
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.scorer import LARGEST_VALUE


def advantage_code(advantage: Advantage | ActionAdvantage, provider: str = "") -> PluginCode:
    """Returns the caller of an advantage's methods, which names its plugin in errors.

    provider: the plugin's provider as ``use`` names it; "" where only the class is known.
    """
    return _code(advantage, "advantage", "advantage", provider, "AdvantageContract")


def filter_code(group_filter: Filter, provider: str = "") -> PluginCode:
    return _code(group_filter, "filter", "filter", provider, "FilterContract")


def balancer_code(balancer: Balancer, provider: str = "") -> PluginCode:
    return _code(balancer, "balance", "balancer", provider, "BalancerContract")


def _code(algorithm: object, section: str, kind: str, provider: str, contract: str) -> PluginCode:
    return PluginCode(
        made=algorithm, kind=kind, provider=provider, where=f"{section}.use", contract=contract
    )


def statistics_of(
    code: PluginCode, advantage: Advantage, groups: Sequence[GroupScalars]
) -> np.ndarray:
    """Returns the advantage's statistics of these groups, float64[K], to be summed over the shards.

    Raises ContractError when they have another shape or are no numbers.
    """
    answer = code.call(advantage.statistics, groups)
    numbers = _numbers(answer)
    if numbers is None or numbers.ndim != 1:
        raise code.broken(
            f"statistics() gave {_shown(answer)}, not float64[K]", advantage.statistics
        )
    return numbers


def advantages_of(
    code: PluginCode,
    advantage: Advantage,
    groups: Sequence[GroupScalars],
    statistics: np.ndarray,
) -> list[np.ndarray]:
    """Returns for each group its records' advantages, float64[records].

    All of them are finite in float32 too, in which trainers compute.

    Raises ContractError when the advantage gives anything else.

    statistics: float64[K], what ``statistics_of`` returned, summed over the shards.
    """
    answer = code.call(advantage.of, groups, statistics)
    if not isinstance(answer, list | tuple) or len(answer) != len(groups):
        count = f"{len(answer)} rows" if isinstance(answer, list | tuple) else _shown(answer)
        raise code.broken(f"of() gave {count} for {len(groups)} groups", advantage.of)
    rows = []
    for group, row in zip(groups, answer, strict=True):
        numbers = _numbers(row)
        records = len(group.rewards)
        if numbers is None or numbers.shape != (records,):
            raise code.broken(
                f"of() gave {_shown(row)} for a group of {records} records", advantage.of
            )
        if not (np.abs(numbers) <= LARGEST_VALUE).all():  # NaN is not either
            raise code.broken(
                f"of() gave {numbers.tolist()} for the rewards {group.rewards.tolist()}",
                advantage.of,
            )
        rows.append(numbers)
    return rows


def keeps(code: PluginCode, group_filter: Filter, group: GroupScalars) -> tuple[bool, str]:
    """Returns whether a group teaches, and a reason when it does not.

    Raises ContractError when the filter gives anything but (bool, str).
    """
    answer = code.call(group_filter.keep, group)
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    if not is_pair or not isinstance(answer[0], bool | np.bool_) or not isinstance(answer[1], str):
        raise code.broken(
            f"keep() gave {answer!r:.60}, not (whether it teaches, the reason)", group_filter.keep
        )
    return bool(answer[0]), answer[1]


def split_of(code: PluginCode, balancer: Balancer, work: Work, ranks: int) -> list[list[int]]:
    """Returns for each rank the indexes of its records; every record is on one rank.

    Raises ContractError when the balancer leaves a record out or names one twice.
    """
    answer = code.call(balancer.split, work, ranks)
    if not _is_partition(answer, len(work), ranks):
        raise code.broken(
            f"did not put each of {len(work)} records on one of {ranks} ranks", balancer.split
        )
    return answer


def costs_of(code: PluginCode, balancer: Balancer, work: Work) -> np.ndarray:
    """Returns float64[records]: how long each record takes, in the balancer's own unit.

    Raises ContractError when a cost is negative or not finite.
    """
    answer = code.call(balancer.costs, work)
    numbers = _numbers(answer)
    if numbers is None or numbers.shape != (len(work),):
        raise code.broken(f"costs() gave {_shown(answer)} for {len(work)} records", balancer.costs)
    if not (np.isfinite(numbers) & (numbers >= 0)).all():
        raise code.broken("costs() gave one that is negative or not finite", balancer.costs)
    return numbers


def _is_partition(answer: Any, records: int, ranks: int) -> bool:
    try:
        return len(answer) == ranks and sorted(i for part in answer for i in part) == list(
            range(records)
        )
    except (TypeError, ValueError):
        return False


def _numbers(answer: Any) -> np.ndarray | None:
    """Converts an answer to float64; returns None for what is no array of numbers."""
    try:
        return np.asarray(answer, np.float64)
    except (TypeError, ValueError):
        return None


def _shown(answer: Any) -> str:
    shape = getattr(answer, "shape", None)
    kind = type(answer).__name__
    if shape is not None:
        return f"an array of shape {tuple(shape)}"
    return f"a {kind} of {len(answer)}" if isinstance(answer, list | tuple) else f"a {kind}"
