from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.ranks import Ranks
from gcore_language.resplit import check_same
from gcore_language.schedule import rate_at
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.trainer import TorchTrainer
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from gcore_core.contract.errors import ConfigError, DataError, NonFiniteLoss, TrainingError
from gcore_core.contract.records import WeightPlan
from gcore_core.contract.trainer import Trainer
from tests.support import language_models as tiny


@pytest.fixture
def open_trainer(model_dirs: dict[str, Path]) -> Any:
    def make(
        family: str = "llama",
        objective: Any = None,
        context: dict[str, Any] | None = None,
        **config: Any,
    ) -> Any:
        settings = TorchTrainerConfig(**({"learning_rate": 1e-3} | config))
        objective = tiny.Reinforce() if objective is None else objective
        return TorchTrainer(
            settings, tiny.make_context(model_dirs[family], objective, **(context or {}))
        )

    return make


def weights_of(trainer: TorchTrainer) -> dict[str, np.ndarray]:
    return {spec.name: array.copy().view(np.float32) for spec, array in trainer.export_weights()}


def one_step(
    trainer: TorchTrainer, step: int = 0, epochs: int = 1, **records: Any
) -> dict[str, float]:
    made = tiny.make_records(**records)
    trainer.prepare(made, frozenset())
    return trainer.train(step, tiny.make_advantages(made), records.get("minibatches", 1), epochs)


def gradients(
    trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch, **records: Any
) -> dict[str, Any]:
    """Gradients, normalised and not clipped, of the one update of a step."""
    found = {}

    def keep(*_: Any, **__: Any) -> None:
        found.update({name: p.grad.clone() for name, p in trainer._engine._tensors.items()})

    monkeypatch.setattr(trainer._engine._optimizer, "step", keep)
    one_step(trainer, **records)
    return found


def test_the_trainer_implements_its_protocol_and_reports_its_metrics(open_trainer: Any) -> None:
    trainer = open_trainer(objective=tiny.Clip())
    assert isinstance(trainer, Trainer)
    metrics = one_step(trainer, step=4, minibatches=2, epochs=2)
    names = "loss grad_norm learning_rate entropy kl clip_share logprob_gap_max logprob_gap_mean"
    assert set(names.split()) <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())
    assert (metrics["updates"], trainer.version) == (4, 5)
    assert 0 < metrics["entropy"] < math.log(tiny.VOCABULARY)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_one_update_matches_plain_torch(
    family: str, open_trainer: Any, model_dirs: dict[str, Path]
) -> None:
    # eps as large as gradients are: else Adam makes a whole step of the rounding of a gradient that
    # should be zero
    settings = {
        "weight_decay": 0.1,
        "clip_grad_norm": 0.5,
        "betas": [0.9, 0.99],
        "learning_rate": 2e-3,
        "eps": 1e-2,
    }
    trainer = open_trainer(family, **settings)
    records = tiny.make_records()
    advantages = tiny.make_advantages(records)
    trainer.prepare(records, frozenset())
    metrics = trainer.train(0, advantages, 1, 1)

    model = AutoModelForCausalLM.from_pretrained(model_dirs[family], dtype=torch.float32).eval()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.99), eps=1e-2, fused=False)
    total, weight = torch.zeros(()), 0.0
    for record, advantage in zip(records, advantages, strict=True):
        mask = torch.from_numpy(record.columns["action_mask"].astype(np.float32))
        total = total - (float(advantage) * tiny.logp_of(model, record)[0] * mask).sum()
        weight += float(mask.sum())
    (total / weight).backward()
    total = total.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    assert metrics["loss"] == pytest.approx(float(total) / weight, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    expected = dict(model.named_parameters())
    for name, array in weights_of(trainer).items():
        np.testing.assert_allclose(
            array.reshape(expected[name].shape), expected[name].detach(), atol=1e-6
        )


def test_a_sampled_padding_token_has_the_gradient_of_any_other(
    open_trainer: Any, model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    records, padding = tiny.make_records(), 0
    for record in records:
        record.columns["action_ids"][0] = padding
    monkeypatch.setattr(tiny, "make_records", lambda **_: records)
    found = gradients(open_trainer(clip_grad_norm=0.0), monkeypatch)["model.embed_tokens.weight"]

    model = AutoModelForCausalLM.from_pretrained(model_dirs["llama"], dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None
    loss, weight = torch.zeros(()), 0.0
    for record, advantage in zip(records, tiny.make_advantages(records), strict=True):
        mask = torch.from_numpy(record.columns["action_mask"].astype(np.float32))
        loss = loss - (float(advantage) * tiny.logp_of(model, record)[0] * mask).sum()
        weight += float(mask.sum())
    (loss / weight).backward()
    expected = model.get_input_embeddings().weight.grad
    assert float(expected[padding].abs().max()) > 1e-3
    torch.testing.assert_close(
        found, expected, atol=2e-6, rtol=2e-5
    )  # float32 sums in another order


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", ["flat", "shared"])
def test_shared_prompts_give_the_same_gradients_as_padded_records(
    family: str, layout: str, open_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, padded = open_trainer(family), open_trainer(family, packing="padded")
    assert {"flat", "shared", "padded"} == shared._layouts
    shared._layouts = frozenset({layout})
    one = gradients(shared, monkeypatch)
    other = gradients(padded, monkeypatch)
    assert max(float(g.abs().max()) for g in other.values()) > 0.01
    for name in other:
        torch.testing.assert_close(
            one[name], other[name], atol=2e-6, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("packing", ["auto", "padded"])
def test_a_smaller_token_budget_does_not_change_the_gradient(
    packing: str, open_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gradients(open_trainer(packing=packing), monkeypatch)
    for budget in (1, 40):
        trainer = open_trainer(packing=packing, budget_tokens=budget, resplit_every=0)
        passes = []
        forward = trainer._engine._policy.forward
        monkeypatch.setattr(
            trainer._engine._policy,
            "forward",
            lambda *a, f=forward, p=passes: (p.append(1), f(*a))[1],
        )
        parts = gradients(trainer, monkeypatch)
        assert len(passes) == 16 if budget == 1 else 2 < len(passes) < 16
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], atol=1e-6, rtol=1e-5)


def test_checkpointed_layers_give_the_same_gradient(
    open_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gradients(open_trainer(), monkeypatch)
    saved = gradients(open_trainer(gradient_checkpointing=True), monkeypatch)
    for name in plain:
        torch.testing.assert_close(saved[name], plain[name], atol=1e-6, rtol=1e-5)


def test_a_large_vocabulary_in_chunks_gives_the_same_gradient(
    open_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gradients(open_trainer(), monkeypatch)
    monkeypatch.setattr("gcore_language.policy._CHUNK_LOGITS", 7 * tiny.VOCABULARY)
    chunked = gradients(open_trainer(), monkeypatch)
    for name in plain:
        torch.testing.assert_close(chunked[name], plain[name], atol=1e-6, rtol=1e-5)


def test_zero_advantages_leave_every_bit_of_the_weights_unchanged(open_trainer: Any) -> None:
    trainer = open_trainer(objective=tiny.Clip())
    before = weights_of(trainer)
    records = tiny.make_records(minibatches=2)
    trainer.prepare(records, frozenset())
    trainer.train(0, np.zeros(len(records)), 2, 2)
    for name, array in weights_of(trainer).items():
        assert array.tobytes() == before[name].tobytes(), name


def test_old_logp_comes_from_the_weights_before_the_first_update(
    open_trainer: Any, model_dirs: dict[str, Path]
) -> None:
    seen: list[tuple[int, torch.Tensor]] = []

    class Watch(tiny.Clip):
        def loss(self, columns: Any, current: Any) -> Any:
            seen.append((int(columns["record"].max()) + 1, columns["old_logp"].clone()))
            return super().loss(columns, current)

    config = {"packing": "padded", "budget_tokens": 1, "resplit_every": 0}
    trainer = open_trainer(objective=Watch(), learning_rate=0.05, **config)
    records = tiny.make_records(minibatches=2)
    trainer.prepare(records, frozenset())
    trainer.train(0, tiny.make_advantages(records), 2, 2)
    model = AutoModelForCausalLM.from_pretrained(model_dirs["llama"], dtype=torch.float32).eval()
    with torch.no_grad():
        expected = sorted(float(tiny.logp_of(model, r)[0].sum()) for r in records)
    assert [count for count, _ in seen] == [1] * 32
    for epoch in (seen[:16], seen[16:]):
        np.testing.assert_allclose(
            sorted(float(logp.sum()) for _, logp in epoch), expected, atol=1e-4
        )


def test_scalars_and_reference_logp_compare_with_the_initial_weights(
    open_trainer: Any, model_dirs: dict[str, Path]
) -> None:
    trainer = open_trainer(objective=tiny.Clip(beta=0.1), learning_rate=0.01)
    records = tiny.make_records()
    first = trainer.prepare(records, frozenset({"kl_k1", "kl_k3"}))
    assert first == [{"kl_k1": 0.0, "kl_k3": 0.0}] * len(records)
    trainer.train(0, tiny.make_advantages(records), 1, 1)
    second = trainer.prepare(records, frozenset({"kl_k1"}))
    initial = AutoModelForCausalLM.from_pretrained(model_dirs["llama"], dtype=torch.float32).eval()
    current = trainer._engine._policy.model
    with torch.no_grad():
        for record, found in zip(records, second, strict=True):
            gap = tiny.logp_of(current, record)[0] - tiny.logp_of(initial, record)[0]
            expected = float((gap * torch.from_numpy(record.columns["action_mask"])).sum())
            assert found["kl_k1"] == pytest.approx(expected, abs=1e-4)


def test_logprob_gap_is_zero_for_records_of_the_generator(
    open_trainer: Any, model_dirs: dict[str, Path]
) -> None:
    from gcore_core.contract.trainer import TrainRecord

    settings = TorchGeneratorConfig(max_new_tokens=10, temperature=0.8)
    generator = TorchGenerator(settings, tiny.make_context(model_dirs["qwen2"]))
    generator.submit(tiny.make_requests())
    records = [
        TrainRecord(
            ordinal=f.request.ordinal, sample=f.request.sample, minibatch=0, columns=f.columns
        )
        for f in tiny.drain(generator)
    ]
    trainer = open_trainer("qwen2", objective=tiny.Clip())
    trainer.prepare(records, frozenset())
    metrics = trainer.train(0, tiny.make_advantages(records), 1, 1)
    assert 0 < metrics["logprob_gap_mean"] <= metrics["logprob_gap_max"] < 5e-5
    assert metrics["kl"] < 1e-6


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_restored_state_continues_with_the_same_numbers(
    family: str, open_trainer: Any, tmp_path: Path
) -> None:
    settings = {"objective": tiny.Clip(), "schedule": "linear", "weight_decay": 0.1}
    trainer = open_trainer(family, **settings)
    for step in range(2):
        one_step(trainer, step, seed=step, minibatches=2)
    trainer.save(tmp_path)
    assert not {"pkl", "pt", "bin"} & {path.suffix[1:] for path in tmp_path.iterdir()}
    expected = one_step(trainer, 2, seed=2, minibatches=2)
    other = open_trainer(family, **settings)
    other.load(tmp_path)
    assert other.version == 2
    assert one_step(other, 2, seed=2, minibatches=2) == expected
    one, two = weights_of(trainer), weights_of(other)
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)


def test_exported_weights_arrive_whole_in_a_generator(
    open_trainer: Any, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    for family, dtype in (("llama", "float32"), ("qwen2", "float32"), ("qwen2", "bfloat16")):
        trainer = open_trainer(family, dtype=dtype)
        one_step(trainer)
        generator = TorchGenerator(
            TorchGeneratorConfig(dtype=dtype), tiny.make_context(model_dirs[family])
        )
        plan = WeightPlan(trainer.version, trainer.weight_specs())
        generator.begin_weights(plan)
        generator.load_weights(trainer.export_weights())
        generator.commit_weights(plan)
        trainer.save_pretrained(tmp_path / family / dtype)
        fresh = TorchGenerator(
            TorchGeneratorConfig(dtype=dtype), tiny.make_context(tmp_path / family / dtype)
        )
        assert generator.fingerprint() == fresh.fingerprint()
        assert [spec.nbytes for spec in plan.tensors] == [
            array.nbytes for _, array in trainer.export_weights()
        ]
        assert ("lm_head.weight" in generator.fingerprint()) == (
            family == "llama"
        )  # tied in qwen2: once


def test_a_pretrained_directory_holds_model_and_tokenizer(
    open_trainer: Any, tmp_path: Path
) -> None:
    trainer = open_trainer()
    one_step(trainer)
    trainer.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = weights_of(trainer)
    assert stored.keys() == expected.keys()
    assert all(stored[name].tobytes() == expected[name].tobytes() for name in stored)
    assert AutoTokenizer.from_pretrained(tmp_path)("1+2").input_ids == [1, 4, 13, 5]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"


def test_schedules_count_updates() -> None:
    linear = TorchTrainerConfig(
        learning_rate=1.0, schedule="linear", warmup_updates=4, final_fraction=0.2
    )
    assert [rate_at(linear, u, 10) for u in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rate_at(linear, 9, 10) == pytest.approx(0.2)
    cosine = TorchTrainerConfig(learning_rate=1.0, schedule="cosine")
    assert [round(rate_at(cosine, u, 5), 6) for u in range(5)] == [
        1.0,
        0.853553,
        0.5,
        0.146447,
        0.0,
    ]
    assert rate_at(TorchTrainerConfig(learning_rate=0.5), 99, 5) == 0.5


def test_the_rate_of_the_last_update_is_the_final_one(open_trainer: Any) -> None:
    context = {"steps": 2, "updates_per_step": 4}
    trainer = open_trainer(
        schedule="linear", final_fraction=0.5, learning_rate=0.01, context=context
    )
    rates = [one_step(trainer, step, epochs=2, minibatches=2)["learning_rate"] for step in range(2)]
    assert rates == pytest.approx([0.01 * (1 - 0.5 * 3 / 7), 0.005])


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (2, 3)])
def test_a_schedule_goes_on_at_its_step_when_a_step_has_more_or_fewer_updates(
    before: int, after: int, open_trainer: Any, tmp_path: Path
) -> None:
    def opened(updates: int, steps: int = 4) -> Any:
        context = {"steps": steps, "updates_per_step": updates}
        return open_trainer(schedule="linear", learning_rate=0.01, context=context)

    def last_rate(trainer: Any, step: int, updates: int) -> float:
        return float(one_step(trainer, step, minibatches=updates)["learning_rate"])

    first = opened(before)
    for step in range(2):
        last_rate(first, step, before)
    numbers = first.numbers()
    assert (numbers["updates"], numbers["scheduled_steps"]) == (2 * before, 2)
    first.save(tmp_path / "state")
    resumed, whole = opened(after), opened(after)
    resumed.load(tmp_path / "state")
    for step in range(2):
        last_rate(whole, step, after)
    rates = [last_rate(resumed, step, after) for step in (2, 3)]
    assert rates == [last_rate(whole, step, after) for step in (2, 3)]
    assert rates[0] > 0


def test_bfloat16_learns_like_float32(open_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = gradients(open_trainer(), monkeypatch)
    for packing in ("shared_prompt", "padded"):
        rough = gradients(open_trainer(dtype="bfloat16", packing=packing), monkeypatch)
        for name in exact:
            assert rough[name].dtype == torch.float32
            cosine = torch.cosine_similarity(rough[name].flatten(), exact[name].flatten(), dim=0)
            assert cosine > 0.98, name  # 8 bits of mantissa through two layers


# -- what goes wrong -------------------------------------------------------------------------------


def test_an_infinite_loss_names_its_records(open_trainer: Any, tmp_path: Path) -> None:
    trainer = open_trainer(dump_dir=str(tmp_path), budget_tokens=60, packing="padded")
    before = weights_of(trainer)
    records = tiny.make_records()
    advantages = tiny.make_advantages(records)
    advantages[6] = np.inf
    trainer.prepare(records, frozenset())
    with pytest.raises(NonFiniteLoss, match=r"in update 0 of step 3, rank 0") as caught:
        trainer.train(3, advantages, 1, 1)
    assert {"step": 3, "update": 0, "rank": 0}.items() <= caught.value.facts.items()
    with safe_open(caught.value.facts["file"], "np") as file:
        keys = set(file.keys())
        found = file.get_tensor(f"{records[6].ordinal}/{records[6].sample}/action_ids")
    np.testing.assert_array_equal(found, records[6].columns["action_ids"])
    assert 0 < len({key.rsplit("/", 1)[0] for key in keys}) < len(records)  # the micro-batch alone
    assert all(
        before[name].tobytes() == array.tobytes() for name, array in weights_of(trainer).items()
    )


def test_an_infinite_gradient_of_a_finite_loss_is_detected(
    open_trainer: Any, tmp_path: Path
) -> None:
    class Root(tiny.Reinforce):
        def loss(self, columns: Any, current: Any) -> Any:
            zero = (current["logp"] - current["logp"].detach()).clamp(min=0)
            return zero.sqrt().sum(), columns["mask"].sum().float(), {}

    with pytest.raises(NonFiniteLoss, match="gradient norm nan|gradient norm inf"):
        one_step(open_trainer(objective=Root(), dump_dir=str(tmp_path)))


class Hiding(tiny.Clip):
    """Has a finite loss whatever the log-probs are."""

    def loss(self, columns: Any, current: Any) -> Any:
        finite = {name: torch.nan_to_num(column) for name, column in columns.items()}
        return super().loss(finite, {"logp": torch.nan_to_num(current["logp"])})


@pytest.mark.parametrize(
    ("objective", "steps", "what"),
    [
        (tiny.Clip(), [2], "loss nan in update 1 of step 0"),
        (tiny.Clip(beta=0.1), [1, 1], "loss nan in update 0 of step 1"),
        (Hiding(), [2], "log-probs that are not finite in update 1 of step 0"),
        (Hiding(beta=0.1), [1, 1], "log-probs that are not finite in update 0 of step 1"),
    ],
    ids=["ratio", "reference", "hidden ratio", "hidden reference"],
)
def test_weights_that_diverged_end_a_run_as_what_they_are(
    objective: Any,
    steps: list[int],
    what: str,
    open_trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Their log-probs are no numbers, so differences of those are no numbers and not 0.

    steps: updates of each step.
    """
    trainer = open_trainer(objective=objective, resplit_every=0, dump_dir=str(tmp_path))
    engine = trainer._engine
    update = engine.update

    def diverges(rate: float, clip: float) -> float:
        norm = update(rate, clip)
        with torch.no_grad():
            next(iter(engine._tensors.values())).fill_(math.nan)
        return norm

    monkeypatch.setattr(engine, "update", diverges)
    with pytest.raises(NonFiniteLoss, match=what) as caught:
        for step, updates in enumerate(steps):
            one_step(trainer, step, minibatches=updates)
    assert Path(caught.value.facts["file"]).is_file()


def test_an_infinite_gradient_is_not_taken_for_one_that_depends_on_the_cut(
    open_trainer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = open_trainer(resplit_every=1, dump_dir=str(tmp_path))
    gradient = trainer._engine.gradient

    def infinite() -> Any:
        found = gradient()
        next(iter(found.values())).fill_(math.inf)
        return found

    monkeypatch.setattr(trainer._engine, "gradient", infinite)
    with pytest.raises(NonFiniteLoss, match="gradient norm inf in update 0 of step 0"):
        one_step(trainer)


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_in_one_cut_alone_is_told_so(number: float) -> None:
    first = {"head": torch.ones(2), "layer": torch.ones(2)}
    second = {"head": torch.ones(2), "layer": torch.tensor([1.0, number])}
    ranks = Ranks(tiny.make_context(Path()), torch.device("cpu"))
    with pytest.raises(
        TrainingError, match="not finite where its minibatch is cut otherwise"
    ) as caught:
        check_same(first, second, ranks, 1e-3, "step 0, update 0")
    assert caught.value.facts["tensor"] == "layer"


@pytest.mark.parametrize(
    ("config", "says", "not_said"),
    [
        (
            {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64}},
            "within 64 tokens (original_max_position_embeddings), or let every prompt be longer",
            "dropout",
        ),
        (
            {
                "rope_parameters": {"rope_type": "longrope"},
                "original_max_position_embeddings": 32,
                "max_position_embeddings": 128,
            },
            "within 32 tokens",
            "dropout",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 128},
            "within 128 tokens (max_position_embeddings)",
            "longer",
        ),
        ({"rope_parameters": {"rope_type": "llama3"}}, "dropout", "rope_type"),
        (None, "dropout", "rope_type"),
    ],
    ids=["longrope", "longrope outside", "dynamic", "llama3", "unknown"],
)
def test_angles_that_the_longest_record_decides_are_named_where_a_gradient_depends_on_the_cut(
    config: dict[str, Any] | None, says: str, not_said: str
) -> None:
    first, second = ({"head": torch.full((2,), number)} for number in (1.0, 1.1))
    ranks = Ranks(tiny.make_context(Path()), torch.device("cpu"))
    with pytest.raises(TrainingError, match="depends on how its minibatch is cut") as caught:
        check_same(first, second, ranks, 1e-3, "step 0, update 0", config=config)
    assert says in caught.value.todo
    assert not_said not in caught.value.todo


def test_an_unmet_requirement_of_the_objective_is_named(open_trainer: Any) -> None:
    class Critic(tiny.Reinforce):
        requires = frozenset({"values", "old_logp"})

    class Guided(tiny.Reinforce):
        requires = frozenset({"scores", "old_logp"})

    with pytest.raises(ConfigError, match="requires old_logp, which this trainer does not compute"):
        open_trainer(objective=Critic())  # a value head has no log-probs
    with pytest.raises(ConfigError, match="requires scores, which this trainer does not compute"):
        open_trainer(objective=Guided())
    with pytest.raises(ConfigError, match="kl_k1 need a reference model"):
        open_trainer().prepare(tiny.make_records(), frozenset({"kl_k1"}))
    with pytest.raises(ConfigError, match="no preparation scalar named kl_k9"):
        open_trainer().prepare(tiny.make_records(), frozenset({"kl_k9"}))


def test_sharing_prompts_is_refused_for_models_where_it_changes_log_probs(
    model_dirs: dict[str, Path], tmp_path: Path, open_trainer: Any
) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    tiny.save_model(tmp_path, "llama")
    BloomForCausalLM(
        BloomConfig(vocab_size=tiny.VOCABULARY, hidden_size=32, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path)
    context = tiny.make_context(tmp_path, tiny.Reinforce())
    with pytest.raises(ConfigError, match="shared_prompt does not give this model's log-probs"):
        TorchTrainer(TorchTrainerConfig(packing="shared_prompt"), context)
    trainer = TorchTrainer(TorchTrainerConfig(), context)  # ALiBi: positions come from the mask
    assert trainer._layouts == {"padded"}
    one_step(trainer)


def test_a_bad_model_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of(path: str) -> str:
        with pytest.raises(DataError) as caught:
            TorchTrainer(TorchTrainerConfig(), tiny.make_context(Path(path), tiny.Reinforce()))
        return str(caught.value)

    assert "model directory does not exist" in error_of(str(tmp_path / "nowhere"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "neither a directory nor reachable" in error_of("some/model")
    directory = tmp_path / "model"
    directory.mkdir()
    assert "has no config.json" in error_of(str(directory))
    tiny.save_model(directory, "llama")
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text("{")
    assert "config is not JSON" in error_of(str(directory))
    (directory / "config.json").write_text('{"model_type": "unheard-of"}')
    assert "cannot load the model" in error_of(str(directory))
    (directory / "config.json").write_text(config)
    tiny.save_tokenizer(directory, extra=2)
    assert "tokenizer has 24 tokens, but the model embeds only 22" in error_of(str(directory))
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "no weights in safetensors" in error_of(str(directory))


def test_a_state_from_before_the_first_update_has_no_moments(
    open_trainer: Any, tmp_path: Path
) -> None:
    trainer, fresh = open_trainer(learning_rate=0.01), open_trainer(learning_rate=0.01)
    trainer.save(tmp_path)
    for step in range(2):
        one_step(trainer, step)
    trainer.load(tmp_path)
    one_step(trainer, 0)
    one_step(fresh, 0)
    for name, array in weights_of(trainer).items():
        assert array.tobytes() == weights_of(fresh)[name].tobytes(), name


def test_a_state_of_another_model_is_refused(
    open_trainer: Any, tmp_path: Path, model_dirs: dict[str, Path]
) -> None:
    with pytest.raises(DataError, match="trainer state cannot be read"):
        open_trainer().load(tmp_path)
    open_trainer("qwen2").save(tmp_path)
    with pytest.raises(DataError, match="trainer state is of another model"):
        open_trainer("llama").load(tmp_path)


def test_settings_out_of_range_are_named() -> None:
    for settings, match in (
        ({"betas": [0.9]}, "betas: must be two numbers"),
        ({"budget_tokens": 0}, "budget_tokens: must be positive"),
        ({"final_fraction": 2.0}, r"final_fraction: must be in 0\.\.1"),
        ({"attn_implementation": "flash_attention_2"}, "needs packing: padded"),
    ):
        with pytest.raises(ConfigError, match=match):
            TorchTrainerConfig(**settings)
    for settings, match in (
        ({"top_p": 0.0}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be positive"),
    ):
        with pytest.raises(ConfigError, match=match):
            TorchGeneratorConfig(**settings)


def test_old_log_probs_that_are_computed_anew_are_refused(
    open_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then every ratio is 1, and nothing is ever clipped."""
    trainer = open_trainer(objective=tiny.Clip(), resplit_every=0)
    loss = type(trainer)._loss

    def planted(self: Any, pass_: Any, batch: Any, logp: Any, entropies: Any) -> Any:
        batch.columns["old_logp"] = logp.detach()
        return loss(self, pass_, batch, logp, entropies)

    monkeypatch.setattr(type(trainer), "_loss", planted)
    with pytest.raises(TrainingError, match=r"update 1.*every ratio is exactly 1"):
        one_step(trainer, minibatches=2)


def test_a_rate_of_0_leaves_every_ratio_at_1_without_complaint(open_trainer: Any) -> None:
    trainer = open_trainer(objective=tiny.Clip(), learning_rate=0.0)
    assert one_step(trainer, minibatches=2, epochs=2)["updates"] == 4


def test_an_update_without_a_gradient_moves_by_its_moments_and_ends_no_run(
    open_trainer: Any,
) -> None:
    """All rewards of its minibatch were equal, as near the end of a run that has learned."""
    trainer = open_trainer(objective=tiny.Clip(), learning_rate=0.01, resplit_every=0)
    one_step(trainer)
    records = tiny.make_records(minibatches=2)
    trainer.prepare(records, frozenset())
    advantages = np.array([float(record.minibatch) for record in records])
    assert trainer.train(1, advantages, 2, 1)["updates"] == 2


class PerMicroBatch(tiny.Reinforce):
    """Divides by what its micro-batch holds: the mean of means that reports tell of."""

    def loss(self, columns: Any, current: Any) -> Any:
        loss, weight, metrics = super().loss(columns, current)
        return loss / weight, weight, metrics


@pytest.mark.parametrize("packing", ["auto", "padded"])
def test_a_gradient_that_depends_on_the_cut_of_its_minibatch_is_refused(
    packing: str, open_trainer: Any
) -> None:
    trainer = open_trainer(packing=packing, objective=PerMicroBatch())
    with pytest.raises(TrainingError, match="depends on how its minibatch is cut"):
        one_step(trainer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_penalty_by_the_reference_alone_is_rounding_at_first_and_ends_no_run(
    dtype: str, open_trainer: Any
) -> None:
    """Where all rewards of a minibatch are equal, and the policy is still its reference."""
    trainer = open_trainer(dtype=dtype, objective=tiny.Clip(beta=0.1), resplit_every=1)
    records = tiny.make_records()
    trainer.prepare(records, frozenset())
    assert trainer.train(0, np.zeros(len(records)), 1, 1)["updates"] == 1


@pytest.mark.parametrize("objective", [tiny.Reinforce, tiny.Clip])
def test_computing_a_gradient_again_changes_nothing(objective: Any, open_trainer: Any) -> None:
    watched = open_trainer(objective=objective(), resplit_every=1)
    plain = open_trainer(objective=objective(), resplit_every=0)
    for step in range(3):
        assert one_step(watched, step=step, minibatches=2) == one_step(
            plain, step=step, minibatches=2
        )
    weights = weights_of(plain)
    assert all((array == weights[name]).all() for name, array in weights_of(watched).items())


class WrongSign(tiny.Reinforce):
    """Is subtracted where it should be added."""

    def loss(self, columns: Any, current: Any) -> Any:
        loss, weight, metrics = super().loss(columns, current)
        return -loss, weight, metrics


class Likelihood(tiny.Reinforce):
    """Raises all log-probs alike, whatever their advantage."""

    def loss(self, columns: Any, current: Any) -> Any:
        _, weight, metrics = super().loss(columns, current)
        return -(current["logp"] * columns["mask"]).sum(), weight, metrics


def test_a_loss_of_the_wrong_sign_is_refused(open_trainer: Any) -> None:
    with pytest.raises(TrainingError, match=r"step 0, update 0: the loss has the wrong sign"):
        one_step(open_trainer(objective=WrongSign()))
    assert one_step(open_trainer(objective=Likelihood()))["updates"] == 1


def test_an_optimizer_that_writes_old_weights_back_is_refused(
    open_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = open_trainer(resplit_every=1, learning_rate=1e-3)
    engine = trainer._engine
    update = engine.update

    def writes_back(rate: float, clip: float) -> float:
        with torch.no_grad():
            next(iter(engine._tensors.values())).add_(0.01)
        return update(rate, clip)

    for step in range(3):
        one_step(trainer, step=step)
    monkeypatch.setattr(engine, "update", writes_back)
    with pytest.raises(TrainingError, match=r"step 3.* as far as AdamW can.* 0.001"):
        one_step(trainer, step=3)
