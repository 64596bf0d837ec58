"""Has answers grow in steps, and continues those whose beginnings are worth most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import Prompt
from gcore_core.contract.sampling import Draft, DrawnSoFar
from gcore_tree.config import TreeConfig


class TreeSearch:
    """Draws a group as a tree: beam search over steps, by the rewards of beginnings.

    Each wave draws one step. A record is a path of the tree: the actions of its draft, which are
    masked, and those of its own step, which the policy has drawn. The best beginnings of a wave are
    continued in the next one, and the last wave draws to the end of the answers.

    Source: Yao et al., "Tree of Thoughts", arXiv:2305.10601, Algorithm 2 (breadth-first). There
    nothing is trained. Here each record is compared with those that continue the same beginning, as
    in Kazemnejad et al., "VinePPO", arXiv:2410.01679, where advantages are those of steps.
    """

    def __init__(self, config: TreeConfig) -> None:
        self._config = config
        self._wave = config.beams * config.width
        self._first = config.first or self._wave

    def waves(self, group_size: int) -> Sequence[int]:
        """Returns the size of each wave: first, and then beams * width.

        Raises ConfigError when these are not the records of a group.
        """
        config = self._config
        further = config.steps - 1
        records = self._first + further * self._wave
        if group_size != records:
            raise ConfigError(
                f"a tree has {records} records, and a group has {group_size}",
                where="sampling.config",
                why=f"{self._first} beginnings, and then {further} x {config.beams} beams x "
                f"{config.width} continuations, are {records}",
                todo=f"set advantage.config.group_size to {records}, or change first, steps, beams "
                "or width",
            )
        return [self._first] + [self._wave] * further

    def drafts(self, group: DrawnSoFar, count: int) -> Sequence[int]:
        """Returns the beginning that each record of the next wave continues.

        Kept are the best ``beams`` open records of the latest wave that has any; the answers of a
        wave may all have ended. Records of the wave are shared out to them in turn. Where no
        record at all is open, answers are drawn anew. Of equal rewards the first record is better.
        """
        open_records = self._open(group)
        if not len(open_records):
            return [-1] * count
        values = self._values(group)[open_records]
        order = np.argsort(-values, kind="stable")[: self._config.beams]
        kept = open_records[order].tolist()
        return [kept[place % len(kept)] for place in range(count)]

    def prompt(self, prompt: Prompt, draft: Draft) -> Prompt:
        """Returns the row's own prompt: answers are continued, not asked for again."""
        return prompt

    def piece(self, sample: int) -> tuple[int, str]:
        """Returns where a step ends; the last one ends with its answer."""
        if self._wave_of(np.array([sample]))[0] >= self._config.steps - 1:
            return 0, ""
        return self._config.actions, self._config.end

    def _open(self, group: DrawnSoFar) -> np.ndarray:
        """Returns the numbers of the open records of the latest wave that has any, int64[n]."""
        if group.open is None:
            return np.zeros(0, np.int64)
        numbers = np.flatnonzero(group.open)
        if not len(numbers):
            return numbers
        waves = self._wave_of(numbers)
        return np.asarray(numbers[waves == waves[-1]])

    def _wave_of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the wave that draws each of the samples, int64[n]."""
        # Shifted so that the first wave, whatever its size, lies below the size of the others.
        return np.asarray(np.maximum(samples - self._first + self._wave, 0) // self._wave)

    def _values(self, group: DrawnSoFar) -> np.ndarray:
        """Returns what each record is worth, float64[N]; -inf where the reward skipped it."""
        if not self._config.reward:
            return group.rewards
        return np.asarray(np.nan_to_num(group.named[self._config.reward], nan=-np.inf))
