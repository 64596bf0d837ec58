"""Measures what a trainer's ranks hold while they load a model, and whether training is the same.

load_peak_over_shard   of the worst of four ranks of gcore-torch's trainer: the most anonymous
                       memory until it has its weights, above a rank with a tiny model, over the
                       bytes of its shard. The model is a random Llama of 64 layers in bfloat16,
                       trained in float32
load_and_trial_peak_over_shard
                       the same until it can train: with the trial of packings, a first forward
                       pass, which gathers the embedding and one layer after the other
load_peak_over_shard_whole
                       the same where every rank loads the whole model before it is sharded
load_peak_over_model_one_rank
                       the same of a single rank, which has the whole model
losses_meta_init_equal the largest difference of loss and gradient norm, relative, over three steps
                       on four ranks, between a model of which each rank read its own rows and one
                       that each loaded whole

    python benchmarks/large.py --parts load [--load-layers 64] [--load-width 512]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import Claim

RANKS = 4
STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the part's own words."""
    parser.add_argument("--load-layers", type=int, default=64)
    parser.add_argument("--load-width", type=int, default=512)


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the part's claims."""
    with tempfile.TemporaryDirectory(prefix="large-load-", dir=os.environ.get("TMPDIR")) as name:
        room = Path(name)
        large = _write(room / "large", layers=args.load_layers, width=args.load_width)
        tiny = _write(room / "tiny", layers=2, width=64)
        claims = []
        peaks, whole_peaks = (_ranks(large, room, RANKS, whole=whole) for whole in (False, True))
        read, whole = (
            _ranks(tiny, room, RANKS, whole=whole, steps=STEPS) for whole in (False, True)
        )
        alone, base = _ranks(large, room, 1), _ranks(tiny, room, 1)
        for claim, ranks, bases, moment, bar in (
            ("load_peak_over_shard", peaks, read, "loaded", 1.3),
            ("load_and_trial_peak_over_shard", peaks, read, "ready", None),
            ("load_peak_over_shard_whole", whole_peaks, whole, "loaded", None),
            ("load_peak_over_model_one_rank", alone, base, "loaded", None),
        ):
            claims.append(Claim(claim, _worst(ranks, bases, moment), "ratio", bar, "<="))
    difference = max(
        abs(one - other) / max(abs(other), 1e-3)
        for one, other in zip(read[0]["numbers"], whole[0]["numbers"], strict=True)
    )
    return [*claims, Claim("losses_meta_init_equal", difference, "ratio", 1e-6, "<=")]


def _worst(peaks: list[dict[str, Any]], bases: list[dict[str, Any]], moment: str) -> float:
    """Returns the largest peak above that of the same rank with a tiny model, over its shard.

    moment: until when the peak is taken.
    """
    return max(
        float((rank[moment] - base[moment]) / rank["shard"])
        for rank, base in zip(peaks, bases, strict=True)
    )


def _write(directory: Path, *, layers: int, width: int) -> Path:
    """Writes a random Llama in bfloat16."""
    import torch
    from gcore_language.tiny import VOCABULARY, save_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    vocabulary = 8 * width
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory, extra=vocabulary - VOCABULARY)
    return directory


def _ranks(
    model: Path, room: Path, ranks: int, *, whole: bool = False, steps: int = 0
) -> list[dict[str, Any]]:
    """Runs the ranks of a trainer; returns what each measured.

    whole: whether every rank loads the whole model.
    """
    work = Path(tempfile.mkdtemp(dir=room))
    (work / "meet").mkdir()
    words = [str(ranks), str(model), str(work), str(int(whole)), str(steps)]
    started = [
        subprocess.Popen([sys.executable, __file__, str(rank), *words], env=_environment())
        for rank in range(ranks)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    return [json.loads((work / f"{rank}.json").read_text()) for rank in range(ranks)]


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "MALLOC_TRIM_THRESHOLD_": "0",
    }


# -- in the processes of the ranks -----------------------------------------------------------------


def _rank(rank: int, ranks: int, model: Path, work: Path, whole: int, steps: int) -> None:
    """Makes one rank of a trainer, and writes what it measured."""
    from anonymous_memory import Peak
    from gcore_language.own_rows import OwnRows
    from gcore_torch.config import TorchTrainerConfig
    from gcore_torch.engine import TorchEngine
    from gcore_torch.trainer import TorchTrainer

    from gcore_core.contract.context import WorkerContext
    from gcore_core.testing.contracts.agreement import PolicyGradient

    if whole:
        OwnRows.lacks = lambda self, model: ["all"]  # type: ignore[method-assign]
    context = WorkerContext(
        role="policy",
        rank=rank,
        ranks=ranks,
        rendezvous=str(work / "meet"),
        directory=str(work),
        steps=max(1, steps),
        model={"path": str(model)},
        parts={"objective": PolicyGradient()},
    )
    loaded = []
    trial = TorchEngine._try

    def noted(*given: Any) -> None:
        loaded.append(peak.now())
        trial(*given)

    TorchEngine._try = noted  # type: ignore[method-assign]
    with Peak() as peak:
        trainer = TorchTrainer(TorchTrainerConfig(learning_rate=1e-3, eps=1e-3), context)
    tensors = trainer._engine.weights().values()
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    found: dict[str, Any] = {
        "loaded": loaded[0],
        "ready": peak.most,
        "shard": sum(t.numel() * t.element_size() for t in local),
        "numbers": [],
    }
    for step in range(steps):
        metrics = _step(trainer, step, rank)
        found["numbers"] += [metrics["loss"], metrics["grad_norm"]]
    trainer.close()
    (work / f"{rank}.json").write_text(json.dumps(found))


def _step(trainer: Any, step: int, rank: int) -> dict[str, float]:
    """Trains on records of this rank's own."""
    import numpy as np

    from gcore_core.contract.trainer import TrainRecord

    draw = np.random.default_rng([step, rank])
    records = []
    for sample in range(4):
        actions = int(draw.integers(4, 20))
        columns = {
            "prompt_ids": draw.integers(3, 100, 7).astype(np.int32),
            "action_ids": draw.integers(3, 100, actions).astype(np.int32),
            "logp": np.full(actions, -4.0, np.float32),
            "action_mask": np.ones(actions, np.bool_),
            "temperature": np.array(np.float32(1.0)),
        }
        records.append(TrainRecord(ordinal=rank, sample=sample, minibatch=0, columns=columns))
    trainer.prepare(records, frozenset())
    metrics: dict[str, float] = trainer.train(step, draw.standard_normal(4), 1, 1)
    return metrics


if __name__ == "__main__":
    _rank(
        int(sys.argv[1]),
        int(sys.argv[2]),
        Path(sys.argv[3]),
        Path(sys.argv[4]),
        int(sys.argv[5]),
        int(sys.argv[6]),
    )
    sys.stdout.flush()
    os._exit(0)  # all is written; a thread of a library may abort a process that exits as usual
