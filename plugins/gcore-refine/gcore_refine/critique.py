"""Answers once more, with an earlier answer and its critique before its eyes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import Prompt
from gcore_core.contract.sampling import Draft, DrawnSoFar
from gcore_refine.config import CritiqueConfig


class Critique:
    """Best of n, then refinement: two waves, the second one made from answers of the first.

    The critique is the reason that a reward or a judge gave; where none did, the reward itself.

    Sources: Madaan et al., "Self-Refine", arXiv:2303.17651, with the critique of a reward in place
    of the model's own; the records of both waves are trained on, each under its own prompt.
    """

    def __init__(self, config: CritiqueConfig) -> None:
        self._config = config

    def waves(self, group_size: int) -> Sequence[int]:
        """Raises ConfigError when the second wave has no two records."""
        first = self._config.first
        if group_size - first < 2:
            raise ConfigError(
                f"{first} of {group_size} records leave less than 2 to be refined",
                where="sampling.config.first",
                why="refined answers are compared with each other, so one alone teaches nothing",
                todo="set first to less, or advantage.config.group_size to more",
            )
        return [first, group_size - first]

    def drafts(self, group: DrawnSoFar, count: int) -> Sequence[int]:
        """Of equal rewards the first record counts as the better one."""
        order = np.argsort(-group.rewards, kind="stable").tolist()
        if self._config.draft == "best":
            return [order[0]] * count
        if self._config.draft == "worst":
            return [order[-1]] * count
        return [order[place % len(order)] for place in range(count)]

    def prompt(self, prompt: Prompt, draft: Draft) -> Prompt:
        config = self._config
        reward = f"{draft.reward:g}"
        critique = draft.critique or config.critique.format(reward=reward)
        if prompt.messages is None:
            text = config.template.format(
                prompt=prompt.text, answer=draft.text, critique=critique, reward=reward
            )
            return replace(prompt, text=text)
        said = config.turn.format(critique=critique, reward=reward)
        turns = [
            *prompt.messages,
            {"role": "assistant", "content": draft.text},
            {"role": "user", "content": said},
        ]
        return replace(prompt, messages=turns)
