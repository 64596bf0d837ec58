"""Shared rows give a policy's log-probs; models of which ranks cannot share rows are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.context.attention import SharedRow, transformers_attention
from gcore_language.context.groups import ContextGroups
from gcore_language.context.kernels import BlockKernel, FlashKernel, Kernel
from gcore_language.context.layout import shared_by_all
from gcore_language.context.packing import shared_batches
from gcore_language.context.policy import SharedPolicy, check_shared
from gcore_language.packing import Sample, micro_batches
from gcore_language.policy import Policy
from gcore_language.tiny import CONFIGS
from transformers import AutoModelForCausalLM

from gcore_core.contract.errors import ConfigError

CPU = torch.device("cpu")
ALONE = ContextGroups(
    ring=1,
    ulysses=1,
    member=0,
    place=0,
    ring_ranks=(0,),
    ring_group=None,
    ulysses_group=None,
    group=None,
)


def policy_of(family: str) -> Policy:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    policy = Policy(model)
    policy.head_apart = True
    return policy


def shared(policy: Policy) -> SharedPolicy:
    return SharedPolicy(policy, ALONE, lambda lengths: shared_by_all(lengths, 1, 1))


def samples_of(*sizes: tuple[int, int]) -> list[Sample]:
    """Returns records with so many tokens of prompt, and so many actions."""
    draw = np.random.default_rng(0)
    samples = []
    for index, (prompt, actions) in enumerate(sizes):
        columns: dict[str, np.ndarray] = {
            "action_ids": draw.integers(0, 16, actions).astype(np.int32),
            "action_mask": np.ones(actions, np.uint8),
            "logp": np.zeros(actions, np.float32),
            "temperature": np.full((), 0.7 if index else 1.0, np.float32),
        }
        ids = draw.integers(0, 16, prompt).astype(np.int32)
        samples.append(Sample(index=index, ordinal=index // 2, prompt=ids, columns=columns))
    return samples


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_records_in_one_row_have_the_log_probs_and_entropies_of_records_by_themselves(
    family: str,
) -> None:
    policy = policy_of(family)
    samples = samples_of((3, 5), (20, 9), (1, 1), (2, 30))
    alone = [policy(b, "metric") for s in samples for b in micro_batches([s], "padded", 99, CPU)]
    same = shared(policy)
    check_shared(same, CPU, tolerance=1e-4)
    (row,) = shared_batches(samples, 99, 1, 64, CPU, whole_groups=False)
    logp, entropies = same(row, "metric")
    by_record = dict(
        zip(
            row.index.tolist(),
            logp.split([len(samples[i].columns["action_ids"]) for i in row.index]),
            strict=True,
        )
    )
    for index, (expected, _) in enumerate(alone):
        torch.testing.assert_close(by_record[index], expected, atol=2e-5, rtol=1e-5)
    assert entropies is not None and not entropies.requires_grad
    assert float(entropies.sum()) == pytest.approx(sum(float(e.sum()) for _, e in alone), rel=1e-4)
    gathered = same.logits(row).gather(1, row.targets[:, None])
    assert gathered.shape == (len(logp), 1)


def test_micro_batches_hold_every_record_once_within_the_budget_of_all_slots() -> None:
    samples = samples_of((3, 5), (20, 9), (1, 1), (2, 30), (90, 20), (7, 7))
    batches = shared_batches(samples, 16, 2, 64, CPU, whole_groups=False)
    assert sorted(int(i) for batch in batches for i in batch.index) == list(range(6))
    for batch in batches:
        assert batch.ids.shape[1] <= 32 or len(batch.index) == 1
    sizes = [batch.ids.shape[1] for batch in batches]
    assert sizes[0] == max(sizes)
    grouped = shared_batches(samples, 16, 2, 64, CPU, whole_groups=True)
    places = {int(i): place for place, batch in enumerate(grouped) for i in batch.index}
    assert all(places[i] == places[i + 1] for i in (0, 2, 4))


def test_a_model_that_does_not_pass_arguments_on_is_refused() -> None:
    same = shared(policy_of("llama"))
    base = same.model.base_model
    forward = base.forward

    def forgetful(**arguments: Any) -> Any:
        names = ("input_ids", "use_cache", "attention_mask")
        return forward(**{name: arguments[name] for name in names if name in arguments})

    base.forward = forgetful
    with pytest.raises(ConfigError, match="log-probs that are .* off"):
        check_shared(same, CPU, tolerance=1e-4)


def test_layers_of_an_unknown_kind_are_refused() -> None:
    policy = policy_of("qwen3")
    policy.model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ConfigError, match="cannot be shared"):
        shared(policy)


@pytest.mark.parametrize(
    "other",
    [
        {"dropout": 0.1},
        {"sliding_window": 9},
        {"s_aux": torch.zeros(2)},
        {"softcap": 30.0},
        {"attention_mask": torch.zeros(1, 1, 10, 10)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_attention_that_is_more_than_causal_is_refused(other: dict[str, Any]) -> None:
    row = SharedRow(shared_by_all([10], 1, 1), ALONE, BlockKernel())
    x = torch.randn(1, 2, 10, 4)
    arguments = {"attention_mask": None, "gcore_context_row": row, **other}
    with pytest.raises(ConfigError, match="this model's attention has"):
        transformers_attention(None, x, x, x, **arguments)
    wide = {**arguments, "sliding_window": 10}
    if other.keys() == {"sliding_window"}:
        result, _ = transformers_attention(None, x, x, x, **wide)
        assert result.shape == (1, 10, 2, 4)


def test_heads_that_the_ranks_cannot_share_are_refused() -> None:
    groups = dataclasses.replace(ALONE, ulysses=2)
    row = SharedRow(shared_by_all([10], 1, 2), groups, BlockKernel())
    x = torch.randn(1, 3, 10, 4)
    with pytest.raises(ConfigError, match="3 query heads cannot be divided among 2"):
        transformers_attention(None, x, x, x, None, gcore_context_row=row)


def test_gradients_of_many_blocks_in_bfloat16_are_as_near_to_float64_as_those_of_torch() -> None:
    torch.manual_seed(0)
    query, gradient = (torch.randn(2048, 4, 16).bfloat16() for _ in range(2))
    key, value = (torch.randn(2048, 2, 16).bfloat16() for _ in range(2))

    def gradients(kernel: Kernel, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        q, k, v, g = (x.to(dtype) for x in (query, key, value, gradient))
        result, log_sum = kernel.forward(q, k, v, causal=True, scale=0.25)
        return kernel.backward(g, q, k, v, result.to(dtype), log_sum, causal=True, scale=0.25)[1:]

    def errors(kernel: Kernel) -> list[float]:
        rough, exact = (gradients(kernel, dtype) for dtype in (torch.bfloat16, torch.float64))
        pairs = zip(rough, exact, strict=True)
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    # sums in bfloat16 would be 1.12 times as far for keys, and ever further with more blocks
    for blocks, flash in zip(errors(BlockKernel()), errors(FlashKernel()), strict=True):
        assert blocks < flash
