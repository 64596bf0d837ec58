"""Defines what the core calls on a sampling program, which draws, looks at rewards and draws again.

A group is drawn in waves. When a wave is drawn and scored, the program names for each record of the
next wave the earlier one that it is made from, its draft. The generator that draws the record has
the program make its prompt of the row and the draft. So a refined record is sampled under another
prompt than its row's; it trains under that prompt, which stands in its columns, and its log-probs
are those under that prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from gcore_core.contract.records import Prompt


@dataclass(frozen=True, kw_only=True)
class DrawnSoFar:
    """Holds the N records of a group that are drawn and scored, in numbers.

    rewards: float64[N], the weighted sum of the named rewards, as a filter sees it.
    named: reward -> float64[N], each by itself; NaN for a record that does not have it.
    drafts: int64[N], the number of the record that each was made from; -1 for none.
    """

    rewards: np.ndarray
    named: Mapping[str, np.ndarray] = field(default_factory=dict)
    drafts: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Holds an answer that another one is made from.

    text: the completion, without special tokens.
    reward: the weighted sum of its rewards.
    rewards: reward -> value, of those that it has.
    critique: what the first reward, in the job's order, said of it besides its value
        (``Score.reason``), at most 128 bytes in UTF-8; "" where none said anything.
    """

    text: str
    reward: float
    rewards: Mapping[str, float]
    critique: str = ""


@runtime_checkable
class SamplingProgram(Protocol):
    """Says how the records of a group are drawn. It is pure: the same questions, the same answers.

    One is made in each controller, which asks for ``waves`` and ``drafts``, and one in each of the
    policy's generators, which asks for ``prompt``.
    """

    def waves(self, group_size: int) -> Sequence[int]:
        """Returns how many records each wave draws: positive numbers that add up to group_size.

        Records of the first wave answer the row's own prompt.
        """

    def drafts(self, group: DrawnSoFar, count: int) -> Sequence[int]:
        """Returns for each of the next wave's ``count`` records the record that it is made from.

        That is the number of a record of ``group``, or -1 for an answer to the row's own prompt.
        """

    def prompt(self, prompt: Prompt, draft: Draft) -> Prompt:
        """Returns the prompt of a record that is made from ``draft``.

        prompt: the row, a copy for this draft alone. The result has its ``row`` and its ``images``.
        """
