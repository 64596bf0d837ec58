"""A role that gives columns is shown every record that is trained on, and the trainer gets them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_testing import fake
from gcore_testing.contracts.trainer import make_records
from gcore_testing.faults import Faults
from gcore_testing.simulation import (
    TEACHER,
    Outcome,
    SimulatedJob,
    run_virtual,
    simulate,
    violations,
)

from gcore_core.config.plan import load_plan
from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.trainer import TrainRecord
from gcore_core.runtime.messages import AnnotateRequest, TrainItem
from gcore_core.workers import annotations as annotations_module
from gcore_core.workers import opened_records
from gcore_core.workers.annotations import Annotations, AnnotatorShell
from tests.support import runs

JOB = SimulatedJob(ranks=2, prompts=4, samples=2, evaluate_prompts=2, annotators=2)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    directory = tmp_path_factory.mktemp("calm")
    return run_virtual(simulate(replace(JOB, shards=1, annotators=1), directory / "store"))


def test_an_annotated_column_changes_the_weights(calm: Outcome, tmp_path: Path) -> None:
    without = run_virtual(simulate(replace(JOB, annotators=0), tmp_path / "store"))
    assert without.batches[0] == calm.batches[0]
    assert without.logits != calm.logits


@pytest.mark.parametrize("annotators", [1, 3])
def test_numbers_of_shards_and_annotator_workers_do_not_change_the_weights(
    annotators: int, calm: Outcome, tmp_path: Path
) -> None:
    job = replace(JOB, shards=3, annotators=annotators)
    found = run_virtual(simulate(job, tmp_path / "store"))
    assert (found.batches, found.logits) == (calm.batches, calm.logits)


def test_kills_and_lost_messages_change_nothing(calm: Outcome, tmp_path: Path) -> None:
    """Every record has its own column in any weather: the simulated trainer compares each."""
    methods = set()
    for seed in range(30_000, 30_030):
        weather = Faults(seed, kills=0.01)
        found = run_virtual(simulate(JOB, tmp_path / str(seed), weather))
        assert not violations(found, calm, weather, JOB), f"seed {seed}"
        methods |= {method for _, method, fault in weather.hits if fault != "kill"}
    assert {"annotate", "release_steps"} <= methods


class Bad(fake.FakeAnnotator):
    """Gives what the test says in place of what it should."""

    def __init__(self, gives: Callable[[Mapping[str, np.ndarray]], Any]) -> None:
        super().__init__(
            fake.FakeAnnotatorConfig(), WorkerContext(role=TEACHER, columns=("teacher_logp",))
        )
        self._gives = gives

    def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
        return [self._gives(columns) for columns in super().annotate(records)]


class NoStore:
    def reader(self) -> None:
        return None


async def compute(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda own: {}, "the columns are none, the role gives teacher_logp"),
        (lambda own: {"other": own["teacher_logp"]}, "the columns are other, the role gives"),
        (
            lambda own: {"teacher_logp": own["teacher_logp"][:1]},
            r"column 'teacher_logp' is float32\[1\], it must be float32\[2\]",
        ),
        (
            lambda own: {"teacher_logp": own["teacher_logp"].astype(np.float64)},
            r"column 'teacher_logp' is float64\[2\], it must be float32\[2\]",
        ),
        (
            lambda own: {"teacher_logp": own["teacher_logp"] * np.float32(np.nan)},
            "column 'teacher_logp' is not finite",
        ),
        (
            lambda own: {"teacher_ids": np.zeros((2, 2), np.int32)},
            r"column 'teacher_ids' is int32\[2, 2\], it must be int32\[2, 3\]",
        ),
        (
            lambda own: {"teacher_ids": np.zeros((2, 3), np.int64)},
            r"column 'teacher_ids' is int64\[2, 3\], it must be int32\[2, 3\]",
        ),
    ],
)
async def test_columns_that_break_the_contract_end_the_run(
    gives: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def opened(*_: Any) -> list[TrainRecord]:
        return make_records(9)

    monkeypatch.setattr(annotations_module, "open_records", opened)
    store: Any = NoStore()
    is_wide = "teacher_ids" in message
    column = (
        ColumnSpec(name="teacher_ids", dtype="int32", wide=True, k=3)
        if is_wide
        else ColumnSpec(name="teacher_logp")
    )
    annotations = Annotations([column], store, 1)
    shell = AnnotatorShell(Bad(gives), annotations, compute, 1)
    call: Any = None
    with pytest.raises(ContractError, match=message) as caught:
        await shell.annotate(AnnotateRequest(0, 0, []), call)
    assert "ordinal 0, sample 0" in str(caught.value)


async def test_a_record_is_opened_with_its_annotated_columns() -> None:
    """Two roles, each with its chunk; a record's place differs from chunk to chunk."""
    (own,) = make_records(9, groups=1, samples=1)
    one, other = np.ones(2, np.float32), np.zeros(2, np.float32)
    chunks: dict[Any, list[dict[str, np.ndarray]]] = {
        "a": [{}, {"ref_logp": one}],
        "b": [{"teacher_logp": other}],
    }

    class Store:
        async def records(self, items: Sequence[TrainItem]) -> list[Any]:
            return [(own.columns, {}) for _ in items]

        async def arrays(self, refs: Sequence[Any]) -> list[Any]:
            return [chunks[ref] for ref in refs]

    def extra(ref: Any, slot: int) -> Any:
        from gcore_core.runtime.messages import Extra

        return Extra(ref, slot)

    ref: Any = "own"
    item = TrainItem(3, 1, 0, ref, 0, {}, 7, [extra("a", 1), extra("b", 0)])
    store: Any = Store()
    (record,) = await opened_records.open_records(store, [item], step=7)
    assert record.fresh and (record.ordinal, record.sample) == (3, 1)
    assert record.columns["ref_logp"] is one and record.columns["teacher_logp"] is other
    assert record.columns["action_ids"] is own.columns["action_ids"]


async def test_a_masked_record_is_opened_with_nothing_to_train_on() -> None:
    """The stored columns stay as they are: other readers have their own view of the record."""
    (own,) = make_records(9, groups=1, samples=1)
    mask = own.columns["action_mask"].copy()
    assert mask.any()

    class Store:
        async def records(self, items: Sequence[TrainItem]) -> list[Any]:
            return [(own.columns, {}) for _ in items]

    store: Any = Store()
    ref: Any = "own"
    items = [TrainItem(3, 1, 0, ref, 0, masked=True), TrainItem(3, 1, 0, ref, 0)]
    masked, plain = await opened_records.open_records(store, items, step=0)
    assert not masked.columns["action_mask"].any()
    assert masked.columns["action_mask"].dtype == mask.dtype
    assert masked.columns["logp"] is own.columns["logp"]
    np.testing.assert_array_equal(plain.columns["action_mask"], mask)


ROLES = """
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.traits import Traits


@dataclass(frozen=True, kw_only=True)
class WideConfig:
    k: int = 0
    column: str = "best_ids"

    def traits(self) -> Traits:
        return Traits(column_widths={self.column: self.k})


@dataclass(frozen=True, kw_only=True)
class NeedsConfig:
    names: tuple[str, ...] = ()

    def traits(self) -> Traits:
        return Traits(requires=frozenset(self.names))


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    def traits(self) -> Traits:
        return Traits(token_logprobs=True)


@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(
        summary="-", factory="gcore_testing.fake:FakeTrainer", config=TokensConfig
    )


@hookimpl
def gcore_roles():
    for name, columns in (("teacher", ("teacher_logp",)), ("other", ("teacher_logp", "doubt"))):
        yield p.RoleProvider(name=name, summary="-", kind="annotator", columns=columns)
    best = ColumnSpec(name="best_ids", dtype="int32", wide=True)
    yield p.RoleProvider(name="wide", summary="-", kind="annotator", columns=(best,))


@hookimpl
def gcore_annotators():
    yield p.AnnotatorProvider(
        summary="-", factory="gcore_testing.fake:FakeAnnotator", config=WideConfig
    )


@hookimpl
def gcore_objectives():
    yield p.ObjectiveProvider(
        summary="-", factory="gcore_testing.fake:FakeObjective", config=NeedsConfig
    )
"""


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["roles.teacher.use=fake", "objective.config.names=[teacher_logp]"], ""),
        (["roles.other.use=fake", "objective.config.names=[doubt,ref_logp]"], ""),
        (
            ["objective.config.names=[doubt]"],
            "objective: requires 'doubt', which roles.other gives; add that role.",
        ),
        (
            ["roles.teacher.use=fake", "objective.config.names=[scores]"],
            "objective: requires 'scores', which nothing supplies: no installed role gives it "
            "(known: age, entropy, group, kl_k1, kl_k2, kl_k3, old_logp, ref_logp, rollout_logp, "
            "sample, teacher_logp).",
        ),
        (
            ["roles.teacher.use=fake", "roles.other.use=fake"],
            "roles.other: gives 'teacher_logp', as roles.teacher does; leave one of them out.",
        ),
        (
            ["roles.wide={use: mine, config: {k: 2}}", "objective.config.names=[best_ids]"],
            "",
        ),
        (
            ["roles.wide.use=mine", "objective.config.names=[best_ids]"],
            "objective: requires 'best_ids', which roles.wide gives only where roles.wide.config "
            "says of how many numbers; set that.",
        ),
        (
            ["roles.wide={use: mine, config: {k: 2, column: best}}"],
            "roles.wide.config: says that column 'best' has 2 numbers for each action, and no "
            "installed role gives such a column; ask its author.",
        ),
        (
            [
                "roles.policy.use=mine",
                "roles.wide={use: mine, config: {k: 2}}",
                "objective.config.names=['logp@best_ids']",
            ],
            "",
        ),
        (
            ["roles.wide={use: mine, config: {k: 2}}", "objective.config.names=['logp@best_ids']"],
            "objective: requires 'logp@best_ids', log-probs of other tokens than the actions, and "
            "fake, which roles.policy uses, does not compute them; take a trainer with the trait "
            "token_logprobs, such as torch, or an objective that needs none.",
        ),
        (
            ["roles.teacher={use: fake, follows: policy}"],
            "roles.teacher.follows: no weights are pushed to an annotator; leave it out, and give "
            "it a model.",
        ),
    ],
)
def test_the_check_knows_which_columns_the_roles_of_a_run_give(
    overrides: list[str], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(ROLES)
    job = runs.job(objective={"use": "mine"}, roles={"policy": {"use": "fake"}})
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(job | {"local": [str(runs.FAKE), "mine.py"]}))
    if not problem:
        load_plan(file, overrides)
        return
    with pytest.raises(ConfigError) as caught:
        load_plan(file, overrides)
    assert str(caught.value) == problem
