"""Fakes a reward that asks a model, and a placement that moves each step, for simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError
from gcore_core.contract.order import sample_seed
from gcore_core.contract.placement import (
    Cell,
    Decision,
    Mode,
    Partition,
    Window,
    every_slot,
)
from gcore_core.contract.questions import Question
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_core.contract.traits import Traits


@dataclass(frozen=True, kw_only=True)
class FakeAskerConfig:
    def traits(self) -> Traits:
        return Traits(asks=True)


class FakeAsker:
    """Asks a model one question about each record.

    The reward is the share of the answer's letters that are an 'a'.
    """

    def __init__(self, config: FakeAskerConfig | None, context: WorkerContext) -> None:
        if context.sampler is None:
            raise ContractError(
                "this reward asks a model, but names no role",
                where="rewards",
                todo="set rewards.<name>.role",
            )
        self._sampler = context.sampler

    async def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        questions = [
            Question(
                prompt=Prompt(row=0, text=record.text),
                seed=sample_seed(0, record.ordinal, 0, record.sample),
                about=(record.ordinal, record.sample),
            )
            for record in records
        ]
        answers = await self._sampler.sample(questions)
        return [Score(value=row[0].text.count("a") / max(len(row[0].text), 1)) for row in answers]


class Turning:
    """Moves the border between the policy's generator and the judge at every step.

    In mode "split" the generator has one cell, then two, up to all but one, then one again. In the
    other modes both roles have all cells.
    """

    def __init__(self, config: None = None, mode: Mode = "split") -> None:
        self._mode: Mode = mode

    def revise(self, partition: Partition | None, window: Window) -> Decision:
        cells = tuple(Cell((device,)) for device in window.devices)
        border = 1 + window.step % (len(cells) - 1)
        awake = {"rollout": cells[:border], "judge": cells[border:]}
        if self._mode != "split":
            awake = dict.fromkeys(awake, cells)
        # Roles between which nothing moves, such as the trainer, keep their slots.
        unmoved = {
            role: role_cells
            for role, role_cells in every_slot(window).cells.items()
            if role not in awake
        }
        engines = Partition({**unmoved, "rollout": cells, "judge": cells})
        return Decision(
            partition=Partition({**unmoved, **awake}),
            engines=engines,
            mode=self._mode,
            chosen=str(border),
        )


class InTurns(Turning):
    def __init__(self, config: None = None) -> None:
        super().__init__(config, "colocated")
