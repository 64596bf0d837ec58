"""Measures what the replay of routers does to the log-probs of a mixture of experts.

A random Qwen3-MoE (6 layers, 128 experts, 7 for each token) samples records with gcore-torch's
generator: token by token, with cached keys and values, in batches of decoding rows. gcore-torch's
trainer computes the log-probs of the same records packed, so every product is summed in other
shapes. Weights are the same bits on both sides, and nothing else is disturbed.

In float32 rounding changes a choice about once in a million, so the model for float32 is made to
have close ones: its router rows come in pairs that differ by 1e-4 of their size, and the two
experts of a pair are different. With 7 experts of a token, a pair always stands at the edge. The
model for bfloat16 has plain random routers.

moe_logprob_gap_with_replay     the largest difference, in nats, of an action's log-prob between
                                the two in float32, where the trainer takes the record's experts
moe_logprob_gap_without_replay  the same where its routers choose by themselves
moe_router_differ_share         share of choices, one for each token and layer, in which those
                                routers choose other experts than the record has
moe_router_differ_choices       how many choices that are
moe_actions                     over how many actions this is
moe_bf16_logprob_gap_mean_with_replay, moe_bf16_logprob_gap_mean_without_replay
                                the mean difference where generator and trainer compute in bfloat16
moe_bf16_router_differ_share    share of choices that differ then
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from gcore_language.tiny import VOCABULARY, save_tokenizer
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.trainer import TorchTrainer
from report import Claim

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import Prompt
from gcore_core.contract.trainer import TrainRecord
from gcore_core.testing.contracts.agreement import PolicyGradient

LAYERS = 6
WORDS = 512
ACTIONS = 64

Dtype = Literal["float32", "bfloat16"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the part's own words."""
    parser.add_argument("--moe-prompts", type=int, default=16, help="prompts, of 8 records each")


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the part's claims."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as room:
        paired = random_model(Path(room) / "paired", paired=True)
        exact = compare(paired, "float32", args.moe_prompts)
        plain = random_model(Path(room) / "plain", paired=False)
        rounded = compare(plain, "bfloat16", args.moe_prompts)
    choices = exact["tokens"][""] * LAYERS
    share = exact["without"]["router_differ_share"]
    return [
        Claim("moe_logprob_gap_with_replay", exact["with"]["logprob_gap_max"], "nats", 1e-4, "<="),
        Claim("moe_logprob_gap_without_replay", exact["without"]["logprob_gap_max"], "nats"),
        Claim("moe_router_differ_share", share, "share"),
        Claim("moe_router_differ_choices", share * choices, "choices"),
        Claim("moe_actions", exact["with"]["actions"], "actions"),
        Claim("moe_bf16_logprob_gap_mean_with_replay", rounded["with"]["logprob_gap_mean"], "nats"),
        Claim(
            "moe_bf16_logprob_gap_mean_without_replay",
            rounded["without"]["logprob_gap_mean"],
            "nats",
        ),
        Claim("moe_bf16_router_differ_share", rounded["without"]["router_differ_share"], "share"),
    ]


def random_model(directory: Path, *, paired: bool) -> Path:
    """Writes a random mixture of experts; returns its directory.

    paired: whether router rows come in pairs that are nearly the same.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=128,
        num_experts_per_tok=7,
        norm_topk_prob=True,
        mlp_only_layers=[],
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.06,
    )
    model = Qwen3MoeForCausalLM(config)
    if paired:
        with torch.no_grad():
            for layer in model.model.layers:
                rows = layer.mlp.gate.weight
                rows[1::2] = rows[0::2] * (1 + 1e-4 * torch.randn_like(rows[0::2]))
    model.save_pretrained(directory)
    save_tokenizer(directory, extra=WORDS - VOCABULARY)
    return directory


def compare(model: Path, dtype: Dtype, prompts: int) -> dict[str, dict[str, float]]:
    """Returns the metrics of a step, with and without replay, of the same sampled records.

    "tokens" has the number of tokens that went through the model, as ``{"": number}``.
    """
    context = WorkerContext(
        role="policy", model={"path": str(model)}, parts={"objective": PolicyGradient()}
    )
    settings = TorchGeneratorConfig(
        max_new_tokens=ACTIONS, max_batch=128, dtype=dtype, context_length=256
    )
    sampled = sample(TorchGenerator(settings, context), prompts)
    found: dict[str, dict[str, float]] = {}
    for name, replay in (("with", "always"), ("without", "never")):
        trainer = TorchTrainer(
            TorchTrainerConfig(dtype=dtype, router_replay=replay, budget_tokens=4096), context
        )
        trainer.prepare(sampled, frozenset())
        found[name] = trainer.train(0, np.zeros(len(sampled)), 1, 1)
        trainer.close()
        print(f"{dtype} {name} replay: {found[name]['logprob_gap_max']:.3g}", file=sys.stderr)
    found["tokens"] = {"": float(sum(len(r.columns["routing"]) for r in sampled))}
    return found


def sample(generator: TorchGenerator, prompts: int) -> Sequence[TrainRecord]:
    """Samples eight records of each prompt; returns them as a rank of a trainer gets them."""
    draw = np.random.default_rng(0)
    texts = ["".join(map(str, draw.integers(0, 10, 3 + row % 5))) for row in range(prompts)]
    generator.submit(
        [
            SampleRequest(
                ordinal=row,
                sample=number,
                seed=1000 * row + number,
                prompt=Prompt(row=row, text=text),
            )
            for row, text in enumerate(texts)
            for number in range(8)
        ]
    )
    ended: list[Finished] = []
    while len(ended) < 8 * prompts:
        ended += generator.step()
    generator.close()
    records = [
        TrainRecord(
            ordinal=record.request.ordinal,
            sample=record.request.sample,
            minibatch=0,
            columns=record.columns,
        )
        for record in ended
    ]
    return sorted(records, key=lambda record: (record.ordinal, record.sample))
