"""The contract of an objective.

An update has the same value and gradient however its records are laid out and split. Everything is
float64. An update's value is sum(loss_sum) / sum(weight_sum) over its parts, as a trainer computes
it.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.algorithms import LOGP_OF, AdaptsToSteps, Objective
from gcore_testing.contracts.arguments import ASKS
from gcore_testing.contracts.base import Contract

if TYPE_CHECKING:
    from torch import Tensor

Batch = Mapping[str, "Tensor"]
#: Outputs of the model that carry a gradient: logp always, the others where they are required. So
#: do log-probs of other tokens, "logp@COLUMN", which only a batch of the tested objective has.
CURRENT = ("logp", "entropy", "values")
#: Columns by which an objective joins the records of a group.
JOINS = frozenset({"group", "sample"})
#: The age of a masked action, which no other action has.
_OLDEST = 99
#: Columns that every objective gets.
GIVEN = frozenset({"record", "mask", "advantage", "rollout_logp"})
#: (columns, current) -> (value of the update, weight_sum)
Reference = Callable[[Batch, Batch], tuple["Tensor", "Tensor"]]


class ObjectiveContract(Contract):
    """To test an objective, override ``provider``, or the fixture ``objective``.

    Override ``reference`` too, with a slow implementation written from the paper. An objective that
    requires the column ``group`` gets groups of two records, which are never split.

    tolerance: how much values, gradients and metrics may differ, relative to the largest, or to 1
        where that is larger. Sums in another order differ by rounding.
    """

    kind: ClassVar[str] = "objective"
    tolerance: ClassVar[float] = 1e-11

    @pytest.fixture
    def objective(self) -> Any:
        return self.build()

    @pytest.fixture
    def reference(self) -> Reference | None:
        """Gives a slow reference, or None when there is none.

        It is a function (columns, current) -> (loss_sum / weight_sum, weight_sum) of a whole batch,
        written with plain loops. The gradient of the first is compared too.
        """
        return None

    @pytest.fixture
    def batch(self, objective: Any) -> Batch:
        """Gives every column and output for records of different lengths.

        Some actions are masked, and all actions of one record are. Groups have two records, all of
        them where the objective needs whole groups. An objective that requires columns of roles
        overrides it, and adds them.
        """
        return make_batch((*LENGTHS, 2) if "group" in objective.requires else LENGTHS)

    def test_it_is_an_objective(self, objective: Any) -> None:
        assert isinstance(objective, Objective)
        assert isinstance(objective.requires, frozenset)

    def test_it_gives_two_sums_and_detached_metrics(self, objective: Any, batch: Batch) -> None:
        loss, weight, metrics = call(objective, leaves(batch))
        assert loss.dim() == weight.dim() == 0
        assert loss.requires_grad, "the loss has no gradient"
        for name, (total, count) in metrics.items():
            assert total.dim() == count.dim() == 0, name
            assert not total.requires_grad and not count.requires_grad, (
                f"metric {name} is not detached"
            )

    def test_the_gradient_is_finite_and_not_zero(self, objective: Any, batch: Batch) -> None:
        _, gradients, _ = update(objective, batch)
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        assert any(bool(gradient.any()) for gradient in gradients)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_micro_batches_do_not_matter(self, objective: Any, batch: Batch, size: int) -> None:
        units = _units(objective, batch)
        parts = [sum(units[start : start + size], []) for start in range(0, len(units), size)]
        self._assert_same(
            update(objective, batch, [_actions(batch, part) for part in parts]),
            update(objective, batch),
        )

    @pytest.mark.parametrize("ranks", [2, 3, 8])
    def test_data_parallel_ranks_do_not_matter(
        self, objective: Any, batch: Batch, ranks: int
    ) -> None:
        """Records are dealt to the ranks in turn, and each rank has two micro-batches.

        With more ranks than records, some have no record at all.
        """
        parts = []
        units = _units(objective, batch)
        for rank in range(ranks):
            own = units[rank::ranks]
            parts += [_actions(batch, sum(part, [])) for part in (own[:1], own[1:])]
        self._assert_same(update(objective, batch, parts), update(objective, batch))

    def test_the_order_of_samples_does_not_matter(self, objective: Any, batch: Batch) -> None:
        turned = [_actions(batch, list(range(_count(batch)))[::-1])]
        self._assert_same(update(objective, batch, turned), update(objective, batch))

    def test_interleaved_records_are_the_same_records(self, objective: Any, batch: Batch) -> None:
        """The first actions of all records come first, then the second ones, and so on.

        The order of actions within a record stays.
        """
        places = [_actions(batch, [record]) for record in range(_count(batch))]
        mixed = [
            place for row in itertools.zip_longest(*places) for place in row if place is not None
        ]
        self._assert_same(update(objective, batch, [mixed]), update(objective, batch))

    def test_padding_does_not_matter(self, objective: Any, batch: Batch) -> None:
        """Masked actions behind every record, and a record of masked actions alone, change nothing.

        The padding gets no gradient.
        """
        padded = _padded(batch)
        value, gradients, metrics = update(objective, padded)
        is_original = padded["original"]
        expected = update(objective, batch)
        self._assert_same(
            (value, [gradient[is_original] for gradient in gradients], metrics), expected
        )
        for gradient in gradients:
            assert not bool(gradient[~is_original].any()), "padding has a gradient"

    def test_masked_actions_have_no_influence(self, objective: Any, batch: Batch) -> None:
        """Other numbers at masked places change nothing, and get no gradient."""
        wild = {name: _wild(column, ~batch["mask"]) for name, column in batch.items()}
        if "age" in wild:
            wild["age"] = wild["age"].masked_fill(~batch["mask"], _OLDEST)
        result = update(objective, wild)
        self._assert_same(result, update(objective, batch))
        for gradient in result[1]:
            assert not bool(gradient[~batch["mask"]].any()), "a masked action has a gradient"

    def test_the_weight_does_not_depend_on_the_parameters(
        self, objective: Any, batch: Batch
    ) -> None:
        """The weight is the same under other log-probs (old and new), entropies and values.

        It carries no gradient.
        """
        weight = call(objective, leaves(batch))[1]
        assert not weight.requires_grad, "weight_sum carries a gradient"
        moved = {
            **batch,
            **{name: batch[name] - 0.7 for name in (*_outputs(batch), "old_logp")},
        }
        assert float(call(objective, leaves(moved))[1]) == float(weight)

    @pytest.mark.parametrize("size", [1, 3, 100])
    def test_the_weight_alone_is_that_of_the_loss(
        self, objective: Any, batch: Batch, size: int
    ) -> None:
        """``weight()`` gives the weight of ``loss()`` in every micro-batch.

        That holds for records without trained actions too. It gets no log-probs but the rollout's.
        """
        units = _units(objective, batch)
        names = GIVEN | (objective.requires & JOINS)
        for start in range(0, len(units), size):
            part = sum(units[start : start + size], [])
            data = select(leaves(batch), _actions(batch, part))
            expected = objective.loss(*_arguments(objective, data))[1]
            weight = objective.weight({name: data[name] for name in names})
            assert weight.dim() == 0
            assert not weight.requires_grad, "the weight carries a gradient"
            assert float(weight) == float(expected), "weight() and loss() disagree"

    def test_asking_twice_gives_the_same(self, objective: Any, batch: Batch) -> None:
        """A second call gives the same result, and the columns are not written to."""
        copy = {name: column.clone() for name, column in batch.items()}
        first = update(objective, batch)
        for _ in range(ASKS):
            self._assert_same(update(objective, batch), first)
        assert all(bool((copy[name] == batch[name]).all()) for name in batch), (
            "a column was written to"
        )

    def test_what_it_has_learned_survives_json(self, objective: Any, batch: Batch) -> None:
        """An objective that adapts to steps goes on from its state as if it had not stopped.

        It is shown steps of low and of high entropy, before and after it stopped.
        """
        if not isinstance(objective, AdaptsToSteps):
            self.not_claimed("an adaptation to steps")
        resumed = copy.deepcopy(objective)
        adapts = bool(objective.state())
        for entropy in (0.01, 0.02, 9.0, 0.01):
            objective.observe(step_metrics(entropy))
        assert adapts or not objective.state(), "before the first step nothing says that it adapts"
        resumed.restore(json.loads(json.dumps(objective.state(), allow_nan=False)))
        for entropy in (9.0, 0.01, 9.0):
            self._assert_same(update(resumed, batch), update(objective, batch))
            objective.observe(step_metrics(entropy))
            resumed.observe(step_metrics(entropy))
        assert resumed.state() == objective.state()

    def test_only_a_step_changes_what_it_has_learned(self, objective: Any, batch: Batch) -> None:
        """Losses do not, so ranks with other micro-batches learn the same."""
        if not isinstance(objective, AdaptsToSteps):
            self.not_claimed("an adaptation to steps")
        objective.observe(step_metrics(0.01))
        before = json.dumps(objective.state())
        update(objective, batch)
        assert json.dumps(objective.state()) == before, "computing a loss changed its state"

    def test_a_positive_advantage_raises_the_logprob(self, objective: Any, batch: Batch) -> None:
        """An advantage of +1 lowers the loss's gradient by an action's log-prob, against one of -1.

        All log-probs are equal, old and new, so that no clip binds and no correction matters; what
        does not depend on the advantage, such as a penalty, cancels out.
        """
        names = {"rollout_logp", "old_logp", "ref_logp"} & batch.keys()
        level = {**batch, **dict.fromkeys(names, batch["logp"])}
        rises, falls = (
            update(objective, {**level, "advantage": batch["advantage"] * 0 + sign})[1][0]
            for sign in (1.0, -1.0)
        )
        difference = rises - falls
        if not bool(difference.any()):
            self.not_claimed("an advantage (its gradient does not depend on it)")
        assert float(difference.max()) <= self.tolerance, (
            "with a positive advantage, a step makes an action less probable: the sign is reversed"
        )

    def test_it_equals_the_slow_reference(
        self, objective: Any, batch: Batch, reference: Reference | None
    ) -> None:
        if reference is None:
            self.not_claimed("a reference (give the fixture `reference`)")
        data = leaves(batch)
        value, weight = reference(*_arguments(objective, data))
        value.backward()
        gradients = [_gradient(data, name) for name in _live(objective)]
        self._assert_same(update(objective, batch)[:2], (value.detach(), gradients))
        assert float(call(objective, leaves(batch))[1]) == pytest.approx(
            float(weight), rel=self.tolerance
        )

    def _assert_same(self, actual: Sequence[Any], expected: Sequence[Any]) -> None:
        """Compares values, gradients and, where both have them, metrics."""
        self._assert_close("value", actual[0], expected[0])
        for at, (one, other) in enumerate(zip(actual[1], expected[1], strict=True)):
            self._assert_close(f"gradient by output {at}", one, other)
        if len(actual) == len(expected) == 3:
            assert actual[2].keys() == expected[2].keys()
            for name in actual[2]:
                self._assert_close(f"metric {name}", actual[2][name], expected[2][name])

    def _assert_close(self, what: str, actual: Any, expected: Any) -> None:
        one, other = (np.asarray(value.detach(), np.float64) for value in (actual, expected))
        limit = self.tolerance * max(1.0, float(np.abs(other).max(initial=0.0)))
        np.testing.assert_allclose(one, other, rtol=0, atol=limit, err_msg=what)


# -- updates ---------------------------------------------------------------------------------------


def update(
    objective: Any, batch: Batch, parts: Sequence[Any] = (slice(None),)
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Returns (value, gradients, means of metrics) of an update whose micro-batches are ``parts``.

    There is one gradient for each output that the objective uses, in the order of CURRENT.
    """
    data = leaves(batch)
    results = [call(objective, data, part) for part in parts]
    loss, weight = (sum(result[i] for result in results) for i in (0, 1))
    value = loss / weight
    value.backward()
    metrics = {
        name: sum(r[2][name][0] for r in results if name in r[2])
        / sum(r[2][name][1] for r in results if name in r[2])
        for name in results[0][2]
    }
    return value.detach(), [_gradient(data, name) for name in _live(objective)], metrics


def call(objective: Any, data: Batch, part: Any = slice(None)) -> Any:
    """Calls the objective's ``loss`` on the actions ``part``, with only what it requires.

    The records of the part are numbered anew.
    """
    return objective.loss(*_arguments(objective, select(data, part)))


def select(data: Batch, part: Any) -> dict[str, Any]:
    """Returns the columns of the actions ``part``, whose records are numbered anew."""
    torch = pytest.importorskip("torch")
    index = part if isinstance(part, slice) else torch.tensor(part, dtype=torch.long)
    columns = {name: column[index] for name, column in data.items()}
    for name in ("record", "group"):
        columns[name] = torch.unique(columns[name], return_inverse=True)[1]
    return columns


def _arguments(objective: Any, data: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    names = GIVEN | (objective.requires - {"logp", "entropy"})
    names = {name for name in names if not name.startswith(LOGP_OF)}
    names |= {"end"} if "values" in objective.requires else set()
    columns = {name: column for name, column in data.items() if name in names}
    if "values" in columns:
        columns["values"] = data["old_values"]
    return columns, {name: data[name] for name in _live(objective)}


def _live(objective: Any) -> list[str]:
    """Returns the outputs that an objective gets, in the order of its gradients."""
    plain = [name for name in CURRENT if name == "logp" or name in objective.requires]
    return plain + sorted(name for name in objective.requires if name.startswith(LOGP_OF))


def _outputs(batch: Batch) -> list[str]:
    return [name for name in batch if name in CURRENT or name.startswith(LOGP_OF)]


def _wild(column: Any, where: Any) -> Any:
    """Returns a column, [A] or [A, k], with other numbers at the actions ``where``, bool[A]."""
    if not column.is_floating_point():
        return column
    return column.masked_fill(where.reshape(-1, *[1] * (column.dim() - 1)), 3.0)


def leaves(batch: Batch) -> dict[str, Any]:
    """Returns the batch with fresh leaf tensors for the outputs that need gradients."""
    live = {name: batch[name].detach().clone().requires_grad_() for name in _outputs(batch)}
    return {**batch, **live}


def _gradient(data: Batch, name: str) -> Any:
    return data[name].grad if data[name].grad is not None else data[name].detach() * 0


# -- batches ---------------------------------------------------------------------------------------


def step_metrics(entropy: float) -> dict[str, float]:
    """Makes the metrics that every trainer gives of a step.

    entropy: mean of the step's actions, in nats.
    """
    return {
        "loss": 0.1,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "entropy": entropy,
        "kl": 0.01,
        "clip_share": 0.0,
        "logprob_gap_max": 1e-5,
        "logprob_gap_mean": 1e-6,
    }


LENGTHS = (4, 1, 6, 3, 2, 5, 7)


def make_batch(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> dict[str, Any]:
    """Makes random float64 columns for records of these lengths, two of which are a group.

    The ratio of log-probs goes from 0.4 to 2.5, so that clips bind on some actions.
    """
    torch = pytest.importorskip("torch")
    draw = torch.Generator().manual_seed(seed)
    record = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(list(lengths)))
    actions = len(record)

    def noise(scale: float, count: int = actions) -> Any:
        return scale * torch.randn(count, generator=draw, dtype=torch.float64)

    mask = torch.rand(actions, generator=draw) < 0.8
    mask[record == 3] = False
    mask[0] = True
    logp = noise(0.8) - 3.0
    rollout = logp + noise(0.3)
    values = noise(1.0)
    columns = {
        "record": record,
        "mask": mask,
        "advantage": noise(1.0, len(lengths))[record],
        "rollout_logp": rollout,
        "old_logp": rollout + noise(0.1),
        "ref_logp": logp + noise(0.5),
        "returns": values + noise(1.0),
        "old_values": values + noise(0.2),
        "group": record // 2,
        "sample": record % 2,
        "label": noise(1.0, len(lengths)).abs()[record],
        "end": torch.cat([record[1:] != record[:-1], torch.ones(1, dtype=torch.bool)]),
        "logp": logp,
        "entropy": noise(0.1).abs() + 1.0,
        "values": values,
    }
    return {**columns, "age": torch.randint(0, 5, (actions,), generator=draw)}


def _padded(batch: Batch) -> dict[str, Any]:
    """Returns the batch with two masked actions behind each record, and one more record of three.

    The column "original" marks the actions that were there before.
    """
    torch = pytest.importorskip("torch")
    count = _count(batch)
    places: list[int] = []
    original: list[bool] = []
    for record in range(count):
        actions = _actions(batch, [record])
        places += [*actions, actions[0], actions[-1]]
        original += [True] * len(actions) + [False] * 2
    places += [0, 1, 2]
    original += [False] * 3
    padded = {name: column[torch.tensor(places)].clone() for name, column in batch.items()}
    is_original = torch.tensor(original)
    padded["mask"] &= is_original
    padded["record"][-3:] = count
    padded["end"] &= is_original
    padded["group"][-3:] = int(batch["group"].max()) + 1
    for name in set(padded) - {"record", "mask", "end", "group", "sample"}:
        padded[name][~is_original] = _OLDEST if name == "age" else 1.5
    # The original actions keep their order, because records are numbered in the order they lie in.
    return {**padded, "original": is_original}


def _units(objective: Any, batch: Batch) -> list[list[int]]:
    """Returns the records that stay together: whole groups where the objective requires them."""
    records = range(_count(batch))
    if "group" not in objective.requires:
        return [[record] for record in records]
    groups: dict[int, list[int]] = {}
    for record in records:
        group = int(batch["group"][_actions(batch, [record])[0]])
        groups.setdefault(group, []).append(record)
    return list(groups.values())


def _count(batch: Batch) -> int:
    return int(batch["record"].max()) + 1


def _actions(batch: Batch, records: Sequence[int]) -> list[int]:
    """Returns the places of the records' actions, record after record."""
    return list(_places(batch, records))


def _places(batch: Batch, records: Sequence[int]) -> Iterator[int]:
    owners = batch["record"].tolist()
    for record in records:
        yield from (place for place, owner in enumerate(owners) if owner == record)
