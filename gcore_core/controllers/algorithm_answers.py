"""Asks advantages, filters and balancers, and holds their answers against their contracts.

What one of them raises or gets wrong ends the run with its provider's name and its line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gcore_core.contract.algorithms import Advantage, Balancer, Filter, GroupScalars, Work
from gcore_core.contract.plugin_code import PluginCode


def advantage_code(advantage: Advantage, provider: str = "") -> PluginCode:
    """What errors say of an advantage. provider: as in ``use``."""
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
    """What the advantage has summed over the shards: float64[K]."""
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
    """A finite number for each record of each group."""
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
        if not np.isfinite(numbers).all():
            raise code.broken(
                f"of() gave {numbers.tolist()} for the rewards {group.rewards.tolist()}",
                advantage.of,
            )
        rows.append(numbers)
    return rows


def keeps(code: PluginCode, group_filter: Filter, group: GroupScalars) -> tuple[bool, str]:
    """Whether a group teaches, and a named reason when it does not."""
    answer = code.call(group_filter.keep, group)
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    if not is_pair or not isinstance(answer[0], bool | np.bool_) or not isinstance(answer[1], str):
        raise code.broken(
            f"keep() gave {answer!r:.60}, not (whether it teaches, the reason)", group_filter.keep
        )
    return bool(answer[0]), answer[1]


def split_of(code: PluginCode, balancer: Balancer, work: Work, ranks: int) -> list[list[int]]:
    """Indexes of the records for each rank, every record once."""
    answer = code.call(balancer.split, work, ranks)
    if not _is_partition(answer, len(work), ranks):
        raise code.broken(
            f"did not put each of {len(work)} records on one of {ranks} ranks", balancer.split
        )
    return answer


def costs_of(code: PluginCode, balancer: Balancer, work: Work) -> np.ndarray:
    """How long each record takes, finite and not negative."""
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
    """As float64, None for what is no array of numbers."""
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
