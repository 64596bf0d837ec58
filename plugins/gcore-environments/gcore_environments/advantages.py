"""Advantages of turns, in numpy: what a turn earns from itself on, against others of its group.

An advantage of level "action" is computed on the ranks of a trainer. A group may lie on several of
them, so what records need of each other is added up over the ranks by name
(``gcore_language.action_advantages.ComparesRecords``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gcore_core.contract.algorithms import ActionScalars, is_rounding
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.trainer import TrainRecord
from gcore_core.contract.traits import Traits

#: The column of rewards, float32[A]: a turn's stands at its last action.
TURN_REWARD = "turn_reward"


@dataclass(frozen=True, kw_only=True)
class TurnsConfig:
    """Settings of the advantage of turns."""

    group_size: int = 8
    """Records sampled for each prompt; each is compared with the others."""
    anchors: bool = False
    """Whether a turn is compared with other records' turns that read the same observation, where
    there are any, in place of their whole episodes (GiGPO).
    """
    rest: bool = True
    """Whether what a record's reward has beyond the rewards of its turns, such as a judge's, counts
    as earned after each turn. Set it to false where players earn rewards of their own.
    """

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ConfigError(
                f"a group of {self.group_size} has no baseline",
                where="advantage.config.group_size",
                why="environments/turns compares an episode with the others of its prompt",
                todo="set group_size to 2 or more",
            )

    def traits(self) -> Traits:
        return Traits(requires=frozenset({TURN_REWARD}))


@dataclass(frozen=True)
class _Turns:
    """Holds what the T turns of a record earned.

    begin, end: int64[T], among the actions.
    player: int64[T].
    observation: a short name of what was read before each turn, since the turn before it.
    to_go: float64[T], the return of the turn's player without what that player had earned before.
    returns: player -> return of the whole episode.
    """

    begin: np.ndarray
    end: np.ndarray
    player: np.ndarray
    observation: list[str]
    to_go: np.ndarray
    returns: dict[int, float]


class TurnAdvantage:
    """The advantage of turns: A_t = G_t - b.

    G_t is what the turn's player earns in the episode, less what stands as earned before the turn
    in the sequence that the policy read. b is the mean return of the same player in the group's
    other episodes. So b depends on nothing that this episode did, and the gradient is unbiased at
    every turn. A mean over all turns of one index is not: which episodes get that far is the
    policy's choice, and each of them is a part of its own baseline.

    With ``anchors``, b is the mean G of turns in the group's other episodes that read the same
    observation, where there are any. What was read before that does not count, as in Feng et al.,
    "Group-in-Group Policy Optimization", arXiv:2505.10978, which adds this to the episode's
    advantage; here it replaces it.

    A player that no other episode of the group has gets 0.
    """

    def __init__(self, config: TurnsConfig) -> None:
        self.group_size = config.group_size
        self.requires = config.traits().requires
        self._anchors = config.anchors
        self._rest = config.rest

    def per_action(self, record: ActionScalars) -> tuple[np.ndarray, np.ndarray]:
        """Raises ContractError: one record has no baseline, so ``compared`` is called instead."""
        raise ContractError(
            "a record was to have its advantages by itself",
            where="advantage.use: environments/turns",
            why="without the group's others it has no baseline, and the trainer compares none",
            todo=(
                "take a trainer that computes advantages by gcore_language.action_advantages, such "
                "as torch, megatron or deepspeed, or another advantage"
            ),
        )

    def terms(self, record: TrainRecord, reward: float) -> dict[str, list[tuple[float, float]]]:
        """Returns the returns of each player, and of each turn with ``anchors``, by name."""
        turns = self._turns(record, reward)
        terms = {_name(record, player): [(value, 1.0)] for player, value in turns.returns.items()}
        for name, values in self._by_anchor(record, turns).items():
            terms[name] = [(value, 1.0) for value in values]
        return terms

    def compared(
        self, record: TrainRecord, reward: float, sums: Mapping[str, tuple[float, float]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (advantages, returns) of a record, float64[A] each: A_t and G_t."""
        turns = self._turns(record, reward)
        advantages = np.zeros(len(record.columns["action_mask"]))
        returns = np.zeros_like(advantages)
        anchors = self._by_anchor(record, turns)
        for t, (begin, end) in enumerate(zip(turns.begin, turns.end, strict=True)):
            player = int(turns.player[t])
            to_go = float(turns.to_go[t])
            name = _name(record, player, turns.observation[t])
            baseline = _mean_of_others(sums, name, anchors[name]) if anchors else None
            if baseline is None:
                own = [turns.returns[player]]
                baseline = _mean_of_others(sums, _name(record, player), own)
            returns[begin:end] = to_go
            if baseline is not None and not is_rounding(to_go - baseline, abs(to_go)):
                advantages[begin:end] = to_go - baseline
        masked = record.columns["action_mask"] == 0
        advantages[masked] = 0.0
        returns[masked] = 0.0
        return advantages, returns

    def statistics(self, advantages: np.ndarray) -> np.ndarray:
        """Returns float64[0]: nothing is scaled by the batch."""
        return np.zeros(0)

    def of(self, advantages: np.ndarray, statistics: np.ndarray) -> np.ndarray:
        return advantages

    def _by_anchor(self, record: TrainRecord, turns: _Turns) -> dict[str, list[float]]:
        """Returns the G_t of each observation's turns by name; empty without ``anchors``."""
        values: dict[str, list[float]] = {}
        if self._anchors:
            for t, to_go in enumerate(turns.to_go):
                name = _name(record, int(turns.player[t]), turns.observation[t])
                values.setdefault(name, []).append(float(to_go))
        return values

    def _turns(self, record: TrainRecord, reward: float) -> _Turns:
        """Reads a record's turns.

        What was earned before a turn is looked up on the way that the policy read, from the first
        id of the turn's sequence on. Rewards of other sequences count as earned later: the order
        of turns in different sequences is not known, and to subtract less of the past is unbiased.
        """
        columns = record.columns
        missing = sorted({TURN_REWARD, "turns", "sequences"} - columns.keys())
        if missing:
            raise ContractError(
                f"a record lacks {', '.join(missing)}, which environments/turns reads",
                where=f"ordinal {record.ordinal}, sample {record.sample}",
                why="it was not drawn in an environment",
                todo="choose an environment (environment.use), or another advantage",
            )
        rewards = np.asarray(columns[TURN_REWARD], np.float64)
        begin, end, _, player = np.asarray(columns["turns"], np.int64).reshape(-1, 4).T
        rest = reward - rewards.sum() if self._rest else 0.0
        earned = np.array([rewards[b:e].sum() for b, e in zip(begin, end, strict=True)])
        returns = {int(who): float(earned[player == who].sum() + rest) for who in np.unique(player)}
        by_player = np.zeros((len(returns), len(rewards)))
        place_of = {who: place for place, who in enumerate(returns)}
        for b, e, who in zip(begin, end, player, strict=True):
            by_player[place_of[int(who)], b:e] = rewards[b:e]
        to_go, observation = np.zeros(len(begin)), [""] * len(begin)
        for places, own in _sequences(columns, begin):
            before = _before(places, by_player)
            for t, at in own:
                who = int(player[t])
                to_go[t] = returns[who] - before[place_of[who], at]
                if self._anchors:
                    observation[t] = _digest(columns, places[:at])
        return _Turns(begin, end, player, observation, to_go, returns)


def _name(record: TrainRecord, player: int, observation: str = "") -> str:
    """Names what is summed: of a group's player, or of one observation of that player."""
    return f"{record.ordinal}/{player}/{observation}"


def _mean_of_others(
    sums: Mapping[str, tuple[float, float]], name: str, own: list[float]
) -> float | None:
    """Returns the mean of a sum's values but the own ones; None where there are no others."""
    total, count = sums[name]
    others = round(count) - len(own)
    return (total - sum(own)) / others if others else None


def _sequences(
    columns: Mapping[str, np.ndarray], begin: np.ndarray
) -> list[tuple[np.ndarray, list[tuple[int, int]]]]:
    """Returns of each sequence what it reads, and which turns it has.

    The first is int64[n]: of each of its ids the place among the actions, negative in the prompt,
    which counts backwards from -1. The second has (number of the turn, place of its first id in
    the sequence).
    """
    rows = np.asarray(columns["sequences"], np.int64).reshape(-1, 3)
    ends = np.append(rows[1:, 0], len(columns["action_ids"]))
    # A sequence without ids of its own begins where the next one does, which has the turns.
    owner = np.searchsorted(rows[:, 0], begin, side="right") - 1
    places: list[np.ndarray] = []
    found = []
    for number, ((first, parent, shared), last) in enumerate(zip(rows, ends, strict=True)):
        prompt = np.arange(-len(columns["prompt_ids"]), 0)
        head = places[parent][:shared] if parent >= 0 else prompt[:shared]
        places.append(np.concatenate([head, np.arange(first, last)]))
        turns = np.flatnonzero(owner == number)
        found.append((places[-1], [(int(t), int(begin[t] - first + shared)) for t in turns]))
    return found


def _before(places: np.ndarray, by_player: np.ndarray) -> np.ndarray:
    """Returns what each player has earned before each id of a sequence, float64[players, n + 1].

    by_player: float64[players, A], what each earns at each action.
    """
    earned = np.zeros((len(by_player), len(places)))
    is_action = places >= 0
    earned[:, is_action] = by_player[:, places[is_action]]
    return np.concatenate([np.zeros((len(by_player), 1)), np.cumsum(earned, axis=1)], axis=1)


def _digest(columns: Mapping[str, np.ndarray], before: np.ndarray) -> str:
    """Names the ids that a turn read since the turn before it.

    before: int64[n], places of all ids before the turn, as of ``_sequences``.
    """
    sampled = np.zeros(len(before), bool)
    is_action = before >= 0
    sampled[is_action] = columns["action_mask"][before[is_action]] != 0
    latest = np.flatnonzero(sampled)
    new = before[latest[-1] + 1 :] if len(latest) else before
    ids = np.concatenate([columns["action_ids"], columns["prompt_ids"]]).astype(np.int32)
    return hashlib.blake2b(ids[new].tobytes(), digest_size=8).hexdigest()
