"""What tree search finds with as many drawn actions as whole answers have, on the quickstart's
model, before any training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.generator import TorchGenerator
from gcore_tree.config import TreeConfig
from gcore_tree.search import TreeSearch

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.factories import import_file
from gcore_core.contract.generator import Finished, Piece, SampleRequest
from gcore_core.contract.records import OPEN, Prompt
from gcore_core.contract.sampling import DrawnSoFar
from gcore_core.run.make_model import make_model

TASK = Path(__file__).parents[2] / "recipes/quickstart/arithmetic.py"
PROMPTS = 256
#: More whole answers than a tree has actions for.
PLAIN = 16
#: Two beginnings, and many: the model's first character says whether it will work or guess, and it
#: guesses in 70 of 100 answers.
NARROW = TreeConfig(steps=3, beams=1, width=2, actions=3, end="")
WIDE = TreeConfig(steps=2, beams=1, width=2, first=8, actions=1, end="")


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> TorchGenerator:
    make = {"path": str(TASK), "name": "teach", "config": {"seed": 0}}
    directory = make_model(make, tmp_path_factory.mktemp("models"), lambda *_: None)
    context = WorkerContext(role="rollout", steps=1, model={"path": str(directory)})
    return TorchGenerator(TorchGeneratorConfig(max_new_tokens=14, max_batch=512), context)


def totals_of(problem: int) -> str:
    """The worked answer: a colon and the running totals."""
    digits = [int(digit) for digit in f"{problem:05d}"]
    return ":" + "".join(f"{sum(digits[: place + 1]):02d}" for place in range(5))


def progress(text: str, worked: str) -> float:
    """A reward for beginnings: which share of the worked answer they have right."""
    right = 0
    for one, other in zip(text, worked, strict=False):
        if one != other:
            break
        right += 1
    return right / len(worked)


def is_right(text: str, worked: str) -> bool:
    """The quickstart's reward: the last two characters are the sum."""
    return text[-2:] == worked[-2:]


def texts_of(records: Sequence[Finished]) -> list[str]:
    return [record.columns["text"].tobytes().decode() for record in records]


def drawn_by(record: Finished) -> int:
    """How many actions the policy has drawn for a record."""
    return int(record.columns["action_mask"].sum())


def run(generator: TorchGenerator, requests: list[SampleRequest]) -> dict[int, list[Finished]]:
    """Returns ordinal -> its records by sample."""
    generator.submit(requests)
    ended: list[Finished] = []
    while len(ended) < len(requests):
        ended += generator.step()
    groups: dict[int, list[Finished]] = {}
    for record in sorted(ended, key=lambda record: record.request.sample):
        groups.setdefault(record.request.ordinal, []).append(record)
    return groups


def seed_of(seed: int, ordinal: int, sample: int) -> int:
    return int(np.random.SeedSequence([seed, ordinal, sample]).generate_state(1, np.uint64)[0])


def draw_trees(
    generator: TorchGenerator, problems: list[int], seed: int, settings: TreeConfig
) -> list[list[Finished]]:
    """Draws a tree for each problem as controllers and generators do."""
    task: Any = import_file(TASK)
    program = TreeSearch(settings)
    first = settings.first or settings.beams * settings.width
    prompts = [Prompt(row=row, text=task.prompt_of(p)) for row, p in enumerate(problems)]
    groups: list[list[Finished]] = [[] for _ in problems]
    for wave in program.waves(first + (settings.steps - 1) * settings.beams * settings.width):
        requests = []
        for ordinal, group in enumerate(groups):
            worked = totals_of(problems[ordinal])
            so_far = DrawnSoFar(
                rewards=np.array([progress(text, worked) for text in texts_of(group)]),
                drafts=np.full(len(group), -1),
                open=np.array([record.status == OPEN for record in group], np.bool_),
            )
            for draft in program.drafts(so_far, wave):
                sample = len(group) + sum(r.ordinal == ordinal for r in requests[-wave:])
                begun = group[draft].columns["action_ids"] if draft >= 0 else np.zeros(0, np.int32)
                actions, end = program.piece(sample)
                piece = Piece(begun=begun, actions=actions, end=end)
                requests.append(
                    SampleRequest(
                        ordinal=ordinal,
                        sample=sample,
                        seed=seed_of(seed, ordinal, sample),
                        prompt=prompts[ordinal],
                        piece=piece,
                    )
                )
        for ordinal, records in run(generator, requests).items():
            groups[ordinal] += records
    return groups


def draw_answers(generator: TorchGenerator, problems: list[int], seed: int) -> list[list[Finished]]:
    """Draws whole answers to each problem."""
    task: Any = import_file(TASK)
    prompts = [Prompt(row=row, text=task.prompt_of(p)) for row, p in enumerate(problems)]
    requests = [
        SampleRequest(
            ordinal=ordinal,
            sample=sample,
            seed=seed_of(seed, ordinal, sample + 1000),
            prompt=prompts[ordinal],
        )
        for ordinal in range(len(problems))
        for sample in range(PLAIN)
    ]
    groups = run(generator, requests)
    return [groups[ordinal] for ordinal in range(len(problems))]


def share_within(answers: Sequence[Finished], budget: int, worked: str) -> float:
    """Returns how probable a right answer is among the first ones, with as many actions on average.

    With the answer that goes over the budget they have too many actions, without it too few; it is
    taken with the probability that makes the mean right.
    """
    under, was_right = 0, False
    for answer, text in zip(answers, texts_of(answers), strict=True):
        over = under + drawn_by(answer)
        if over >= budget:
            chance = (budget - under) / (over - under)
            return 1.0 if was_right else chance * is_right(text, worked)
        under = over
        was_right = was_right or is_right(text, worked)
    raise AssertionError(f"{len(answers)} answers have fewer than {budget} actions")


@pytest.mark.slow
def test_what_trees_find_with_as_many_actions_as_whole_answers_have(
    generator: TorchGenerator,
) -> None:
    """The reward of beginnings says what is right so far; both bests are by the answer.

    A tree with eight beginnings finds about as much as whole answers do. One with two is worse:
    where both are guesses, nothing that is drawn later can be right. A guess ends after four
    actions, so that to begin anew costs whole answers little, too.
    """
    wide = np.array([shares(generator, seed, WIDE) for seed in range(3)])
    narrow = np.array([shares(generator, seed, NARROW) for seed in range(3)])
    assert abs(wide[:, 0].mean() - wide[:, 1].mean()) < 0.05, wide
    assert (narrow[:, 0] < narrow[:, 1]).all(), narrow
    assert (wide[:, 0] > narrow[:, 0]).all()


def shares(generator: TorchGenerator, seed: int, settings: TreeConfig) -> tuple[float, float]:
    """Returns the shares of problems of which the best leaf, and the best answer, is right."""
    task: Any = import_file(TASK)
    problems = [p for p in range(task.PROBLEMS) if task.is_held_out(p)]
    chosen = np.random.default_rng(0).permutation(problems)[:PROMPTS].tolist()
    trees = draw_trees(generator, chosen, seed, settings)
    answers = draw_answers(generator, chosen, seed)
    right_leaf = right_answer = 0.0
    actions = 0
    for problem, tree, plain in zip(chosen, trees, answers, strict=True):
        worked = totals_of(problem)
        budget = sum(map(drawn_by, tree))
        leaves = [record for record in tree if record.status != OPEN]
        right_leaf += any(is_right(text, worked) for text in texts_of(leaves))
        right_answer += share_within(plain, budget, worked)
        actions += budget
    print(
        f"seed {seed}, {settings.first or 2} beginnings: best leaf {right_leaf / PROMPTS:.3f}, "
        f"best answer {right_answer / PROMPTS:.3f}; {actions / PROMPTS:.1f} actions a prompt"
    )
    return right_leaf / PROMPTS, right_answer / PROMPTS
