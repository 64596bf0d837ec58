"""A critic and the policy that learns by its values, on the torch trainer: alone and sharded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_testing.runs import run_together

from gcore_core.contract.annotator import Annotates
from gcore_core.contract.errors import ContractError
from tests.support import ppo_ranks
from tests.support.ppo_ranks import ADVANTAGE, open_role, records_of, rewards_of, with_columns

pytestmark = pytest.mark.rest

#: float32 sums of gradients in another order, carried through four Adam updates.
TOLERANCE = 1e-5


def numpy_gae(record: Any, reward: float) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns) of a record's trained actions by Schulman et al. 2016, in float64."""
    mask = record.columns["action_mask"] != 0
    values = record.columns["values"][mask].astype(np.float64)
    after = float(record.columns["next_values"][-1]) if record.truncated else 0.0
    following = np.append(values[1:], after)
    rewards = np.zeros(len(values))
    rewards[-1:] = reward
    deltas = rewards + ADVANTAGE.gamma * following - values
    decay = ADVANTAGE.gamma * ADVANTAGE.lam
    size = len(values)
    steps = np.arange(size) - np.arange(size)[:, None]  # from t to k
    powers = np.where(steps >= 0, decay ** np.maximum(steps, 0), 0.0)
    advantages = powers @ deltas
    return advantages, advantages + values


def test_ranks_compute_gae_whitened_returns_and_explained_variance_as_numpy(
    model_dir: Path,
) -> None:
    critic = open_role("critic", model_dir)
    assert isinstance(critic, Annotates)
    policy = open_role("policy", model_dir)
    records = records_of(0)
    empty = {n: records[0].columns[n][:0] for n in ("action_ids", "action_mask", "logp")}
    records.append(replace(records[0], sample=9, columns={**records[0].columns, **empty}))
    rewards = np.append(rewards_of(0), 3.0)
    given = critic.annotate(records)
    values = critic.values(records)  # type: ignore[attr-defined]
    for columns, own in zip(given, values, strict=True):
        np.testing.assert_array_equal(columns["values"], own[:-1])
        np.testing.assert_array_equal(columns["next_values"], own[1:])
    records = with_columns(records, list(given))
    seen = {}
    for role, trainer in (("critic", critic), ("policy", policy)):
        trainer.prepare(records, frozenset())
        prepared = trainer._prepared
        assert prepared is not None
        metrics = trainer.train(0, rewards, 2, 1)
        for batch in filter(None, prepared.all()):
            for place, index in enumerate(batch.index.tolist()):
                at = (batch.columns["record"] == place) & batch.columns["mask"]
                name = "returns" if role == "critic" else "advantage"
                seen[role, index] = batch.columns[name][at].numpy()
        seen[role] = metrics
    expected = [numpy_gae(*pair) for pair in zip(records, rewards, strict=True)]
    everything = np.concatenate([advantages for advantages, _ in expected])
    mean, deviation = everything.mean(), np.sqrt(everything.var() + 1e-8)
    targets, old = [], []
    for index, (advantages, returns) in enumerate(expected):
        if len(records[index].columns["action_ids"]):
            # both are computed in float64 and rounded to float32 once
            white = ((advantages - mean) / deviation).astype(np.float32)
            np.testing.assert_allclose(seen["policy", index], white, rtol=2e-7, atol=1e-7)
            np.testing.assert_allclose(seen["critic", index], returns, rtol=2e-7, atol=1e-7)
        targets.append(returns)
        mask = records[index].columns["action_mask"] != 0
        old.append(records[index].columns["values"][mask].astype(np.float64))
    errors = np.concatenate(targets) - np.concatenate(old)
    explained = 1 - errors.var() / np.concatenate(targets).var()
    assert seen["critic"]["explained_variance"] == pytest.approx(explained, abs=1e-10)
    assert {"value_loss", "value_clip_share", "loss", "updates"} <= seen["critic"].keys()


def test_a_record_without_the_critics_columns_is_refused(model_dir: Path) -> None:
    policy = open_role("policy", model_dir)
    policy.prepare(records_of(0), frozenset())
    with pytest.raises(ContractError, match="a record lacks next_values, values"):
        policy.train(0, rewards_of(0), 2, 1)


def run_ranks(ranks: int, model: Path, work: Path, resume: Path) -> dict[str, Any]:
    """Runs critic and policy; returns role -> the numbers of rank 0."""
    if ranks == 1:
        return ppo_ranks.run(0, 1, model, work, resume)
    (work / "meet").mkdir(parents=True)
    words = [str(ranks), str(model), str(work), str(resume)]
    run_together([["-m", ppo_ranks.__name__, str(rank), *words] for rank in range(ranks)])
    numbers: dict[str, Any] = json.loads((work / "numbers.json").read_text())
    return numbers


def assert_alike(counts: tuple[int, ...], model: Path, work: Path) -> None:
    """The same weights after two steps, and the same next losses from a state of other ranks."""
    one = run_ranks(1, model, work / "1", work / "1")
    for ranks in counts:
        many = run_ranks(ranks, model, work / str(ranks), work / "1")
        back = run_ranks(1, model, work / f"back{ranks}", work / str(ranks))
        for role, expected in one.items():
            for name, values in expected["weights"].items():
                other = many[role]["weights"][name]
                np.testing.assert_allclose(values, other, atol=TOLERANCE, err_msg=name)
            for numbers in (many, back):
                pairs = zip(expected["metrics"], numbers[role]["metrics"], strict=True)
                for left, right in pairs:
                    assert left == pytest.approx(right, rel=1e-4, abs=1e-5)


def test_critic_and_policy_train_alike_on_one_and_two_ranks_and_resume_on_the_other(
    model_dir: Path, tmp_path: Path
) -> None:
    assert_alike((2,), model_dir, tmp_path)


@pytest.mark.slow
def test_critic_and_policy_train_alike_on_four_ranks(model_dir: Path, tmp_path: Path) -> None:
    assert_alike((4,), model_dir, tmp_path)
