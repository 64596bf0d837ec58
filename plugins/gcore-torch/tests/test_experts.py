"""Mixtures of experts: names of their weights, replay of their routers, their balance."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.experts import refuse_experts
from gcore_language.router_books import RouterBooks
from gcore_language.routing import Routers, routers_of
from gcore_language.tiny import EXPERT_CONFIGS, save_model
from gcore_testing.runs import run_together
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.trainer import TorchTrainer
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from gcore_core.contract.columns import ROUTING
from gcore_core.contract.errors import ConfigError, ContractError, DataError
from gcore_core.contract.records import WeightPlan
from gcore_core.contract.trainer import TrainRecord
from tests.support import expert_ranks
from tests.support import language_models as tiny

pytestmark = pytest.mark.rest

FAMILIES = sorted(EXPERT_CONFIGS)
EXPERTS = 8
LAYERS = 2
TOP_K = 2


@pytest.fixture(scope="session")
def expert_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, directory in found.items():
        save_model(directory, family)
    return found


@pytest.fixture
def open_trainer(expert_dirs: dict[str, Path]) -> Callable[..., TorchTrainer]:
    def make(family: str = "qwen3_moe", objective: Any = None, **config: Any) -> TorchTrainer:
        settings = TorchTrainerConfig(**({"learning_rate": 1e-3} | config))
        objective = objective or tiny.Reinforce()
        return TorchTrainer(settings, tiny.make_context(expert_dirs[family], objective))

    return make


@pytest.fixture
def open_generator(expert_dirs: dict[str, Path]) -> Callable[..., TorchGenerator]:
    def make(family: str = "qwen3_moe", **config: Any) -> TorchGenerator:
        settings = TorchGeneratorConfig(**({"max_new_tokens": 8} | config))
        return TorchGenerator(settings, tiny.make_context(expert_dirs[family], role="rollout"))

    return make


def plain_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def with_random_routing(records: Sequence[TrainRecord], seed: int = 3) -> list[TrainRecord]:
    """Gives records experts that no router would choose; a group's share those of their prompt."""
    made = []
    for record in records:
        columns = record.columns
        prompt = np.random.default_rng([seed, record.ordinal])
        action = np.random.default_rng([seed, record.ordinal, record.sample])
        counts = (prompt, len(columns["prompt_ids"])), (action, len(columns["action_ids"]) - 1)
        experts = [
            draw.permuted(np.tile(np.arange(EXPERTS), (tokens, LAYERS, 1)), axis=-1)[..., :TOP_K]
            for draw, tokens in counts
        ]
        routing = np.concatenate(experts).astype(np.uint8)
        made.append(replace(record, columns={**columns, ROUTING: routing}))
    return made


class ReplayingReference:
    """transformers' model, one record at a time, whose routers take given experts.

    Router: written anew from the equations, softmax, choice, normalised weights.
    """

    def __init__(self, directory: Path) -> None:
        self.model = plain_model(directory)
        self.logits: list[torch.Tensor] = []
        self.experts = torch.zeros(0)
        for layer, router in enumerate(routers_of(self.model)):
            router.forward = self._router(layer, router)

    def _router(self, layer: int, router: Any) -> Any:
        def forward(hidden: torch.Tensor) -> Any:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
            self.logits.append(logits)
            experts = self.experts[: len(logits), layer]
            odds = torch.stack([row[chosen] for row, chosen in zip(logits, experts, strict=True)])
            weights = odds.exp() / odds.exp().sum(-1, keepdim=True)
            return logits, weights, experts

        return forward

    def logp(self, record: TrainRecord) -> torch.Tensor:
        """Log-probs of a record; ``logits`` then has those of its fed tokens, by layer."""
        self.logits = []
        routing = record.columns[ROUTING].astype(np.int64)
        last = np.arange(TOP_K)[None, None].repeat(LAYERS, 1)  # of the last action, which is fed
        self.experts = torch.from_numpy(np.concatenate([routing, last]))
        logp = tiny.logp_of(self.model, record)[0]
        self.logits = [layer[: len(routing)] for layer in self.logits]
        return logp


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_pushes_have_names_and_bytes_of_the_checkpoint(
    family: str,
    expert_dirs: dict[str, Path],
    open_trainer: Callable[..., TorchTrainer],
    open_generator: Callable[..., TorchGenerator],
    tmp_path: Path,
) -> None:
    expected = load_file(expert_dirs[family] / "model.safetensors")
    trainer = open_trainer(family)
    pushed = {spec: array.copy() for spec, array in trainer.export_weights()}
    assert {spec.name for spec in pushed} == expected.keys()
    for spec, array in pushed.items():
        assert spec.shape == expected[spec.name].shape
        assert array.tobytes() == expected[spec.name].tobytes(), spec.name
    generator = open_generator(family)
    assert {(s.name, s.shape) for s in generator.weight_specs()} == {
        (s.name, s.shape) for s in pushed
    }
    trainer.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(saved[name].tobytes() == expected[name].tobytes() for name in saved)
    assert trainer.diagnose_export() == []


@pytest.mark.parametrize("sleep", ["keep", "discard"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_push_makes_the_generator_sample_with_the_trained_experts(
    family: str,
    sleep: str,
    open_trainer: Callable[..., TorchTrainer],
    open_generator: Callable[..., TorchGenerator],
) -> None:
    trainer = open_trainer(family, learning_rate=3e-2)
    records = tiny.make_records()
    trainer.prepare(records, frozenset())
    trainer.train(0, tiny.make_advantages(records), 1, 1)
    generator = open_generator(family, sleep=sleep)
    before = generator.fingerprint()
    generator.sleep()
    generator.wake()
    plan = WeightPlan(1, trainer.weight_specs())
    generator.begin_weights(plan)
    generator.load_weights(trainer.export_weights())
    generator.commit_weights(plan)
    after = generator.fingerprint()
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in after if ".0.down_proj" in name)
    generator.submit(tiny.make_requests())
    sampled = tiny.drain(generator)
    scored = trainer.logprobs([record.columns for record in sampled])
    for record, logp in zip(sampled, scored, strict=True):
        # float32: another batch alone moves a log-prob by 3e-5
        np.testing.assert_allclose(logp, record.columns["logp"], atol=1e-4)


# -- what a generator says -------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_records_say_which_experts_computed_each_token(
    family: str, expert_dirs: dict[str, Path], open_generator: Callable[..., TorchGenerator]
) -> None:
    """They are those of transformers' own forward pass over the whole record."""
    generator = open_generator(family)
    generator.submit(tiny.make_requests())
    model = plain_model(expert_dirs[family])
    for record in tiny.drain(generator):
        columns = record.columns
        ids = np.concatenate([columns["prompt_ids"], columns["action_ids"][:-1]])
        assert columns[ROUTING].dtype == np.uint8
        assert columns[ROUTING].shape == (len(ids), LAYERS, TOP_K)
        with torch.no_grad():
            out = model(torch.from_numpy(ids.astype(np.int64))[None], output_router_logits=True)
        chosen = torch.stack([layer.topk(TOP_K).indices for layer in out.router_logits], 1)
        np.testing.assert_array_equal(np.sort(columns[ROUTING]), np.sort(chosen.numpy()))


def test_samples_that_go_on_under_new_weights_keep_the_experts_that_sampled_them(
    open_generator: Callable[..., TorchGenerator],
) -> None:
    generator = open_generator()
    requests = tiny.make_requests(groups=2, samples=1)
    generator.submit(requests)
    for _ in range(3):
        generator.step()
    rows = generator._rows
    before = [np.concatenate(pieces) for pieces in rows.routing]
    plan = WeightPlan(1, generator.weight_specs())
    draw = np.random.default_rng(0)
    generator.begin_weights(plan)
    generator.load_weights(
        (spec, draw.normal(0, 0.3, spec.shape).astype(np.float32).view(np.uint8).reshape(-1))
        for spec in plan.tensors
    )
    generator.commit_weights(plan)
    ended = tiny.drain(generator)
    assert len(ended) == len(before)
    for record, early in zip(ended, before, strict=True):
        routing = record.columns[ROUTING]
        actions = len(record.columns["action_ids"])
        assert len(routing) == len(record.columns["prompt_ids"]) + actions - 1
        np.testing.assert_array_equal(routing[: len(early)], early)


def test_routing_never_leaves_the_column_out(open_generator: Callable[..., TorchGenerator]) -> None:
    generator = open_generator(routing="never")
    generator.submit(tiny.make_requests(groups=1))
    assert all(ROUTING not in record.columns for record in tiny.drain(generator))


# -- replay ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["padded", "shared_prompt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_update_with_replay_and_balance_matches_plain_torch(
    family: str,
    packing: str,
    expert_dirs: dict[str, Path],
    open_trainer: Callable[..., TorchTrainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients are those of transformers' model, record by record, with routers of our own.

    The balance is that of transformers, layer by layer; it counts k choices of a token as k.
    """
    coefficient = 0.3
    trainer = open_trainer(
        family, packing=packing, router_aux_loss=coefficient, budget_tokens=64, clip_grad_norm=0
    )
    records = with_random_routing(tiny.make_records())
    advantages = tiny.make_advantages(records)
    found: dict[str, torch.Tensor] = {}
    engine = trainer._engine

    def keep(*_: Any, **__: Any) -> None:
        found.update({name: p.grad.clone() for name, p in engine._tensors.items()})

    monkeypatch.setattr(engine._optimizer, "step", keep)
    trainer.prepare(records, frozenset())
    metrics = trainer.train(0, advantages, 1, 1)

    reference = ReplayingReference(expert_dirs[family])
    loss = torch.zeros(())
    weight = 0.0
    logits: list[list[torch.Tensor]] = []
    for record, advantage in zip(records, advantages, strict=True):
        mask = torch.from_numpy(record.columns["action_mask"].astype(np.float32))
        loss = loss - (float(advantage) * reference.logp(record) * mask).sum()
        weight += float(mask.sum())
        logits.append(reference.logits)
    balance = torch.zeros(())
    for layer in range(LAYERS):
        probabilities = torch.cat([of[layer] for of in logits]).softmax(-1)
        experts = np.concatenate([record.columns[ROUTING][:, layer] for record in records])
        share = np.bincount(experts.reshape(-1), minlength=EXPERTS) / experts.size
        mean = probabilities.mean(0)
        balance = balance + EXPERTS * (torch.from_numpy(share) * mean).sum() / LAYERS
    (loss / weight + coefficient * balance).backward()
    assert metrics["router_aux_loss"] == pytest.approx(float(balance.detach()), rel=1e-5)
    for name, parameter in reference.model.named_parameters():
        if name in found:
            # float32, gradients up to 1: sums in another order
            np.testing.assert_allclose(found[name], parameter.grad, atol=3e-5, err_msg=name)


def test_the_balance_of_chosen_experts_is_that_of_transformers(
    expert_dirs: dict[str, Path], open_trainer: Callable[..., TorchTrainer]
) -> None:
    """Without replay; transformers counts k choices of a token as k, this as one."""
    trainer = open_trainer(router_aux_loss=0.1, router_replay="never")
    records = tiny.make_records(groups=1)
    trainer.prepare(records, frozenset())
    metrics = trainer.train(0, tiny.make_advantages(records), 1, 1)
    model = plain_model(expert_dirs["qwen3_moe"])
    layers: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    for record in records:
        ids = np.concatenate([record.columns["prompt_ids"], record.columns["action_ids"][:-1]])
        with torch.no_grad():
            out = model(torch.from_numpy(ids.astype(np.int64))[None], output_router_logits=True)
        for layer, logits in zip(layers, out.router_logits, strict=True):
            layer.append(logits)
    losses = [
        float(load_balancing_loss_func((torch.cat(layer),), EXPERTS, TOP_K)) for layer in layers
    ]
    assert metrics["router_aux_loss"] == pytest.approx(np.mean(losses) / TOP_K, rel=1e-5)
    assert "router_differ_share" not in metrics
    entropies = [
        torch.distributions.Categorical(logits=torch.cat(rows)).entropy() for rows in layers
    ]
    assert metrics["router_entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_what_routers_choose_changes_nothing(
    family: str,
    open_trainer: Callable[..., TorchTrainer],
    open_generator: Callable[..., TorchGenerator],
) -> None:
    generator = open_generator(family)
    generator.submit(tiny.make_requests())
    records = [record.columns for record in tiny.drain(generator)]
    own = open_trainer(family, router_replay="never").logprobs(records)
    replayed = open_trainer(family, router_replay="always").logprobs(records)
    for one, other in zip(own, replayed, strict=True):
        # the two weights of a token may come in the other order, and their sum is rounded
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_metrics_say_how_often_the_trainer_would_choose_others(
    open_trainer: Callable[..., TorchTrainer], open_generator: Callable[..., TorchGenerator]
) -> None:
    generator = open_generator()
    generator.submit(tiny.make_requests())
    sampled = [
        TrainRecord(
            ordinal=record.request.ordinal,
            sample=record.request.sample,
            minibatch=0,
            columns=record.columns,
        )
        for record in tiny.drain(generator)
    ]
    trainer = open_trainer(packing="padded")
    trainer.prepare(sampled, frozenset())
    metrics = trainer.train(0, tiny.make_advantages(sampled), 1, 1)
    assert metrics["router_differ_share"] == 0
    assert 1 / EXPERTS < metrics["router_busiest_share"] < 1
    assert 0 < metrics["router_entropy"] < np.log(EXPERTS)
    changed = sampled[0].columns[ROUTING].copy()
    changed[0, 0] = (changed[0, 0] + 1) % EXPERTS
    sampled[0] = replace(sampled[0], columns={**sampled[0].columns, ROUTING: changed})
    other = open_trainer(packing="padded")
    other.prepare(sampled, frozenset())
    share = other.train(0, tiny.make_advantages(sampled), 1, 1)["router_differ_share"]
    tokens = sum(len(record.columns[ROUTING]) for record in sampled)
    # the first layer's token differs, and what the second layer makes of it may
    assert 1 / (LAYERS * tokens) <= share <= len(sampled[0].columns[ROUTING]) / tokens


def test_in_bfloat16_a_pair_trains_with_replay(
    open_trainer: Callable[..., TorchTrainer], open_generator: Callable[..., TorchGenerator]
) -> None:
    generator = open_generator(dtype="bfloat16")
    generator.submit(tiny.make_requests())
    sampled = [
        TrainRecord(ordinal=i, sample=0, minibatch=0, columns=record.columns)
        for i, record in enumerate(tiny.drain(generator))
    ]
    trainer = open_trainer(dtype="bfloat16", router_replay="always", router_aux_loss=0.1)
    trainer.prepare(sampled, frozenset())
    metrics = trainer.train(0, tiny.make_advantages(sampled), 1, 1)
    # logits of size 2 have an eighth bit of 0.008; a few such roundings add up
    assert 0 < metrics["logprob_gap_mean"] < 0.05
    assert metrics["grad_norm"] > 0


def test_gradients_are_the_same_with_layers_computed_again(
    open_trainer: Callable[..., TorchTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient checkpointing; replay and balance hold in the second pass, too."""
    found: list[dict[str, torch.Tensor]] = []
    for again in (False, True):
        trainer = open_trainer(
            gradient_checkpointing=again, router_aux_loss=0.3, budget_tokens=64, packing="padded"
        )
        engine = trainer._engine
        gradients: dict[str, torch.Tensor] = {}

        def keep(*_: Any, engine: Any = engine, into: Any = gradients, **__: Any) -> None:
            into.update({name: p.grad.clone() for name, p in engine._tensors.items()})

        monkeypatch.setattr(engine._optimizer, "step", keep)
        records = with_random_routing(tiny.make_records())
        trainer.prepare(records, frozenset())
        trainer.train(0, tiny.make_advantages(records), 1, 1)
        found.append(gradients)
    for name, gradient in found[0].items():
        np.testing.assert_allclose(gradient, found[1][name], atol=1e-6, err_msg=name)


def test_the_reference_takes_the_same_experts(open_trainer: Callable[..., TorchTrainer]) -> None:
    """Before any update it is the policy, so their distance is 0 whatever was replayed."""
    trainer = open_trainer(objective=tiny.Clip(beta=0.1))
    records = with_random_routing(tiny.make_records())
    scalars = trainer.prepare(records, frozenset({"kl_k1"}))
    assert all(row["kl_k1"] == 0 for row in scalars)
    trainer.train(0, tiny.make_advantages(records), 1, 1)


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("family", "counts"), [("qwen3_moe", (2, 4)), ("mixtral", (2,))])
def test_sharded_ranks_match_one_rank(
    family: str, counts: tuple[int, ...], expert_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Weights and metrics after three steps with replay and balance."""
    found = {}
    for ranks in (1, *counts):
        work = tmp_path / str(ranks)
        (work / "meet").mkdir(parents=True)
        given = [str(ranks), str(expert_dirs[family]), str(work)]
        run_together([["-m", expert_ranks.__name__, str(rank), *given] for rank in range(ranks)])
        found[ranks] = json.loads((work / "numbers.json").read_text())
    for ranks in counts:
        for alone, together in zip(found[1]["metrics"], found[ranks]["metrics"], strict=True):
            assert alone == pytest.approx(together, rel=1e-4, abs=1e-6)
        for name, values in found[1]["weights"].items():
            np.testing.assert_allclose(
                values, found[ranks]["weights"][name], atol=1e-5, err_msg=f"{ranks} {name}"
            )


# -- what is refused -------------------------------------------------------------------------------


def test_the_fused_decoder_is_refused(open_generator: Callable[..., TorchGenerator]) -> None:
    with pytest.raises(ConfigError, match="computes no experts"):
        open_generator(decoder="fused")


@pytest.mark.parametrize("setting", [{"router_replay": "always"}, {"router_aux_loss": 0.1}])
def test_settings_of_experts_are_refused_for_a_dense_model(
    setting: dict[str, Any], model_dirs: dict[str, Path]
) -> None:
    context = tiny.make_context(model_dirs["llama"], tiny.Reinforce())
    with pytest.raises(ConfigError, match="has no experts"):
        TorchTrainer(TorchTrainerConfig(**setting), context)


def test_a_negative_coefficient_is_refused() -> None:
    with pytest.raises(ConfigError, match="router_aux_loss"):
        TorchTrainerConfig(router_aux_loss=-1.0)


def test_replay_always_refuses_records_without_experts(
    open_trainer: Callable[..., TorchTrainer],
) -> None:
    trainer = open_trainer(router_replay="always")
    with pytest.raises(DataError, match="has no column 'routing'"):
        trainer.prepare(tiny.make_records(groups=1), frozenset())


def test_experts_of_another_number_of_tokens_are_refused(
    open_trainer: Callable[..., TorchTrainer],
) -> None:
    records = with_random_routing(tiny.make_records(groups=1))
    short = {**records[0].columns, ROUTING: records[0].columns[ROUTING][1:]}
    with pytest.raises(ContractError, match="has the experts of"):
        open_trainer().prepare([replace(records[0], columns=short)], frozenset())


def test_an_export_of_other_experts_is_found(
    open_trainer: Callable[..., TorchTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = open_trainer("mixtral")
    right = [(spec, array.copy()) for spec, array in trainer.export_weights()]
    wrong = "model.layers.1.block_sparse_moe.experts.5.w3.weight"
    exported = [(spec, array + (spec.name == wrong)) for spec, array in right]
    monkeypatch.setattr(trainer._engine, "export_weights", lambda: iter(exported))
    (finding,) = trainer.diagnose_export()
    assert wrong in finding.text and f"1 of {len(right)} tensors" in finding.text


def test_a_trainer_without_experts_refuses_a_mixture(expert_dirs: dict[str, Path]) -> None:
    config = AutoConfig.from_pretrained(expert_dirs["mixtral"])
    with pytest.raises(ConfigError, match="has no experts, and the model is a mixtral"):
        refuse_experts(config, "policy")


def test_books_of_no_step_are_empty(expert_dirs: dict[str, Path]) -> None:
    class Alone:
        def sum(self, values: list[float]) -> list[float]:
            return values

    routers = Routers(plain_model(expert_dirs["mixtral"]), replays=True)
    assert RouterBooks(routers, Alone(), 0.0).metrics() == {}  # type: ignore[arg-type]
