"""Computes advantages of level "action" on the ranks of a trainer, of the records that each has.

Every role that trains does it for itself: a policy for its advantages, a critic for its returns.
Both come from the same columns in float64, so they are the same numbers, and no process sends any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from gcore_core.contract.algorithms import ActionAdvantage, ActionScalars
from gcore_core.contract.errors import ContractError
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.trainer import TrainRecord
from gcore_language.ranks import Ranks, Sums, Terms


@runtime_checkable
class ComparesRecords(Protocol):
    """Lets an advantage of level "action" compare records, such as those of one prompt.

    A rank has only some of them. Of such an advantage ``compared`` is called in place of
    ``per_action``.
    """

    def terms(self, record: TrainRecord, reward: float) -> Terms:
        """Returns name -> (value, weight) pairs: what other records need of this one.

        They are added up by name over all records of the step, on all ranks.
        """

    def compared(
        self, record: TrainRecord, reward: float, sums: Sums
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (advantages, returns), float64[A] each, 0 where ``action_mask`` is 0.

        sums: name -> (sum of values, sum of weights), of all names of all records.
        """


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
    compared = _compared(code, advantage, records, rewards, ranks)
    answers = [
        _checked(code, advantage, answer, mask)
        for answer, mask in zip(compared, masks, strict=True)
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


def _compared(
    code: PluginCode,
    advantage: ActionAdvantage,
    records: Sequence[TrainRecord],
    rewards: np.ndarray,
    ranks: Ranks,
) -> list[object]:
    """Returns what the advantage says of each record: by itself, or compared with others."""
    pairs = list(zip(records, map(float, rewards), strict=True))
    if not isinstance(advantage, ComparesRecords):
        return [_alone(code, advantage, record, reward) for record, reward in pairs]
    terms: Terms = {}
    for record, reward in pairs:
        for name, own in code.call(advantage.terms, record, reward).items():
            terms.setdefault(name, []).extend(own)
    sums = ranks.add_up(terms)
    return [code.call(advantage.compared, record, reward, sums) for record, reward in pairs]


def _alone(
    code: PluginCode, advantage: ActionAdvantage, record: TrainRecord, reward: float
) -> object:
    """Returns what the advantage says of one record by itself."""
    missing = sorted(advantage.requires - record.columns.keys())
    if missing:
        raise ContractError(
            f"a record lacks {', '.join(missing)}, which the advantage requires",
            where=f"ordinal {record.ordinal}, sample {record.sample}",
        )
    columns = {
        name: np.asarray(record.columns[name], np.float64) for name in {*advantage.requires, "logp"}
    }
    mask = record.columns["action_mask"] != 0
    scalars = ActionScalars(reward=reward, mask=mask, truncated=record.truncated, columns=columns)
    return code.call(advantage.per_action, scalars)


def _checked(
    code: PluginCode, advantage: ActionAdvantage, answer: object, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (advantages, returns) of one record, float64[A] each.

    answer: what the advantage gave.
    mask: bool[A], of the record's trained actions.
    """
    compares = isinstance(advantage, ComparesRecords)
    name = "compared" if compares else "per_action"
    called = getattr(advantage, name)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise code.broken(f"{name}() gave no (advantages, returns)", called)
    numbers = [np.asarray(part, np.float64) for part in answer]
    for part in numbers:
        if part.shape != mask.shape or not np.isfinite(part).all():
            raise code.broken(
                f"{name}() gave {part.tolist()!r:.80} for a record of {mask.size} actions",
                called,
            )
    return numbers[0], numbers[1]
