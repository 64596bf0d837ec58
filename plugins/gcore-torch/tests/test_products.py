"""Products with packed weights: they are those of the plain form, and follow every push."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gcore_language.lora_settings import LoraSettings
from gcore_language.models import load_model
from gcore_testing.contracts.weights import exported, load, push
from gcore_torch import memory, products
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.decoder import TransformersDecoder, make_decoder
from gcore_torch.generator import TorchGenerator
from gcore_torch.products import Products
from gcore_torch.trainer import TorchTrainer

from gcore_core.contract.records import WeightPlan
from tests.support import language_models as tiny

#: Sums of 1,024 numbers of size 1 in another order, in float32.
ROUNDING = 2e-4
#: Largest gap of a log-prob that generator and trainer may have in float32.
GAP = 1e-4

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


@pytest.fixture
def pack_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs the matrices of tiny models too."""
    monkeypatch.setattr(products, "LEAST_NUMBERS", 1)


def open_generator(directory: Path, **config: Any) -> TorchGenerator:
    settings = TorchGeneratorConfig(**({"max_new_tokens": 12} | config))
    return TorchGenerator(settings, tiny.make_context(directory, role="rollout"))


def open_trainer(directory: Path, **config: Any) -> TorchTrainer:
    settings = TorchTrainerConfig(learning_rate=1e-2, **config)
    return TorchTrainer(settings, tiny.make_context(directory, tiny.Reinforce()))


def train(trainer: TorchTrainer) -> None:
    records = tiny.make_records()
    trainer.prepare(records, frozenset())
    trainer.train(0, tiny.make_advantages(records), 1, 1)


def largest_gap(generator: TorchGenerator, trainer: TorchTrainer) -> float:
    """Returns the largest gap of the log-probs of new samples to the trainer's."""
    generator.submit(tiny.make_requests(groups=3, samples=6))
    columns = [finished.columns for finished in tiny.drain(generator)]
    assert generator._products.nbytes, "nothing was packed, so the test shows nothing"
    trained = trainer.logprobs(columns)
    pairs = zip(columns, trained, strict=True)
    return max(float(np.abs(record["logp"] - logp).max()) for record, logp in pairs)


@pytest.mark.parametrize("rows", [3, 8, 128])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_product_is_the_plain_one_within_rounding(rows: int, biased: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 1024, generator=draw)
    bias = torch.randn(512, generator=draw) if biased else None
    x = torch.randn(rows, 1024, generator=draw)
    product = Products(may_pack=True)
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(product(x, weight, bias), expected, rtol=0, atol=ROUNDING)
    assert product.nbytes == weight.nbytes
    # rows may have more dimensions, as those of a whole model have
    whole = product(x[:, None], weight, bias)
    torch.testing.assert_close(whole, expected[:, None], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(
    ("rows", "outputs", "dtype", "may_pack"),
    [
        (1, 512, torch.float32, True),
        (2, 512, torch.float32, True),
        (129, 512, torch.float32, True),
        (8, 16, torch.float32, True),
        (8, 512, torch.bfloat16, True),
        (8, 512, torch.float32, False),
    ],
    ids=["one row", "two rows", "many rows", "small matrix", "bfloat16", "deterministic"],
)
def test_other_products_have_torchs_bits_and_pack_nothing(
    rows: int, outputs: int, dtype: torch.dtype, may_pack: bool
) -> None:
    weight, x = torch.randn(outputs, 1024, dtype=dtype), torch.randn(rows, 1024, dtype=dtype)
    product = Products(may_pack=may_pack)
    assert torch.equal(product(x, weight), F.linear(x, weight))
    assert product.nbytes == 0


@pytest.mark.parametrize(
    ("family", "decoder"),
    [("llama", "fused"), ("qwen2", "fused"), ("qwen3", "fused"), ("llama", "transformers")],
)
def test_packed_weights_follow_every_push(
    family: str, decoder: str, pack_all: None, model_dirs: dict[str, Path]
) -> None:
    generator = open_generator(model_dirs[family], decoder=decoder)
    trainer = open_trainer(model_dirs[family])
    assert largest_gap(generator, trainer) < GAP
    train(trainer)
    assert largest_gap(generator, trainer) > 100 * GAP  # else the push below shows nothing
    push(generator, exported(trainer), 1)
    assert generator._products.nbytes == 0
    assert largest_gap(generator, trainer) < GAP
    assert generator._products.differing() == []


def test_packed_weights_follow_a_pushed_adapter(
    pack_all: None, model_dirs: dict[str, Path]
) -> None:
    generator = open_generator(model_dirs["llama"])
    trainer = open_trainer(model_dirs["llama"], lora=LoraSettings(rank=4, alpha=8.0))
    for version in (1, 2):
        train(trainer)
        plan = WeightPlan(version, trainer.adapter_specs(), trainer.adapter_facts())
        generator.begin_weights(plan)
        load(generator, [(spec, array.copy()) for spec, array in trainer.export_adapter()])
        generator.commit_weights(plan)
        assert largest_gap(generator, trainer) < GAP


def test_packed_copies_count_as_memory_and_a_sleep_frees_them(
    pack_all: None, model_dirs: dict[str, Path]
) -> None:
    generator = open_generator(model_dirs["llama"])
    trainer = open_trainer(model_dirs["llama"])
    largest_gap(generator, trainer)
    packed = generator._products.nbytes
    caches = generator._usual.cache_bytes
    assert generator.memory_bytes == generator._weights.nbytes + packed + caches
    generator.sleep()
    assert generator._products.nbytes == 0
    generator.wake()
    assert largest_gap(generator, trainer) < GAP


def test_a_packed_copy_of_other_weights_is_told_apart() -> None:
    weight = torch.randn(512, 1024)
    product = Products(may_pack=True)
    product(torch.randn(8, 1024), weight)
    assert product.differing() == []
    weight[0, 0] += 1
    assert product.differing() == ["a packed matrix [512, 1024]"]


def test_a_deterministic_generator_packs_nothing(
    pack_all: None, model_dirs: dict[str, Path]
) -> None:
    context = tiny.make_context(model_dirs["llama"], deterministic=True)
    for decoder in ("fused", "transformers"):
        config = TorchGeneratorConfig(max_new_tokens=6, decoder=decoder)
        generator = TorchGenerator(config, context)
        generator.submit(tiny.make_requests())
        tiny.drain(generator)
        assert generator._products.nbytes == 0


def test_what_is_foreseen_and_what_is_packed_go_by_the_same_size() -> None:
    assert memory._PACKED_LEAST == products.LEAST_NUMBERS


def test_a_matrix_and_the_joined_one_that_begins_with_it_are_packed_apart(pack_all: None) -> None:
    joined = torch.randn(12, 8)
    first = joined[:4]
    product = Products(may_pack=True)
    x = torch.randn(8, 8)
    for weight in (joined, first):
        torch.testing.assert_close(product(x, weight), F.linear(x, weight), rtol=0, atol=ROUNDING)


def test_a_fused_decoder_that_is_not_taken_leaves_nothing_packed(
    pack_all: None, tmp_path: Path
) -> None:
    tiny.save_model(tmp_path, "llama")
    model = load_model(str(tmp_path), dtype="float32", trust_remote_code=False, images=True)
    product = Products(may_pack=True)
    decoder = make_decoder(model, "auto", 4, -1.0, product)  # nothing agrees so well
    assert isinstance(decoder, TransformersDecoder) and not product.nbytes
