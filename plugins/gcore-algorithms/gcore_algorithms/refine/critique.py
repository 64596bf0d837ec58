"""Has the policy answer again: it is shown an earlier answer of its own and a critique of that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from gcore_algorithms.refine.config import CritiqueConfig
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import Prompt
from gcore_core.contract.sampling import Draft, DrawnSoFar


class Critique:
    """Draws a group in two waves.

    Records of the first wave answer the row's prompt. Each record of the second wave gets a prompt
    with an answer of the first wave, its draft, and a critique of that answer. The critique is what
    a reward said beside its value. Where no reward said anything, it is the reward itself. Records
    of both waves are trained on, each under the prompt that it was drawn from.

    Source: Madaan et al., "Self-Refine", arXiv:2303.17651. There the model writes the critique.
    """

    def __init__(self, config: CritiqueConfig) -> None:
        self._config = config

    def waves(self, group_size: int) -> Sequence[int]:
        """Returns the numbers of records of both waves.

        Raises ConfigError when fewer than two are left for the second wave.
        """
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
        """Returns the draft of each record of the second wave, as ``config.draft`` chooses it.

        Of equal rewards the first record counts as the better one.
        """
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
