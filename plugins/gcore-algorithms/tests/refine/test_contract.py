"""The plugin holds the contracts of the kit, and its program does what its page says."""

from __future__ import annotations

import numpy as np
import pytest
from gcore_algorithms.refine.config import CritiqueConfig
from gcore_algorithms.refine.critique import Critique
from gcore_testing.conformance import contracts_of

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import Prompt
from gcore_core.contract.sampling import Draft, DrawnSoFar

globals().update(contracts_of("refine"))

REWARDS = np.array([0.0, 1.0, 0.5, 1.0])


def drawn(rewards: np.ndarray) -> DrawnSoFar:
    return DrawnSoFar(rewards=rewards, drafts=np.full(len(rewards), -1))


@pytest.mark.parametrize(
    ("draft", "expected"),
    [("best", [1, 1, 1, 1, 1]), ("worst", [0, 0, 0, 0, 0]), ("each", [1, 3, 2, 0, 1])],
)
def test_drafts_are_chosen_by_reward_and_of_equal_ones_the_first(
    draft: str, expected: list[int]
) -> None:
    program = Critique(CritiqueConfig(draft=draft))
    assert list(program.drafts(drawn(REWARDS), 5)) == expected


def test_the_prompt_has_row_answer_and_what_was_said_of_it() -> None:
    program = Critique(CritiqueConfig(template="{prompt}|{answer}|{critique}|{reward}|{{}}"))
    row = Prompt(row=7, text="2+2", fields={"answer": "4"})
    said = Draft(text="{5}", reward=0.25, rewards={}, critique="too much")
    assert program.prompt(row, said).text == "2+2|{5}|too much|0.25|{}"
    silent = Draft(text="5", reward=0.25, rewards={})
    assert program.prompt(row, silent).text == "2+2|5|That answer was worth 0.25.|0.25|{}"
    assert program.prompt(row, said).fields == {"answer": "4"}


def test_of_turns_the_draft_is_the_assistants_and_the_critique_the_users() -> None:
    program = Critique(CritiqueConfig(turn="{critique} Again."))
    row = Prompt(row=7, messages=[{"role": "user", "content": "2+2"}])
    made = program.prompt(row, Draft(text="5", reward=0.0, rewards={}, critique="too much."))
    assert made.messages == [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "too much. Again."},
    ]
    assert len(row.messages or []) == 1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"first": 1}, "1 is less than 2"),
        ({"template": "{prompt} {text}"}, "nothing is known of {text}"),
        ({"template": "{answer.__class__}"}, "nothing is known of {answer.__class__}"),
        ({"turn": "{answer}"}, "nothing is known of {answer}"),
        ({"critique": "{"}, "it cannot be read"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CritiqueConfig(**fields)
    assert problem in str(caught.value)


def test_a_group_too_small_for_two_waves_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave less than 2"):
        Critique(CritiqueConfig(first=7)).waves(8)
