"""Mixtures of experts on one rank in this process, with the real library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.tiny import EXPERT_CONFIGS
from gcore_megatron.config import MegatronTrainerConfig
from safetensors.numpy import load_file

from gcore_core.contract.columns import ROUTING
from gcore_core.contract.errors import ConfigError, DataError
from tests.support import expert_trainers as experts
from tests.support import language_models as tiny
from tests.support import megatron_trainers as tools
from tests.support.value_ranks import Squares

pytestmark = pytest.mark.engine

FAMILIES = [*sorted(EXPERT_CONFIGS), "mixed"]


@pytest.fixture(scope="module")
def expert_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return experts.save_models(tmp_path_factory.mktemp("experts"), FAMILIES)


@pytest.fixture
def open_trainer(expert_dirs: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Opens trainers, of which one is open at a time: a process has one set of groups."""
    from gcore_megatron.trainer import MegatronTrainer

    opened: list[Any] = []

    def make(family: str = "qwen3_moe", objective: Any = None, **config: Any) -> Any:
        while opened:
            opened.pop().close()
        settings = MegatronTrainerConfig(**({"learning_rate": 1e-3} | config))
        context = tiny.make_context(expert_dirs[family], objective or tiny.Reinforce())
        opened.append(MegatronTrainer(settings, context))
        return opened[-1]

    yield make
    while opened:
        opened.pop().close()


def gradients_of(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The dict that an update fills with whole gradients, in place of making a step."""
    from gcore_megatron import convert

    engine = trainer._engine
    found: dict[str, torch.Tensor] = {}

    def keep() -> None:
        grads = {name: parameter.main_grad for name, parameter in engine._parameters.items()}
        like = next(iter(grads.values()))
        for piece, whole in convert.gather(engine._pieces, grads.__getitem__, like):
            found[piece.name] = whole.clone()

    monkeypatch.setattr(engine._optimizer, "step_with_ready_grads", keep)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_weights_have_names_and_bytes_of_the_checkpoint(
    family: str, expert_dirs: dict[str, Path], open_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    expected = load_file(expert_dirs[family] / "model.safetensors")
    trainer = open_trainer(family)
    pushed = {spec: array.copy() for spec, array in trainer.export_weights()}
    assert {spec.name: spec.shape for spec in pushed} == {
        name: array.shape for name, array in expected.items()
    }
    for spec, array in pushed.items():
        assert array.tobytes() == expected[spec.name].tobytes(), spec.name
    trainer.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {n: a.tobytes() for n, a in saved.items()} == {
        n: a.tobytes() for n, a in expected.items()
    }


@pytest.mark.parametrize("packing", ["padded", "shared_prompt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_update_with_replay_and_balance_matches_plain_transformers(
    family: str,
    packing: str,
    expert_dirs: dict[str, Path],
    open_trainer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients are those of transformers' model, record by record, whose routers are written anew
    from the equations; the balance too.
    """
    coefficient = 0.3
    trainer = open_trainer(
        family, packing=packing, router_aux_loss=coefficient, budget_tokens=64, clip_grad_norm=0
    )
    found = gradients_of(trainer, monkeypatch)
    records = experts.with_random_routing(tiny.make_records())
    advantages = tiny.make_advantages(records)
    trainer.prepare(records, frozenset())
    metrics = trainer.train(0, advantages, 1, 1)
    expected, balance = experts.plain_gradients(
        expert_dirs[family], records, advantages, coefficient
    )
    assert metrics["router_aux_loss"] == pytest.approx(balance, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # float32, gradients up to 1: sums in another order
        np.testing.assert_allclose(found[name], gradient, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixed"])
def test_without_records_experts_routers_choose_and_the_balance_is_of_their_choices(
    family: str,
    expert_dirs: dict[str, Path],
    open_trainer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = open_trainer(family, router_aux_loss=0.3, budget_tokens=64, clip_grad_norm=0)
    found = gradients_of(trainer, monkeypatch)
    records = tiny.make_records()
    advantages = tiny.make_advantages(records)
    trainer.prepare(records, frozenset())
    metrics = trainer.train(0, advantages, 1, 1)
    expected, balance = experts.plain_gradients(expert_dirs[family], records, advantages, 0.3)
    assert metrics["router_aux_loss"] == pytest.approx(balance, rel=1e-5)
    assert "router_differ_share" not in metrics
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, atol=1e-5, err_msg=name)


def test_gradients_are_the_same_with_layers_computed_again(
    open_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay, balance and metrics hold in the second pass, and count once."""
    outcomes = []
    for again in (False, True):
        trainer = open_trainer(
            "mixed", gradient_checkpointing=again, router_aux_loss=0.3, budget_tokens=64
        )
        found = gradients_of(trainer, monkeypatch)
        records = experts.with_random_routing(tiny.make_records())
        trainer.prepare(records, frozenset())
        outcomes.append((found, trainer.train(0, tiny.make_advantages(records), 1, 1)))
    for name, gradient in outcomes[0][0].items():
        np.testing.assert_allclose(gradient, outcomes[1][0][name], atol=1e-6, err_msg=name)
    for name, value in outcomes[0][1].items():
        if name.startswith("router_"):
            assert outcomes[1][1][name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("family", sorted(EXPERT_CONFIGS))
def test_log_probs_with_recorded_experts_are_the_generators(
    family: str, expert_dirs: dict[str, Path], open_trainer: Callable[..., Any]
) -> None:
    """Those without are the same, since in float32 no choice changes; others would differ."""
    from gcore_torch.config import TorchGeneratorConfig
    from gcore_torch.generator import TorchGenerator

    settings = TorchGeneratorConfig(max_new_tokens=8)
    context = tiny.make_context(expert_dirs[family], role="rollout")
    generator = TorchGenerator(settings, context)
    generator.submit(tiny.make_requests())
    sampled = tiny.drain(generator)
    records = [record.columns for record in sampled]
    replayed = open_trainer(family, router_replay="always").logprobs(records)
    own = open_trainer(family, router_replay="never").logprobs(records)
    for record, one, other in zip(sampled, replayed, own, strict=True):
        # float32: another batch alone moves a log-prob by 3e-5
        np.testing.assert_allclose(one, record.columns["logp"], atol=1e-4)
        np.testing.assert_allclose(one, other, atol=1e-5)
    changed = [
        {**columns, ROUTING: (columns[ROUTING] + 1) % experts.EXPERTS} for columns in records
    ]
    differs = open_trainer(family).logprobs(changed)
    assert max(np.abs(a - b).max() for a, b in zip(differs, own, strict=True)) > 1e-2


def test_the_reference_takes_the_same_experts(open_trainer: Callable[..., Any]) -> None:
    """Before any update it is the policy, so their distance is 0 whatever was replayed."""
    trainer = open_trainer(objective=tiny.Clip(beta=0.1))
    records = experts.with_random_routing(tiny.make_records())
    scalars = trainer.prepare(records, frozenset({"kl_k1"}))
    assert all(row["kl_k1"] == 0 for row in scalars)


def test_replay_always_refuses_records_without_experts(open_trainer: Callable[..., Any]) -> None:
    trainer = open_trainer(router_replay="always")
    with pytest.raises(DataError, match="has no column 'routing'"):
        trainer.prepare(tiny.make_records(groups=1), frozenset())


def test_in_bfloat16_a_mixture_trains_on_float32_weights(open_trainer: Callable[..., Any]) -> None:
    """Small updates add up, of experts and of the rest, as they would not in bfloat16."""
    trainer = open_trainer(dtype="bfloat16", learning_rate=2e-4, router_aux_loss=0.1)
    before = {spec.name: array.copy() for spec, array in trainer.export_weights()}
    records = experts.with_random_routing(tiny.make_records())
    for step in range(20):
        trainer.prepare(records, frozenset())
        trainer.train(step, tiny.make_advantages(records), 1, 1)
    after = {spec.name: array.copy() for spec, array in trainer.export_weights()}
    moved = {name for name in after if after[name].tobytes() != before[name].tobytes()}
    assert moved == after.keys()


def test_noise_in_routers_is_refused(expert_dirs: dict[str, Path], tmp_path: Path) -> None:
    from gcore_megatron.engine import MegatronEngine

    directory = tools.changed(expert_dirs["mixtral"], tmp_path, router_jitter_noise=0.1)
    with pytest.raises(DataError, match="routers have no noise here, this model's is 0.1"):
        MegatronEngine(MegatronTrainerConfig(), tiny.make_context(directory, tiny.Reinforce()))


@pytest.mark.parametrize(
    ("family", "ranks", "settings", "message"),
    [
        ("mixed", 3, {"expert_parallel": 3}, "expert_parallel: must divide the model's 8 experts"),
        ("mixed", 6, {"expert_parallel": 4}, "expert_parallel: must divide the 6 slots of a stage"),
        ("mixed", 2, {"tensor_parallel": 2}, "sequence_parallel: must be true where"),
        ("mixed", 2, {"context_parallel": 2}, "context_parallel: does not go with experts"),
        ("mixed", 4, {"pipeline_parallel": 4}, "pipeline_parallel: must leave a layer with exp"),
    ],
)
def test_an_impossible_split_is_refused_before_ranks_connect(
    family: str,
    ranks: int,
    settings: dict[str, Any],
    message: str,
    expert_dirs: dict[str, Path],
) -> None:
    from gcore_megatron.engine import MegatronEngine

    context = tiny.make_context(expert_dirs[family], tiny.Reinforce(), ranks=ranks)
    with pytest.raises(ConfigError, match=rf"roles\.policy\.config\.{message}"):
        MegatronEngine(MegatronTrainerConfig(**settings), context)
    assert not torch.distributed.is_initialized()


def test_experts_are_spread_over_neighbours_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every split of up to 16 ranks; the ranks of a replica stay neighbours. Each expert of a
    stage is sent by the first rank that holds it.
    """
    from gcore_megatron.convert import _place
    from gcore_megatron.engine import _join_groups
    from gcore_megatron.library import parallel_state as ps
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    new_group = dist.new_group

    def without_gloo(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **(kwargs | {"backend": None}))

    monkeypatch.setattr(dist, "new_group", without_gloo)
    splits = [(1, 1, 4, 2), (1, 2, 1, 2), (2, 2, 2, 2), (2, 1, 1, 2), (2, 1, 2, 2), (2, 1, 4, 2)]
    for tensor, pipeline, spread, data in splits:
        config = MegatronTrainerConfig(
            tensor_parallel=tensor,
            sequence_parallel=tensor > 1,
            pipeline_parallel=pipeline,
            expert_parallel=spread,
        )
        ranks = max(tensor, spread) * pipeline * data
        holders = {}
        for rank in range(ranks):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            _join_groups(config, has_experts=True)
            slots = config.traits().replica_slots
            assert ps.get_data_parallel_rank() == rank // slots
            stage = rank % slots // tensor
            assert ps.get_pipeline_model_parallel_rank() == stage
            assert ps.get_expert_tensor_parallel_world_size() == 1
            group = dist.get_process_group_ranks(ps.get_expert_model_parallel_group())
            of_stage = [r for r in range(ranks) if r % slots // tensor == stage]
            start = of_stage.index(group[0])
            assert start % spread == 0
            assert group == of_stage[start : start + spread]
            holder = ps.get_expert_model_parallel_rank()
            if ps.get_expert_data_parallel_rank() == 0:
                whole = ps.get_expert_tensor_model_pipeline_parallel_group()
                everyone = dist.get_process_group_ranks(whole)
                assert everyone[0] == 0
                assert everyone[_place(stage, holder, len(everyone))] == rank
                holders[stage, holder] = rank
            ps.destroy_model_parallel()
            dist.destroy_process_group()
        assert len(holders) == pipeline * spread


def test_a_critic_of_a_mixture_has_the_values_of_transformers(
    expert_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Replaying routers or not; it is exported as a sequence classifier."""
    from gcore_language.models import load_value_model
    from gcore_megatron.trainer import make_trainer

    context = tiny.make_context(expert_dirs["mixed"], Squares(), role="critic", seed=3)
    trainer: Any = make_trainer(MegatronTrainerConfig(value_head_std=0.1), context)
    try:
        records = tiny.make_records()
        values = trainer.values(records)
        plain = load_value_model(str(expert_dirs["mixed"]), std=0.1, seed=3)
        for record, own in zip(records, values, strict=True):
            columns = record.columns
            ids = np.concatenate([columns["prompt_ids"], columns["action_ids"]]).astype(np.int64)
            with torch.no_grad():
                hidden = plain.model(torch.from_numpy(ids)[None]).last_hidden_state[0]
                expected = plain.score(hidden[len(columns["prompt_ids"]) - 1 :]).squeeze(1)
            np.testing.assert_allclose(own, expected, atol=1e-5)
        trainer.prepare(records, frozenset())
        metrics = trainer.train(0, tiny.make_advantages(records), 1, 1)
        assert metrics["router_entropy"] > 0
        trainer.save_pretrained(tmp_path)
        assert load_value_model(str(tmp_path)).score.weight.shape[0] == 1
    finally:
        trainer.close()
