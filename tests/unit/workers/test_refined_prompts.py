"""Each prompt that a sampling program makes of a draft begins with the row of the dataset."""

from __future__ import annotations

from typing import Any, cast

from gcore_core.contract.records import Prompt
from gcore_core.contract.sampling import Draft
from gcore_core.workers.generator import RefinedPrompts


class Appends:
    """A sampling program that adds a turn to the very list that it is given."""

    def prompt(self, prompt: Prompt, draft: Draft) -> Prompt:
        assert prompt.messages is not None
        prompt.messages.append({"role": "assistant", "content": draft.text})
        return prompt


def test_what_a_sampling_program_changes_of_a_row_neither_the_row_nor_another_prompt_shows() -> (
    None
):
    row = Prompt(row=0, messages=[{"role": "user", "content": "?"}])
    drafts = {s: Draft(text=f"{s}", reward=0.0, rewards={}, critique="") for s in (1, 2)}
    made = RefinedPrompts(cast(Any, None), cast(Any, Appends())).of(row, drafts)
    assert [turn["content"] for turn in row.messages or ()] == ["?"]
    assert [[t["content"] for t in made[s].messages or ()] for s in (1, 2)] == [
        ["?", "1"],
        ["?", "2"],
    ]
