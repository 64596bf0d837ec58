"""The contract of a sampling program.

Waves make up the group, drafts are drawn records, and prompts follow from row and draft alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.records import Prompt
from gcore_core.contract.sampling import Draft, DrawnSoFar, SamplingProgram
from gcore_testing.contracts.advantage import named_rewards_of
from gcore_testing.contracts.arguments import ASKS, snapshot, writable
from gcore_testing.contracts.base import Contract

ROWS = (
    Prompt(row=3, text="How much is 2 + 2?", fields={"answer": "4"}),
    Prompt(row=4, messages=[{"role": "user", "content": "How much is 2 + 3?"}]),
)
DRAFTS = (
    Draft(text="It is 5.", reward=0.0, rewards={"exact": 0.0}, critique="it is one too many"),
    Draft(text="", reward=-1.5, rewards={}),
    Draft(text="4 {so} %s \u00e9", reward=1.0, rewards={"exact": 1.0}),
)


class SamplerContract(Contract):
    """To test a sampling program, override ``provider``, or the fixture ``program``.

    group_sizes: sizes of groups that the program can draw.
    """

    kind: ClassVar[str] = "sampler"
    group_sizes: ClassVar[tuple[int, ...]] = (8, 16)

    @pytest.fixture
    def program(self) -> Any:
        return self.build()

    def test_it_is_a_sampling_program(self, program: Any) -> None:
        assert isinstance(program, SamplingProgram)

    def test_the_waves_make_up_the_group(self, program: Any) -> None:
        for size in self.group_sizes:
            waves = list(program.waves(size))
            assert min(waves) > 0 and sum(waves) == size, waves

    def test_a_draft_is_a_drawn_record(self, program: Any) -> None:
        """Each record of a wave has one, or is drawn from its row's own prompt."""
        for group, count in self._between_waves(program):
            drafts = list(program.drafts(group, count))
            assert len(drafts) == count
            assert all(-1 <= draft < len(group.rewards) for draft in drafts), drafts

    def test_asking_twice_gives_the_same(self, program: Any) -> None:
        """Controllers and generators ask objects of their own, and a lost record is asked again."""
        asked = self._between_waves(program)
        first = [list(program.drafts(group, count)) for group, count in asked]
        prompts = [program.prompt(row, draft) for row in ROWS for draft in DRAFTS]
        for _ in range(ASKS):
            again = [list(program.drafts(group, count)) for group, count in asked[::-1]]
            assert again[::-1] == first
            assert [program.prompt(row, draft) for row in ROWS for draft in DRAFTS] == prompts

    def test_arguments_stay_as_they_are(self, program: Any) -> None:
        """In a run, arrays can be written to."""
        for group, count in self._between_waves(program):
            given = writable(group)
            program.drafts(given, count)
            assert snapshot(given) == snapshot(group), "the group was written to"
        for row in ROWS:
            before = snapshot(row.messages), dict(row.fields)
            for draft in DRAFTS:
                program.prompt(row, draft)
            assert (snapshot(row.messages), dict(row.fields)) == before, "the row was written to"

    def test_a_prompt_is_of_its_row(self, program: Any) -> None:
        """It has the row's number and images, and either a text or turns, as the row has."""
        for row in ROWS:
            for draft in DRAFTS:
                prompt = program.prompt(row, draft)
                assert isinstance(prompt, Prompt)
                assert (prompt.row, prompt.images) == (row.row, row.images)
                assert (prompt.text is None) == (row.text is None)
                assert (prompt.messages is None) == (row.messages is None)

    def _between_waves(self, program: Any) -> list[tuple[DrawnSoFar, int]]:
        """Returns groups with random rewards, each with the size of its next wave."""
        draw = np.random.default_rng(0)
        asked = []
        for size in self.group_sizes:
            waves = list(program.waves(size))
            for wave in range(1, len(waves)):
                drawn = sum(waves[:wave])
                for rewards in (draw.standard_normal(drawn), np.zeros(drawn)):
                    named, _ = named_rewards_of(rewards)
                    drafts = np.full(drawn, -1)
                    for array in (rewards, drafts, *named.values()):
                        array.flags.writeable = False
                    group = DrawnSoFar(rewards=rewards, named=named, drafts=drafts)
                    asked.append((group, waves[wave]))
        return asked
