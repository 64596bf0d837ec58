"""Measures what low-rank adapters reach on the quickstart's task, and what their pushes weigh.

lora_accuracy_min      held-out greedy accuracy after the quickstart with adapters, of the worst
                       seed; rank 8, alpha 16, learning rate 2.5e-3, all linear layers
lora_push_bytes_over_full
                       bytes of a push of adapters of rank 8 over those of whole weights, on a
                       random Llama of width 1,024, two layers, a vocabulary of 1,024 and tied
                       embeddings, both in float32; a larger vocabulary makes the share smaller.
                       Counted from the tensors of real pushes between a trainer and a generator of
                       gcore-torch, which holds the same bits after both
lora_push_bytes_over_full_quickstart
                       the same of the quickstart's model, whose width is 64
lora_logprob_gap_max   the largest gap in nats between the log-probs of rollout and trainer, over
                       the runs: the generator merges what the trainer computes apart or merged
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import quickstart_runs as runs
from gcore_language.lora_settings import LoraSettings
from gcore_language.tiny import save_tokenizer
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.trainer import TorchTrainer
from report import Claim

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import WeightPlan
from gcore_core.testing.contracts.agreement import PolicyGradient
from gcore_core.testing.contracts.weights import exported, push

RANK = 8
ALPHA = 16.0
LEARNING_RATE = 2.5e-3
WIDTH = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the part's own words."""
    parser.add_argument("--lora-steps", type=int, default=0, help="of a run; 0: the recipe's own")
    parser.add_argument(
        "--lora-overrides", nargs="*", default=[], help="further settings of the runs"
    )


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the part's claims."""
    accuracies = []
    gaps = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as room:
        folder = Path(room)
        for seed in args.seeds:
            rows = train(seed, args, folder)
            accuracies.append(rows[-1]["evaluation"]["greedy/exact"])
            gaps += [row["metrics"].get("logprob_gap_max", 0.0) for row in rows]
            print(f"seed {seed}: {accuracies[-1]:.3f}", file=sys.stderr)
        quickstart = push_share(folder / f"run-{args.seeds[0]}" / "weights")
        wide = push_share(wide_model(folder / "wide"))
    return [
        Claim("lora_accuracy_min", min(accuracies), "share", 0.9),
        Claim("lora_push_bytes_over_full", wide, "ratio", 0.05, "<="),
        Claim("lora_push_bytes_over_full_quickstart", quickstart, "ratio"),
        Claim("lora_logprob_gap_max", max(gaps), "nats", 1e-3, "<="),
    ]


def train(seed: int, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Runs the quickstart with adapters; returns its metrics by step."""
    directory = folder / f"run-{seed}"
    words = [
        "run",
        str(runs.RECIPE),
        *runs.overrides_of(seed, directory),
        f"roles.policy.config.lora={{rank: {RANK}, alpha: {ALPHA}}}",
        f"roles.policy.config.learning_rate={LEARNING_RATE}",
        *([f"run.steps={args.lora_steps}"] if args.lora_steps else []),
        *args.lora_overrides,
    ]
    log = folder / f"run-{seed}.log"
    runs.require_success(runs.start(words, folder, log), words, log)
    return runs.finished_rows(directory, args.lora_steps or 120)


def wide_model(directory: Path) -> Path:
    """Writes a random Llama of the width that the claim names; returns its directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=11 * WIDTH // 4,
        num_hidden_layers=2,
        num_attention_heads=WIDTH // 64,
        num_key_value_heads=WIDTH // 64,
        vocab_size=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def push_share(model: Path) -> float:
    """Returns bytes of a push of adapters over those of whole weights.

    Ends the benchmark unless a generator holds the same bits after both.
    """
    context = WorkerContext(
        role="policy", model={"path": str(model)}, parts={"objective": PolicyGradient()}
    )
    settings = TorchTrainerConfig(lora=LoraSettings(rank=RANK, alpha=ALPHA), packing="padded")
    trainer = TorchTrainer(settings, context)
    with_values = trainer._engine.adapters
    if with_values is None:
        sys.exit("the trainer trains no adapter")
    generator = TorchGenerator(TorchGeneratorConfig(max_batch=1, max_new_tokens=1), context)
    with with_values.on_trial():
        plan = WeightPlan(1, trainer.adapter_specs(), trainer.adapter_facts())
        generator.begin_weights(plan)
        generator.load_weights(trainer.export_adapter())
        generator.commit_weights(plan)
        after_adapter = generator.fingerprint()
        whole = push(generator, exported(trainer), 2)
    after_whole = generator.fingerprint()
    if any(after_adapter[name] != digest for name, digest in after_whole.items()):
        sys.exit("an adapter's push and that of whole weights leave other bits")
    return _nbytes(plan) / _nbytes(whole)


def _nbytes(plan: WeightPlan) -> int:
    return sum(spec.nbytes for spec in plan.tensors)
