"""Adapters in place of weights: what is computed, pushed, refused, saved and exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.lora import ADAPTER, merged, weight_of
from gcore_language.lora_settings import LoraSettings
from gcore_language.model_files import weights_sha256
from gcore_testing.contracts.weights import digests, exported, load, push
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.trainer import TorchTrainer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from gcore_core.contract.errors import ConfigError, DataError, WeightMismatch
from gcore_core.contract.records import AdapterFacts, WeightPlan
from gcore_core.contract.weights_hash import WeightsHash
from tests.support import language_models as tiny

#: float32 products in another order, through a few layers.
ROUNDING = 2e-5
LORA = LoraSettings(rank=4, alpha=8.0)
Opens = Callable[..., TorchTrainer]


@pytest.fixture
def open_trainer(model_dirs: dict[str, Path]) -> Opens:
    def make(
        family: str = "llama", objective: Any = None, lora: LoraSettings = LORA, **config: Any
    ) -> TorchTrainer:
        settings = TorchTrainerConfig(**({"learning_rate": 1e-2, "lora": lora} | config))
        context = tiny.make_context(model_dirs[family], objective or tiny.Reinforce())
        return TorchTrainer(settings, context)

    return make


@pytest.fixture
def generator(model_dirs: dict[str, Path]) -> TorchGenerator:
    context = replace(tiny.make_context(model_dirs["llama"]), role="rollout")
    return TorchGenerator(TorchGeneratorConfig(max_new_tokens=8), context)


def steps(trainer: TorchTrainer, count: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + count):
        records = tiny.make_records(seed=step)
        trainer.prepare(records, frozenset())
        losses.append(trainer.train(step, tiny.make_advantages(records), 1, 1)["loss"])
    return losses


def values_of(trainer: TorchTrainer) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in trainer._engine._tensors.items()}


def push_adapter(trainer: TorchTrainer, generator: TorchGenerator, version: int) -> WeightPlan:
    tensors = [(spec, array.copy()) for spec, array in trainer.export_adapter()]
    plan = WeightPlan(version, trainer.adapter_specs(), trainer.adapter_facts())
    generator.begin_weights(plan)
    half = len(tensors) // 2
    for part in (tensors[:half], tensors[half:]):
        load(generator, part)
    generator.commit_weights(plan)
    return plan


def held(generator: TorchGenerator) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in generator._tensors.items()}


# -- what is computed ------------------------------------------------------------------------------


def test_a_layer_and_its_gradients_are_those_of_float64_numpy() -> None:
    """y = x (W + s B A)', dA = s B' dy' x, dB = s dy' x A'; with peft's layer, and merged."""
    from peft import LoraConfig, inject_adapter_in_model

    draw = np.random.default_rng(0)
    x, grad = draw.standard_normal((7, 6)), draw.standard_normal((7, 5))
    w, a, b = (draw.standard_normal(shape) for shape in ((5, 6), (3, 6), (5, 3)))
    scale = 8.0 / 3
    model = nn.Sequential(nn.Linear(6, 5, bias=False)).double()
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=8, target_modules=["0"]), model)
    layer = model[0].double()
    for parameter, value in zip(
        (layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight),
        (w, a, b),
        strict=True,
    ):
        parameter.data = torch.from_numpy(value)
    expected = x @ (w + scale * b @ a).T, scale * b.T @ grad.T @ x, scale * grad.T @ x @ a.T
    inputs = torch.from_numpy(x)
    for output in (layer(inputs), nn.functional.linear(inputs, weight_of(layer))):
        model.zero_grad()
        output.backward(torch.from_numpy(grad))
        halves = (layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad)
        for value, wanted in zip((output, *halves), expected, strict=True):
            np.testing.assert_allclose(value.detach().numpy(), wanted, atol=1e-10)
        assert layer.base_layer.weight.grad is None


@pytest.mark.parametrize("packing", ["auto", "shared_prompt", "padded"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_trained_log_probs_are_those_of_the_model_that_peft_merges(
    family: str, packing: str, open_trainer: Opens, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    trainer = open_trainer(family, packing=packing)
    steps(trainer, 2)
    trainer.save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model_dirs[family], dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path / ADAPTER).merge_and_unload().eval()
    records = tiny.make_records(seed=5)
    found = trainer.logprobs([record.columns for record in records])
    before = AutoModelForCausalLM.from_pretrained(model_dirs[family], dtype=torch.float32).eval()
    moved = 0.0
    for record, logp in zip(records, found, strict=True):
        expected = tiny.logp_of(merged, record)[0].detach().numpy()
        np.testing.assert_allclose(logp, expected, atol=ROUNDING)
        moved = max(moved, np.abs(logp - tiny.logp_of(before, record)[0].detach().numpy()).max())
    assert moved > 1e-3, "the adapters changed nothing"


class Factored(nn.Module):
    """W + s B A as a parametrization of torch, written apart from peft."""

    def __init__(self, first: Tensor, second: Tensor, scale: float) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.second @ self.first


@pytest.mark.parametrize("packing", ["auto", "padded"])
def test_it_trains_as_the_low_rank_factors_of_plain_torch_do(
    packing: str, open_trainer: Opens, model_dirs: dict[str, Path]
) -> None:
    """Two updates by torch's own AdamW of a model whose weights are parametrized."""
    settings = {"learning_rate": 1e-2, "eps": 1e-2, "weight_decay": 0.1, "clip_grad_norm": 0.0}
    trainer = open_trainer(packing=packing, **settings)
    start = values_of(trainer)
    model = AutoModelForCausalLM.from_pretrained(model_dirs["llama"], dtype=torch.float32).eval()
    model.requires_grad_(False)
    factored = {}
    for name in [name for name in start if ".lora_A." in name]:
        target = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        halves = start[name].clone(), start[name.replace("lora_A", "lora_B")].clone()
        factored[target] = Factored(*halves, scale=2.0)
        module = model.get_submodule(target)
        nn.utils.parametrize.register_parametrization(module, "weight", factored[target])
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.1
    )
    for step, loss in enumerate(steps(trainer, 2)):
        records = tiny.make_records(seed=step)
        total, weight = torch.zeros(()), 0.0
        for record, advantage in zip(records, tiny.make_advantages(records), strict=True):
            mask = torch.from_numpy(record.columns["action_mask"].astype(np.float32))
            total = total - (float(advantage) * tiny.logp_of(model, record)[0] * mask).sum()
            weight += float(mask.sum())
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        assert loss == pytest.approx(float(total.detach()) / weight, abs=1e-5)
    assert factored
    for name, value in values_of(trainer).items():
        target, _, half = name.removeprefix("base_model.model.").rpartition(".lora_")
        mine = factored[target].first if half == "A.weight" else factored[target].second
        torch.testing.assert_close(value, mine.detach(), atol=1e-5, rtol=0)
        assert "lora_A" in name or float(value.abs().max()) > 1e-3


@pytest.mark.parametrize("packing", ["auto", "shared_prompt", "padded"])
def test_the_reference_is_the_plain_base_to_the_last_bit_whatever_was_trained(
    packing: str, open_trainer: Opens
) -> None:
    """There is no second model: the adapters are off while it is asked."""
    trainer = open_trainer(packing=packing, objective=tiny.Clip(beta=0.1))
    plain = open_trainer(packing=packing, lora=LoraSettings())
    assert trainer._engine._reference is None
    steps(trainer, 2)
    records = tiny.make_records(seed=7)
    own, base = trainer._packed(records).all(), plain._packed(records).all()
    found = trainer._engine.logprobs(own, "reference")
    policy = trainer._engine.logprobs(own, "policy")
    expected = plain._engine.logprobs(base, "policy")
    for logp, trained, wanted in zip(found, policy, expected, strict=True):
        assert torch.equal(logp, wanted)
        assert not torch.equal(trained, wanted)


def test_only_the_adapters_have_gradients_and_moments(open_trainer: Opens) -> None:
    trainer = open_trainer()
    before = trainer._engine._adapters.base()
    base = {name: tensor.detach().clone() for name, tensor in before.items()}
    steps(trainer, 2)
    engine = trainer._engine
    assert {id(t) for t in engine._optimizer.state} == {id(t) for t in engine._tensors.values()}
    assert not any(tensor.requires_grad for tensor in before.values())
    assert all(torch.equal(tensor, base[name]) for name, tensor in before.items())


def test_with_checkpointing_of_activations_the_gradients_are_the_same(open_trainer: Opens) -> None:
    plain, saving = (
        open_trainer(packing="padded"),
        open_trainer(packing="padded", gradient_checkpointing=True),
    )
    steps(plain, 2), steps(saving, 2)
    for name, value in values_of(plain).items():
        torch.testing.assert_close(values_of(saving)[name], value, atol=1e-6, rtol=0)


def test_in_bfloat16_the_base_is_what_generators_hold(
    open_trainer: Opens, model_dirs: dict[str, Path]
) -> None:
    """And a push of the adapter gives them the bits of a push of whole weights."""
    trainer = open_trainer(dtype="bfloat16")
    steps(trainer, 2)
    context = replace(tiny.make_context(model_dirs["llama"]), role="rollout")
    settings = TorchGeneratorConfig(max_new_tokens=8, dtype="bfloat16")
    generators = [TorchGenerator(settings, context) for _ in range(2)]
    push_adapter(trainer, generators[0], 2)
    push(generators[1], exported(trainer), 2)
    one, other = map(held, generators)
    assert all(torch.equal(one[name], other[name]) for name in one)


# -- pushes ----------------------------------------------------------------------------------------


def test_a_pushed_adapter_gives_the_bits_of_pushed_weights(
    open_trainer: Opens, generator: TorchGenerator
) -> None:
    """After many pushes too: each is merged into the kept base, not into what was merged before."""
    trainer = open_trainer()
    for version in range(1, 6):
        steps(trainer, 1, first=version - 1)
        plan = push_adapter(trainer, generator, version)
        whole = exported(trainer)
        held_digests = generator.fingerprint()
        assert digests(whole).items() <= held_digests.items()
        assert digests(list(trainer.export_adapter())).items() <= held_digests.items()
        assert generator.version == version
    sent = sum(spec.nbytes for spec in plan.tensors)
    matrices = [a.shape for a in values_of(trainer).values()]
    assert sent == 4 * sum(rows * columns for rows, columns in matrices)
    assert sent < sum(spec.nbytes for spec in trainer.weight_specs())


def test_adapters_and_whole_weights_may_be_pushed_in_turn(
    open_trainer: Opens, generator: TorchGenerator
) -> None:
    """An adapter goes on the base of the model's files, whatever whole weights came before."""
    one, other = open_trainer(), open_trainer(lora=LoraSettings(rank=2, targets=["q_proj"]))
    full = open_trainer(lora=LoraSettings())
    for trainer in (one, other, full):
        steps(trainer, 2)
    expected = {}
    for name, trainer in (("one", one), ("other", other)):
        expected[name] = {s.name: a.copy() for s, a in trainer.export_weights()}
    push(generator, exported(full), 2)
    for version, (name, trainer) in enumerate((("one", one), ("other", other), ("one", one)), 2):
        push_adapter(trainer, generator, version)
        for tensor, values in held(generator).items():
            assert values.numpy().tobytes() == expected[name][tensor].tobytes(), (name, tensor)


def test_a_matrix_that_changed_after_the_push_shows_in_the_fingerprint(
    open_trainer: Opens, generator: TorchGenerator
) -> None:
    trainer = open_trainer()
    steps(trainer, 1)
    push_adapter(trainer, generator, 1)
    before = generator.fingerprint()
    name = next(iter(trainer.adapter_facts().targets))
    with torch.no_grad():
        generator._tensors[f"{name}.weight"][0, 0] += 1
    after = generator.fingerprint()
    assert {key for key in before if before[key] != after[key]} == {
        f"{name}.weight",
        f"base_model.model.{name}.lora_A.weight",
        f"base_model.model.{name}.lora_B.weight",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": "0" * 64}, "another base"),
        ({"targets": ["model.layers.9.self_attn.q_proj"]}, "model.layers.9.self_attn.q_proj"),
        ({"rank": 5}, "shape"),
    ],
)
def test_an_adapter_that_does_not_fit_the_generator_is_refused(
    change: dict[str, Any], message: str, open_trainer: Opens, generator: TorchGenerator
) -> None:
    trainer = open_trainer()
    facts = trainer.adapter_facts()
    assert facts is not None
    named = {field: getattr(facts, field) for field in AdapterFacts.__struct_fields__}
    plan = WeightPlan(1, trainer.adapter_specs(), AdapterFacts(**(named | change)))
    before = held(generator)
    with pytest.raises(WeightMismatch, match=message):
        generator.begin_weights(plan)
    assert all(torch.equal(tensor, before[name]) for name, tensor in held(generator).items())


def test_merged_pushes_are_asked_for_by_a_setting(open_trainer: Opens) -> None:
    assert open_trainer(lora=LoraSettings(rank=2, push="merged")).adapter_facts() is None
    assert open_trainer(lora=LoraSettings()).adapter_facts() is None
    facts = open_trainer(lora=LoraSettings(rank=2, alpha=8, use_rslora=True)).adapter_facts()
    assert facts is not None and facts.scale == pytest.approx(8 / 2**0.5)


# -- saved, resumed, exported ----------------------------------------------------------------------


def test_a_state_holds_the_adapter_alone_and_goes_on_as_if_never_stopped(
    open_trainer: Opens, tmp_path: Path
) -> None:
    from safetensors import safe_open

    trainer = open_trainer()
    steps(trainer, 2)
    trainer.save(tmp_path)
    expected = steps(trainer, 2, first=2)
    resumed = open_trainer()
    resumed.load(tmp_path)
    assert steps(resumed, 2, first=2) == expected
    (file,) = tmp_path.glob("state-*.safetensors")
    with safe_open(file, "np") as opened:
        names = list(opened.keys())
    assert len(names) == 3 * len(values_of(trainer))
    assert all(".lora_" in name for name in names)
    assert json.loads((tmp_path / "state.json").read_text())["lora"]["base"]


def test_a_state_of_another_kind_rank_or_base_is_refused(
    open_trainer: Opens, tmp_path: Path
) -> None:
    trainer, whole = open_trainer(), open_trainer(lora=LoraSettings())
    trainer.save(tmp_path / "adapter")
    whole.save(tmp_path / "whole")
    with pytest.raises(DataError, match="state is of an adapter"):
        whole.load(tmp_path / "adapter")
    with pytest.raises(DataError, match="state is of whole weights"):
        trainer.load(tmp_path / "whole")
    with pytest.raises(DataError, match="rank 4"):
        open_trainer(lora=LoraSettings(rank=2)).load(tmp_path / "adapter")
    file = tmp_path / "adapter" / "state.json"
    numbers = json.loads(file.read_text())
    numbers["lora"]["base"] = "0" * 64
    file.write_text(json.dumps(numbers))
    with pytest.raises(DataError, match="another base"):
        trainer.load(tmp_path / "adapter")


def test_final_weights_open_with_transformers_and_the_adapter_with_peft(
    open_trainer: Opens, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """And the weights' hash is that of what the trainer exports."""
    from peft import PeftModel

    trainer = open_trainer("qwen2")
    steps(trainer, 2)
    trainer.save_pretrained(tmp_path)
    exported_hash = WeightsHash()
    for spec, array in trainer.export_weights():
        exported_hash.add(spec, array.tobytes())
    assert weights_sha256(tmp_path) == exported_hash.hexdigest()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"], dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / ADAPTER).eval()
    for record in tiny.make_records():
        one, other = (tiny.logp_of(model, record)[0] for model in (whole, adapted))
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


def test_an_adapter_is_gone_on_from_and_the_reference_is_where_it_began(
    open_trainer: Opens, tmp_path: Path
) -> None:
    first = open_trainer()
    steps(first, 2)
    first.save_pretrained(tmp_path)
    lora = LoraSettings(path=str(tmp_path / ADAPTER))
    second = open_trainer(lora=lora, objective=tiny.Clip(beta=0.1))
    begun = values_of(first)
    assert all(torch.equal(value, begun[name]) for name, value in values_of(second).items())
    assert second.adapter_facts() == first.adapter_facts()
    columns = [record.columns for record in tiny.make_records(seed=9)]
    expected = second.logprobs(columns)
    steps(second, 2)
    batches = second._packed(tiny.make_records(seed=9)).all()
    trained = values_of(second)
    reference = torch.cat(list(second._engine.logprobs(batches, "reference")))
    policy = torch.cat(list(second._engine.logprobs(batches, "policy")))
    assert sorted(reference.tolist()) == sorted(np.concatenate(expected).tolist())
    assert float((policy - reference).abs().max()) > 1e-3
    assert all(torch.equal(value, trained[name]) for name, value in values_of(second).items())


def test_an_adapter_that_peft_saved_is_gone_on_from(
    open_trainer: Opens, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(model_dirs["llama"], dtype=torch.float32)
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    model = get_peft_model(base, config).eval()
    model.save_pretrained(tmp_path)
    trainer = open_trainer(lora=LoraSettings(path=str(tmp_path)))
    records = tiny.make_records()
    for record, logp in zip(records, trainer.logprobs([r.columns for r in records]), strict=True):
        expected = tiny.logp_of(model, record)[0].detach().numpy()
        np.testing.assert_allclose(logp, expected, atol=ROUNDING)


# -- refused ---------------------------------------------------------------------------------------


def test_an_adapter_for_another_base_is_refused(open_trainer: Opens, tmp_path: Path) -> None:
    """By its hash where it is of one shape, and by its tensors where it is not."""
    trainer = open_trainer()
    trainer.save_pretrained(tmp_path)
    lora = LoraSettings(path=str(tmp_path / ADAPTER))
    with pytest.raises(DataError, match="another base"):
        open_trainer("qwen2", lora=lora)
    from safetensors.torch import load_file, save_file

    file = tmp_path / ADAPTER / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(dict(list(tensors.items())[:-1]), file, {"format": "pt"})
    with pytest.raises(DataError, match=r"another model: it lacks .*lora_B"):
        open_trainer(lora=lora)


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("llama", ["q_porj"], r"(?s)no linear layer 'q_porj' \(did you mean 'q_proj'\?\)"),
        ("llama", ["input_layernorm"], "no linear layer 'input_layernorm'"),
        ("gpt2", "auto", "no linear layer that an adapter could go on"),
    ],
)
def test_targets_that_the_model_does_not_have_are_refused(
    family: str, targets: Any, message: str, open_trainer: Opens
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_trainer(family, lora=LoraSettings(rank=2, targets=targets))


def test_models_that_take_images_and_quantised_ones_are_refused(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    from gcore_language.tiny import save_image_model

    save_image_model(tmp_path / "images", "qwen2_vl")
    (tmp_path / "packed").mkdir()
    for file in model_dirs["llama"].iterdir():
        if file.is_file():
            (tmp_path / "packed" / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for name, message in (("images", "take images"), ("packed", "quantised")):
        context = tiny.make_context(tmp_path / name, tiny.Reinforce())
        if name == "packed":
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        with pytest.raises((ConfigError, DataError), match=message):
            TorchTrainer(TorchTrainerConfig(lora=LORA), context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_is_merged_in_place_with_the_bits_of_the_equation(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(48, 32, generator=draw).to(dtype)
    halves = [torch.randn(shape, generator=draw).requires_grad_() for shape in ((4, 32), (48, 4))]
    first, second = halves
    in_place = merged(base, halves, 1.7)
    assert torch.equal(in_place, base.float() + (second @ first) * 1.7)
    expected = torch.autograd.grad((base.float() + (second @ first) * 1.7).square().sum(), halves)
    found = torch.autograd.grad(in_place.square().sum(), halves)
    assert all(map(torch.equal, found, expected))
