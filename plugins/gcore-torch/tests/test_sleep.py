from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gcore_testing.contracts.weights import perturbed, push, read_model
from gcore_testing.safetensors_files import Tensors
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.sleeping import sums_of
from transformers import LlamaConfig, LlamaForCausalLM

from gcore_core.contract.errors import ContractError, WeightMismatch
from gcore_core.contract.generator import Sleeps
from gcore_core.contract.records import WeightPlan
from tests.support import language_models as tiny


@pytest.fixture
def opened(model_dirs: dict[str, Path]) -> Callable[..., TorchGenerator]:
    def make(family: str = "llama", **settings: Any) -> TorchGenerator:
        config = TorchGeneratorConfig(**{"max_new_tokens": 12, **settings})
        return TorchGenerator(config, tiny.make_context(model_dirs[family], deterministic=True))

    return make


def weights_of(directory: Path) -> Tensors:
    return read_model({"path": str(directory)})


def sampled(generator: Any) -> list[tuple[bytes, bytes]]:
    generator.submit(tiny.make_requests())
    return [
        (f.columns["action_ids"].tobytes(), f.columns["logp"].tobytes())
        for f in tiny.drain(generator)
    ]


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gpt2"]
)  # separate, tied, and another decoder
def test_a_push_restores_discarded_weights_and_the_same_samples(
    family: str, opened: Any, model_dirs: dict[str, Path]
) -> None:
    generator, weights = opened(family, sleep="discard"), weights_of(model_dirs[family])
    assert isinstance(generator, Sleeps)
    push(generator, weights, 1)
    held, before, awake = (
        generator.fingerprint(),
        sampled(generator),
        generator._weights.nbytes,
    )
    for _ in range(2):
        generator.sleep()
        assert generator.memory_bytes == 0
        generator.wake()
        assert generator.version == 1
        with pytest.raises(
            ContractError,
            match=r"(?s)weights were discarded for a sleep.*Push them, or set config.sl",
        ):
            generator.step()
        push(generator, weights, 1)
        assert (generator.fingerprint(), sampled(generator)) == (held, before)
    assert generator._weights.nbytes == awake


def test_different_weights_under_the_discarded_version_are_refused(
    opened: Any, model_dirs: dict[str, Path]
) -> None:
    generator, weights = opened(sleep="discard"), weights_of(model_dirs["llama"])
    push(generator, weights, 3)
    generator.sleep()
    generator.wake()
    with pytest.raises(
        WeightMismatch, match=r"(?s)tensor .* is not what it was before the sleep.*version 3"
    ):
        push(generator, perturbed(weights), 3)
    with pytest.raises(WeightMismatch, match="has begun and was not committed"):
        generator.step()
    push(generator, perturbed(weights), 4)
    other = opened()
    push(other, perturbed(weights), 4)
    assert sampled(generator) == sampled(other)


def test_a_generator_put_back_to_sleep_still_lacks_its_weights(
    opened: Any, model_dirs: dict[str, Path]
) -> None:
    generator = opened(sleep="discard")
    for _ in range(2):
        generator.sleep()
        generator.wake()
    with pytest.raises(ContractError, match="weights were discarded"):
        generator.logprobs([])
    push(generator, weights_of(model_dirs["llama"]), 0)
    assert generator.step() == []


@pytest.mark.parametrize("decoder", ["fused", "transformers"])
@pytest.mark.parametrize("sleep", ["keep", "discard"])
def test_samples_interrupted_by_a_sleep_continue(
    sleep: str, decoder: str, opened: Any, model_dirs: dict[str, Path]
) -> None:
    generator, weights = opened(sleep=sleep, decoder=decoder), weights_of(model_dirs["llama"])
    expected = [tokens for tokens, _ in sampled(generator)]
    generator.submit(tiny.make_requests())
    ended = [*generator.step(), *generator.step()]
    generator.sleep()
    running = generator._rows.waiting[0].request
    ended += generator.abort([(running.ordinal, running.sample)])
    generator.wake()
    if sleep == "discard":
        push(generator, weights, 0)
    ended += tiny.drain(generator)
    ended.sort(key=lambda f: (f.request.ordinal, f.request.sample))
    for record, tokens in zip(ended, expected, strict=True):
        whole = record.columns["action_ids"].tobytes()
        assert whole == tokens[: len(whole)]
        assert (record.status == "aborted") == (record.request == running)


def test_a_sleep_during_a_push_and_a_push_during_a_sleep_are_refused(
    opened: Any, model_dirs: dict[str, Path]
) -> None:
    generator, weights = opened(), weights_of(model_dirs["llama"])
    plan = WeightPlan(1, [spec for spec, _ in weights])
    generator.begin_weights(plan)
    with pytest.raises(WeightMismatch, match="has begun and was not committed"):
        generator.sleep()
    push(generator, weights, 1)
    generator.sleep()
    with pytest.raises(
        ContractError, match=r"(?s)roles.policy: this generator sleeps.*Wake it first"
    ):
        generator.begin_weights(plan)


def test_memory_of_discarded_weights_goes_back_to_the_system(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    config = LlamaConfig(
        vocab_size=64, num_key_value_heads=8, max_position_embeddings=64, eos_token_id=2, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    weights = weights_of(tmp_path)
    nbytes = sum(spec.nbytes for spec, _ in weights)
    settings = TorchGeneratorConfig(max_new_tokens=4, sleep="discard")
    generator = TorchGenerator(settings, tiny.make_context(tmp_path))
    push(generator, weights, 1)
    awake = resident_bytes()
    generator.sleep()
    assert awake - resident_bytes() > 0.8 * nbytes
    generator.wake()
    push(generator, weights, 1)
    assert torch.isfinite(torch.from_numpy(tiny_logp(generator))).all()


def tiny_logp(generator: Any) -> Any:
    generator.submit(tiny.make_requests(groups=1, samples=1))
    return tiny.drain(generator)[0].columns["logp"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_generator_that_is_told_twice_to_sleep_samples_the_same_after_it(
    opened: Any, model_dirs: dict[str, Path]
) -> None:
    generator, weights = opened(sleep="discard"), weights_of(model_dirs["llama"])
    before = sampled(generator)
    for _ in range(2):
        generator.sleep()
    generator.wake()
    push(generator, weights, 1)
    assert sampled(generator) == before


def test_the_sums_of_a_memory_change_with_any_byte_and_with_its_place() -> None:
    draw = torch.Generator().manual_seed(0)
    for nbytes in (0, 1, 2, 8190, 8193, 20_001):
        memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=draw)
        digest = sums_of({"w": memory})
        assert digest == sums_of({"w": memory.clone()})
        assert set(sums_of({"w": memory, "v": memory}).values()) == set(digest.values())
        for place in (0, nbytes // 2, nbytes - 1) if nbytes else ():
            changed = memory.clone()
            changed[place] += 1
            assert sums_of({"w": changed}) != digest
    memory = torch.arange(0, 20_000, dtype=torch.int16).view(torch.uint8)
    swapped = memory.clone().view(torch.int16)
    swapped[[3, 9000]] = swapped[[9000, 3]]
    assert sums_of({"w": swapped.view(torch.uint8)}) != sums_of({"w": memory})
