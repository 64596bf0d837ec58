"""What the trainer promises on denoising transitions: replay, one update whatever the split,
guards.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gcore_algorithms.config import CispoConfig, GspoConfig, LossKlConfig, PpoClipConfig
from gcore_algorithms.objectives import Cispo, Gspo, PpoClip
from gcore_diffusion.config import NftConfig
from gcore_diffusion.forward import Nft
from gcore_diffusion.rows import transitions
from gcore_testing.contracts.weights import digests, exported, largest_change, push

from gcore_core.contract.errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    NonFiniteLoss,
    WeightMismatch,
)
from gcore_core.contract.trainer import Trainer
from tests.support import diffusion_models as kit

KERNELS = [
    {"noise": "sde"},
    {"noise": "dance", "scale": 0.3},
    {"noise": "cps", "scale": 0.8},
    {"noise": "sde", "window": 2},
    {"noise": "sde", "guidance": 3.0},
]


def replay_gap(trainer: Any, records: list[Any]) -> float:
    trainer._denoising.kernel = trainer._kernel(records)
    rows = transitions(list(enumerate(records)), torch.device("cpu"), trainer._diffusion.guidance)
    (logp,) = trainer._denoising.logprobs([rows], "policy")
    return float((logp - rows.columns["rollout_logp"]).abs().max())


@pytest.mark.parametrize("settings", KERNELS, ids=lambda s: "-".join(map(str, s.values())))
def test_replayed_log_probs_equal_those_of_the_sampler(
    tiny_dir: Path, settings: dict[str, Any]
) -> None:
    """0 in the same batches, at most 1e-6 in others."""
    records = kit.records_of(
        kit.sampled(kit.make_generator(tiny_dir, **settings), kit.make_requests(4, 6))
    )
    guidance = settings.get("guidance", 1.0)
    whole = kit.make_trainer(tiny_dir, guidance=guidance)
    for k in range(len(records[0].columns["logp"])):
        assert replay_gap(whole, [kit.only(record, k) for record in records]) == 0.0
    for size in (1, 7, 4096):
        assert (
            replay_gap(kit.make_trainer(tiny_dir, guidance=guidance, budget_rows=size), records)
            <= 1e-6
        )


def test_sampler_and_trainer_round_alike_in_bfloat16(tiny_dir: Path) -> None:
    """0 in the same batches; in others within the band, since the model's output has 8 bits."""
    generator = kit.make_generator(tiny_dir, dtype="bfloat16")
    records = kit.records_of(kit.sampled(generator, kit.make_requests(4, 6)))
    assert records[0].columns["latents"].dtype == np.float32
    trainer = kit.make_trainer(tiny_dir, dtype="bfloat16", kl_coefficient=0.1)
    for k in range(len(records[0].columns["logp"])):
        assert replay_gap(trainer, [kit.only(record, k) for record in records]) == 0.0
    band = trainer._diffusion.traits().logprob_band
    assert kit.train(trainer, records)["logprob_gap_max"] <= band
    exact = kit.make_trainer(tiny_dir)
    assert replay_gap(exact, records) > 1e-4, "another dtype shows"


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_ddim_with_eta_is_replayed_exactly(tmp_path: Path, prediction: str) -> None:
    directory = kit.random_tiny(tmp_path, prediction=prediction)
    generator = kit.make_generator(directory, noise="ddim", scale=1.0)
    records = kit.records_of(kit.sampled(generator, kit.make_requests(2, 4)))
    trainer = kit.make_trainer(directory)
    for k in range(len(records[0].columns["logp"])):
        assert replay_gap(trainer, [kit.only(record, k) for record in records]) == 0.0
    assert kit.train(trainer, records)["logprob_gap_max"] <= 1e-6


def test_latents_below_float32_are_refused(tiny_dir: Path) -> None:
    records = kit.records_of(kit.sampled(kit.make_generator(tiny_dir), kit.make_requests(1, 2)))
    low = [
        replace(r, columns={**r.columns, "latents": r.columns["latents"].astype(np.float16)})
        for r in records
    ]
    with pytest.raises(ContractError, match="latents are float16, not float32"):
        kit.make_trainer(tiny_dir).prepare(low, frozenset())


def test_the_denoising_trainer_implements_the_trainer_protocol(tiny_dir: Path) -> None:
    assert isinstance(kit.make_trainer(tiny_dir), Trainer)


OBJECTIVES = {
    "ppo_clip": lambda: PpoClip(PpoClipConfig(clip_low=1e-2, clip_high=1e-2)),
    "ppo_clip-recompute-kl": lambda: PpoClip(
        PpoClipConfig(
            old_logprobs="recompute", normalise="sequence", kl=LossKlConfig(coefficient=0.1)
        )
    ),
    "gspo": lambda: Gspo(GspoConfig()),
    "cispo": lambda: Cispo(CispoConfig()),
}


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_language_objectives_train_denoising_steps_unchanged(tiny_dir: Path, name: str) -> None:
    """Rewarded ways become likelier; on policy the ratio is 1."""
    generator = kit.make_generator(tiny_dir)
    records = kit.records_of(kit.sampled(generator, kit.make_requests(4, 4)), minibatches=2)
    trainer = kit.make_trainer(tiny_dir, OBJECTIVES[name](), kl_coefficient=0.1)
    metrics = kit.train(trainer, records, minibatches=2)
    assert metrics["replay_gap"] <= 1e-6 and metrics["logprob_gap_max"] <= 1e-6
    assert np.isfinite(
        [metrics[key] for key in ("loss", "grad_norm", "path_kl", "diversity", "entropy")]
    ).all()
    rows = transitions(list(enumerate(records)), torch.device("cpu"), 1.0)
    (after,) = trainer._denoising.logprobs([rows], "policy")
    gain = (after - rows.columns["rollout_logp"]).view(len(records), -1).mean(1).numpy()
    liked = np.arange(len(records)) % 2 == 1
    assert gain[liked].mean() > gain[~liked].mean()


@pytest.mark.parametrize("objective", ["ppo_clip", "ppo_clip-recompute-kl", "gspo"])
def test_an_update_does_not_depend_on_how_it_is_split(tiny_dir: Path, objective: str) -> None:
    """In rows of a pass, and (but for objectives over whole batches of records) in
    micro-batches.
    """
    records = kit.records_of(kit.sampled(kit.make_generator(tiny_dir), kit.make_requests(3, 4)))
    outcomes = []
    for settings in ({}, {"budget_rows": 7}, {"batch_records": 5}):
        trainer = kit.make_trainer(
            tiny_dir, OBJECTIVES[objective](), kl_coefficient=0.1, eps=1e-2, **settings
        )
        outcomes.append((kit.train(trainer, records), exported(trainer)))
    for metrics, weights in outcomes[1:]:
        assert metrics["loss"] == pytest.approx(outcomes[0][0]["loss"], abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(outcomes[0][0]["grad_norm"], rel=1e-4)
        assert largest_change(outcomes[0][1], weights) <= 1e-5


def test_after_a_push_sampler_and_trainer_agree_again(tiny_dir: Path) -> None:
    generator = kit.make_generator(tiny_dir)
    trainer = kit.make_trainer(tiny_dir)
    for step in range(3):
        records = kit.records_of(kit.sampled(generator, kit.make_requests(step=step)))
        assert kit.train(trainer, records, step=step)["logprob_gap_max"] <= 1e-6
        push(generator, exported(trainer), step + 1)
    assert trainer.version == 3


def test_a_missing_push_is_detected(tiny_dir: Path) -> None:
    generator = kit.make_generator(tiny_dir)
    trainer = kit.make_trainer(tiny_dir)
    for step in range(2):
        records = kit.records_of(kit.sampled(generator, kit.make_requests(step=step)))
        metrics = kit.train(trainer, records, step=step)
    assert metrics["logprob_gap_max"] > trainer._diffusion.traits().logprob_band


def test_different_weights_stop_the_run_before_the_first_update(
    tiny_dir: Path, tmp_path: Path
) -> None:
    records = kit.records_of(kit.sampled(kit.make_generator(tiny_dir), kit.make_requests()))
    other = kit.random_tiny(tmp_path)
    net = kit.make_trainer(other)
    with torch.no_grad():
        net._denoising._tensors["outer.bias"].add_(0.1)
    before = digests(exported(net))
    with pytest.raises(WeightMismatch, match="before any update, the band is 0.0001"):
        net.prepare(records, frozenset())
    assert digests(exported(net)) == before


def test_error_for_different_guidance_names_both_numbers(tiny_dir: Path) -> None:
    records = kit.records_of(
        kit.sampled(kit.make_generator(tiny_dir, guidance=3.0), kit.make_requests(1, 2))
    )
    with pytest.raises(ContractError, match="sampled with guidance 3, the trainer has 1"):
        kit.make_trainer(tiny_dir).prepare(records, frozenset())


def test_kl_to_the_initial_weights_starts_at_zero_and_grows(tiny_dir: Path) -> None:
    generator = kit.make_generator(tiny_dir)
    trainer = kit.make_trainer(tiny_dir, learning_rate=1e-2)
    path_kls = []
    for step in range(3):
        records = kit.records_of(kit.sampled(generator, kit.make_requests(step=step)))
        path_kls.append(kit.train(trainer, records, step=step)["path_kl"])
        push(generator, exported(trainer), step + 1)
    assert path_kls[0] == 0 < path_kls[1] < path_kls[2]


def test_kl_to_a_moving_reference_stays_smaller(tiny_dir: Path) -> None:
    path_kls = []
    for decay in (1.0, 0.5):
        generator = kit.make_generator(tiny_dir)
        trainer = kit.make_trainer(tiny_dir, learning_rate=1e-2, reference_decay=decay)
        for step in range(3):
            records = kit.records_of(kit.sampled(generator, kit.make_requests(step=step)))
            metrics = kit.train(trainer, records, step=step)
            push(generator, exported(trainer), step + 1)
        path_kls.append(metrics["path_kl"])
    assert 0 < path_kls[1] < path_kls[0]


def test_a_restored_trainer_continues_as_if_never_stopped(tiny_dir: Path, tmp_path: Path) -> None:
    records = kit.records_of(kit.sampled(kit.make_generator(tiny_dir), kit.make_requests()))
    trainer = kit.make_trainer(tiny_dir, kl_coefficient=0.1, reference_decay=0.9)
    kit.train(trainer, records)
    trainer.save(tmp_path)
    expected = kit.train(trainer, records, step=1)["loss"], digests(exported(trainer))
    again = kit.make_trainer(tiny_dir, kl_coefficient=0.1, reference_decay=0.9)
    again.load(tmp_path)
    older = [replace(record, fresh=False) for record in records]
    assert (kit.train(again, older, step=1)["loss"], digests(exported(again))) == expected


def test_a_run_goes_on_without_the_reference_that_it_had(tiny_dir: Path, tmp_path: Path) -> None:
    records = kit.records_of(kit.sampled(kit.make_generator(tiny_dir), kit.make_requests()))
    trainer = kit.make_trainer(tiny_dir)
    kit.train(trainer, records)
    trainer.save(tmp_path)
    again = kit.make_trainer(tiny_dir, reference=False)
    again.load(tmp_path)
    assert digests(exported(again)) == digests(exported(trainer))


def test_a_rank_that_cannot_save_leaves_no_other_waiting(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = kit.make_trainer(tiny_dir)._denoising
    monkeypatch.setattr(engine, "ranks", Mock(rank=0))
    (tmp_path / "state-00000.safetensors").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="trainer state could not be written"):
        engine.save(tmp_path, {})
    engine.ranks.wait.assert_called_once_with()


def test_records_of_older_weights_are_not_replayed_and_the_first_fresh_ones_are(
    tiny_dir: Path,
) -> None:
    """A run whose generation is a step ahead may go on from a checkpoint with such records."""
    records = kit.records_of(kit.sampled(kit.make_generator(tiny_dir), kit.make_requests()))
    trainer = kit.make_trainer(tiny_dir, learning_rate=1e-2)
    older = [replace(record, fresh=False) for record in records]
    assert "replay_gap" not in kit.train(trainer, older)
    with pytest.raises(WeightMismatch, match="replayed log-probs are off"):
        kit.train(trainer, records, step=1)


def test_non_finite_numbers_stop_the_run_and_are_saved(tiny_dir: Path, tmp_path: Path) -> None:
    records = kit.records_of(kit.sampled(kit.make_generator(tiny_dir), kit.make_requests(1, 2)))
    trainer = kit.make_trainer(tiny_dir, dump_dir=str(tmp_path))
    before = digests(exported(trainer))
    trainer.prepare(records, frozenset())
    with pytest.raises(NonFiniteLoss):
        trainer.train(0, np.array([np.nan, 1.0]), 1, 1)
    assert digests(exported(trainer)) == before
    assert list(tmp_path.glob("nonfinite-*.safetensors"))


def test_a_rank_may_get_no_records(tiny_dir: Path) -> None:
    trainer = kit.make_trainer(tiny_dir)
    assert trainer.prepare([], frozenset()) == []
    trainer.train(4, np.zeros(0), 1, 1)
    assert trainer.version == 5


def test_preparation_scalars_are_sums_over_a_record(tiny_dir: Path) -> None:
    records = kit.records_of(kit.sampled(kit.make_generator(tiny_dir), kit.make_requests(1, 2)))
    rows = kit.make_trainer(tiny_dir).prepare(records, frozenset({"kl_k1"}))
    assert [row["kl_k1"] for row in rows] == [0.0, 0.0]


def test_the_forward_process_trains_without_log_probs(tiny_dir: Path) -> None:
    """Records of the deterministic sampler; images that are liked are denoised better, others
    worse.
    """
    records = kit.records_of(
        kit.sampled(kit.make_generator(tiny_dir, scale=0.0), kit.make_requests(4, 4))
    )
    assert all(record.columns["logp"].size == 0 for record in records)
    trainer = kit.make_trainer(tiny_dir, Nft(NftConfig()), kl_coefficient=0.01, learning_rate=3e-3)
    before = digests(exported(trainer))
    first = kit.train(trainer, records, minibatches=1)
    assert digests(exported(trainer)) != before
    assert first["logprob_gap_max"] == 0 and "path_kl" not in first and np.isfinite(first["loss"])


@pytest.mark.parametrize("kind", ["nft", "ppo_clip-recompute-kl"])
def test_later_epochs_compare_with_the_weights_before_the_first(tiny_dir: Path, kind: str) -> None:
    """In the second epoch the old policy is still the one that sampled."""
    forward = kind == "nft"
    generator = kit.make_generator(tiny_dir, scale=0.0 if forward else 0.7)
    records = kit.records_of(kit.sampled(generator, kit.make_requests(4, 4)), minibatches=2)
    objective = Nft(NftConfig()) if forward else OBJECTIVES[kind]()
    trainer = kit.make_trainer(tiny_dir, objective, kl_coefficient=0.1)
    trainer.prepare(records, frozenset())
    metrics = trainer.train(0, np.where(np.arange(len(records)) % 2, 1.0, -1.0), 2, 2)
    assert metrics["updates"] == 4 and metrics["logprob_gap_max"] <= 1e-6
    assert metrics["kl_to_reference"] > 0 and metrics["kl"] > 0


def test_the_expanded_forward_loss_equals_the_formula() -> None:
    old, new, target = torch.randn(3, 50, 8)
    columns = {
        "record": torch.arange(50),
        "mask": torch.ones(50, dtype=torch.bool),
        "advantage": torch.randn(50),
        "error": ((new - target) ** 2).mean(1),
        "old_error": ((old - target) ** 2).mean(1),
        "cross": ((new - target) * (old - target)).mean(1),
    }
    loss, weight, _ = Nft(NftConfig(beta=0.3)).loss(columns, {"logp": torch.zeros(50)})
    good = (columns["advantage"] / 2).clamp(-1, 1) / 2 + 0.5
    plus = (((1 - 0.3) * old + 0.3 * new - target) ** 2).mean(1)
    minus = (((1 + 0.3) * old - 0.3 * new - target) ** 2).mean(1)
    torch.testing.assert_close(loss, ((good * plus + (1 - good) * minus) / 0.3).sum())
    assert weight == 50


@pytest.mark.parametrize("word", ["entropy", "values"])
def test_an_unmet_requirement_of_an_objective_is_named_before_loading(
    tmp_path: Path, word: str
) -> None:
    objective = kit.Reinforce(frozenset({word}))
    with pytest.raises(
        ConfigError, match=f"the objective requires {word}, which a denoising policy does not have"
    ):
        kit.make_trainer(tmp_path / "no-model-here", objective)
