"""Computes advantages of level "action" on the ranks of a trainer, of the records that each has.

Every role that trains does it for itself: a policy for its advantages, a critic for its returns.
Both come from the same columns in float64, so they are the same numbers, and no process sends any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gcore_core.contract.algorithms import ActionAdvantage, ActionScalars
from gcore_core.contract.errors import ContractError
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.trainer import TrainRecord
from gcore_language.ranks import Ranks


@dataclass(frozen=True)
class PerAction:
    """Numbers of some records, in their order.

    advantages: float64[A] of each, as the policy gets them; 0 where ``action_mask`` is 0.
    returns: float64[A] of each, what the values should have been; 0 there too.
    """

    advantages: list[np.ndarray]
    returns: list[np.ndarray]


def advantage_code(advantage: ActionAdvantage) -> PluginCode:
    """Returns the caller of an advantage's methods, which names its plugin in errors."""
    return PluginCode(
        made=advantage,
        kind="advantage",
        where="advantage.use",
        contract="ActionAdvantageContract",
    )


def per_action(
    advantage: ActionAdvantage, records: Sequence[TrainRecord], rewards: np.ndarray, ranks: Ranks
) -> PerAction:
    """Returns the advantages and returns of this rank's records; all ranks call it.

    What records need of each other is summed over all ranks and rounded once, so that it has the
    same bits however records are dealt to ranks.

    rewards: float64[records], the weighted reward of each.

    Raises ContractError where the advantage breaks its contract, or a record lacks a column.
    """
    code = advantage_code(advantage)
    masks = [record.columns["action_mask"] != 0 for record in records]
    answers = [
        _of_record(code, advantage, record, float(reward), mask)
        for record, reward, mask in zip(records, rewards, masks, strict=True)
    ]
    trained = [own[mask] for (own, _), mask in zip(answers, masks, strict=True)]
    terms = [np.asarray(code.call(advantage.statistics, own), np.float64) for own in trained]
    sums = ranks.add_up({str(k): [(float(row[k]), 0.0) for row in terms] for k in _places(terms)})
    statistics = np.array([sums[str(k)][0] for k in range(len(sums))], np.float64)
    advantages = []
    for own, mask in zip(trained, masks, strict=True):
        scaled = np.zeros(len(mask))
        scaled[mask] = code.call(advantage.of, own, statistics)
        advantages.append(scaled)
    return PerAction(advantages, [returns for _, returns in answers])


def _places(terms: Sequence[np.ndarray]) -> range:
    return range(len(terms[0]) if terms else 0)


def _of_record(
    code: PluginCode,
    advantage: ActionAdvantage,
    record: TrainRecord,
    reward: float,
    mask: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (advantages, returns) of one record, float64[A] each."""
    missing = sorted(advantage.requires - record.columns.keys())
    if missing:
        raise ContractError(
            f"a record lacks {', '.join(missing)}, which the advantage requires",
            where=f"ordinal {record.ordinal}, sample {record.sample}",
        )
    columns = {
        name: np.asarray(record.columns[name], np.float64) for name in {*advantage.requires, "logp"}
    }
    scalars = ActionScalars(reward=reward, mask=mask, truncated=record.truncated, columns=columns)
    answer = code.call(advantage.per_action, scalars)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise code.broken("per_action() gave no (advantages, returns)", advantage.per_action)
    numbers = [np.asarray(part, np.float64) for part in answer]
    for part in numbers:
        if part.shape != mask.shape or not np.isfinite(part).all():
            raise code.broken(
                f"per_action() gave {part.tolist()!r:.80} for a record of {mask.size} actions",
                advantage.per_action,
            )
    return numbers[0], numbers[1]
