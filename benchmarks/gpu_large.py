"""Measures models of real shapes on one GPU; ``gpu.py`` runs each part in a process of its own.

Models are Qwen3's of 0.6 and 4 billion parameters, with random weights, made on the spot.

step       tokens per second of an update, and the most memory: the trainer in bfloat16 with its
           float32 weights, one record of 16,384 tokens (65,536 with "step_64k"), layers computed
           again in the backward pass, ``compile: auto``
lora       the same with adapters of rank 16 on 4 billion frozen parameters in bfloat16
decode     tokens per second of the torch generator, and which share of the memory's bandwidth that
           is, if weights and the cache were read once a token; beside transformers' ``generate``.
           "decode_compiled" has the generator's ``compile: auto``
naps       a trainer and a generator give their memory back and wake, over the bytes by PCIe
save       what a save in the background costs the step that it runs beside
repeat     two deterministic runs of the quickstart end with the same weights
offload    a run whose weights and optimizer lie in host memory, sharded (FSDP2) on one rank

    python benchmarks/gpu_large.py PART FOLDER      prints the claims of a part, one JSON a line
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from report import Claim, interval

GIB = 2**30
_QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4b": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
#: (tokens per second, GiB) that prime-rl committed for a step of its trainer on one H100: of
#: Qwen3-0.6B, and of Qwen3-4B with LoRA of rank 16; by tokens of the step.
RIVAL = {
    "step": {16384: (11896.0, 12.5), 65536: (10147.0, 19.6)},
    "lora": {16384: (6229.0, 23.3), 65536: (4164.0, 42.0)},
}
PROMPT = 512
#: Of the generator's trial: samples, characters of a prompt, actions of a sample.
BATCHES = ((8, 128, 256), (64, 128, 256), (64, 1024, 256))


def write_model(folder: Path, shape: str) -> Path:
    """Returns a model of random weights in bfloat16, with a tokenizer of single characters.

    folder: where it is written, unless another part has.
    """
    import torch
    from gcore_language.tiny import VOCABULARY, save_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = folder / shape
    if (directory / "tokenizer.json").exists():  # it is written last
        return directory
    config = Qwen3Config(
        **SHAPES[shape],
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(directory)
    save_tokenizer(directory, extra=config.vocab_size - VOCABULARY)
    return directory


@contextmanager
def trainer_of(model: Path, tokens: int, **settings: Any) -> Iterator[Any]:
    """Opens a trainer, whose passes have so many tokens."""
    from gcore_testing.contracts.trainer import PolicyGradient
    from gcore_torch.config import TorchTrainerConfig
    from gcore_torch.trainer import make_trainer

    from gcore_core.contract.context import WorkerContext

    context = WorkerContext(
        role="policy",
        directory=str(model.parent),
        steps=100,
        model={"path": str(model)},
        parts={"objective": PolicyGradient()},
    )
    config = TorchTrainerConfig(
        dtype="bfloat16",
        gradient_checkpointing=True,
        compile="auto",
        budget_tokens=tokens,
        resplit_every=0,
        **settings,
    )
    trainer = make_trainer(config, context)
    try:
        yield trainer
    finally:
        trainer.close()


def update(trainer: Any, step: int, tokens: int) -> float:
    """Prepares and trains one record of so many tokens; returns the seconds of its training."""
    import numpy as np
    import torch

    from gcore_core.contract.trainer import TrainRecord

    draw = np.random.default_rng(step)
    actions = tokens - PROMPT + 1  # the last one is never fed
    columns = {
        "prompt_ids": draw.integers(3, 150000, PROMPT).astype(np.int32),
        "action_ids": draw.integers(3, 150000, actions).astype(np.int32),
        "logp": np.full(actions, -12.0, np.float32),
        "action_mask": np.ones(actions, np.bool_),
        "temperature": np.array(np.float32(1.0)),
    }
    record = TrainRecord(ordinal=0, sample=0, minibatch=0, columns=columns)
    trainer.prepare([record], frozenset())
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    trainer.train(step, np.ones(1), 1, 1)
    torch.cuda.synchronize()
    return time.perf_counter() - began_s


def _step(folder: Path, kind: str, tokens: int, rounds: int) -> list[Claim]:
    import torch
    from gcore_language.lora_settings import LoraSettings

    settings = {"lora": LoraSettings(rank=16)} if kind == "lora" else {}
    model = write_model(folder, "4b" if kind == "lora" else "0.6b")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with trainer_of(model, tokens, **settings) as trainer:
        for step in range(2):  # kernels are made, first for these sizes and then for any
            update(trainer, step, tokens // (2 - step))
        rates = [tokens / update(trainer, step, tokens) for step in range(2, 2 + rounds)]
    rate_bar, memory_bar = RIVAL[kind][tokens]
    name = f"{kind}_{tokens // 1024}k"
    peak = torch.cuda.max_memory_allocated() / GIB
    return [
        Claim(
            f"{name}_tokens_per_second",
            statistics.median(rates),
            "tokens/s",
            rate_bar,
            interval=interval(rates, statistics.median),
        ),
        Claim(f"{name}_peak_gib", peak, "GiB", memory_bar, "<="),
    ]


def decode(folder: Path, compile: Literal["never", "auto"] = "never") -> list[Claim]:
    """Returns rates of the generator, and of transformers beside the one without ``compile``."""
    import torch
    from gcore_torch.config import TorchGeneratorConfig
    from gcore_torch.generator import TorchGenerator

    from gcore_core.contract.context import WorkerContext
    from gcore_core.contract.generator import SampleRequest
    from gcore_core.contract.records import Prompt

    model = write_model(folder, "0.6b")
    bandwidth = copy_rate("cuda", "cuda")
    claims = [Claim("memory_gb_per_second", bandwidth / 1e9, "GB/s")]
    for samples, prompt, actions in BATCHES:
        config = TorchGeneratorConfig(
            max_new_tokens=actions,
            max_batch=samples,
            dtype="bfloat16",
            context_length=4096,
            compile=compile,
        )
        generator = TorchGenerator(
            config, WorkerContext(role="rollout", model={"path": str(model)})
        )
        weights = int(generator.memory_bytes)
        text = "1+2=" * (prompt // 4)
        found = []
        for _ in range(3):
            generator.submit(
                [
                    SampleRequest(ordinal=i, sample=0, seed=i, prompt=Prompt(row=i, text=text))
                    for i in range(samples)
                ]
            )
            began_s = time.perf_counter()
            steps = ended = 0
            while ended < samples:
                ended += len(generator.step())
                steps += 1
            found.append((time.perf_counter() - began_s) / steps)
        generator.close()
        step_s = statistics.median(found[1:])  # the first one makes the graphs
        cached = samples * (prompt + actions / 2) * cache_bytes_of("0.6b")
        name = f"decode{'_compiled' if compile == 'auto' else ''}_{samples}x{prompt}"
        claims += [
            Claim(f"{name}_tokens_per_second", samples / step_s, "tokens/s"),
            Claim(
                f"{name}_share_of_bandwidth", (weights + cached) / bandwidth / step_s, "share", 0.6
            ),
        ]
        del generator
        torch.cuda.empty_cache()
    return claims if compile == "auto" else [*claims, *_transformers(model)]


def _transformers(model: Path, samples: int = 64, actions: int = 48) -> list[Claim]:
    import torch
    from transformers import AutoModelForCausalLM

    engine: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda()
    ids = torch.randint(3, 20, (samples, 129), device="cuda")
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        with torch.no_grad():
            engine.generate(ids, max_new_tokens=actions, min_new_tokens=actions, do_sample=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
    rate = samples * actions / seconds[-1]
    return [Claim(f"transformers_{samples}x128_tokens_per_second", rate, "tokens/s")]


def cache_bytes_of(shape: str) -> int:
    """Returns the bytes of keys and values of one token in bfloat16."""
    sizes = SHAPES[shape]
    heads = sizes["num_key_value_heads"] * sizes["head_dim"]
    return int(2 * 2 * sizes["num_hidden_layers"] * heads)


def copy_rate(source: str, target: str, nbytes: int = 2 * 10**9, rounds: int = 5) -> float:
    """Returns bytes per second of a copy; on the device both reading and writing count."""
    import torch
    from gcore_language.pinned import pinned_bytes

    def memory(place: str) -> torch.Tensor:
        on_host = place == "cpu"
        return pinned_bytes(nbytes) if on_host else torch.empty(nbytes, dtype=torch.uint8).cuda()

    first, second = memory(source), memory(target)
    second.copy_(first, non_blocking=True)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(rounds):
        second.copy_(first, non_blocking=True)
    torch.cuda.synchronize()
    passes = 2 if source == target else 1
    return rounds * passes * nbytes / (time.perf_counter() - began_s)


def naps(folder: Path) -> list[Claim]:
    """Returns how fast sleep and wake are, over the same bytes by PCIe."""
    import torch
    from gcore_torch.config import TorchGeneratorConfig
    from gcore_torch.generator import TorchGenerator

    from gcore_core.contract.context import WorkerContext

    model = write_model(folder, "0.6b")
    torch.cuda.empty_cache()
    there, back = copy_rate("cuda", "cpu"), copy_rate("cpu", "cuda")
    claims = [
        Claim("pcie_to_host_gb_per_second", there / 1e9, "GB/s"),
        Claim("pcie_to_device_gb_per_second", back / 1e9, "GB/s"),
    ]
    with trainer_of(model, 2048) as trainer:
        update(trainer, 0, 2048)
        claims += _nap("trainer", trainer, 1 / there + 1 / back)
    config = TorchGeneratorConfig(dtype="bfloat16", max_batch=8)
    generator = TorchGenerator(config, WorkerContext(role="rollout", model={"path": str(model)}))
    claims += _nap("generator", generator, 1 / there + 1 / back)
    return claims


def _nap(name: str, sleeper: Any, seconds_per_byte: float) -> list[Claim]:
    import torch

    nbytes = int(sleeper.memory_bytes)
    before = torch.cuda.memory_allocated()
    seconds, freed = [], 0
    for _ in range(6):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        sleeper.sleep()
        torch.cuda.synchronize()
        slept_s = time.perf_counter() - began_s
        freed = before - torch.cuda.memory_allocated()
        began_s = time.perf_counter()
        sleeper.wake()
        torch.cuda.synchronize()
        seconds.append(slept_s + time.perf_counter() - began_s)
    ratios = [nbytes * seconds_per_byte / taken for taken in seconds[1:]]  # the first one pins
    return [
        Claim(
            f"{name}_nap_over_pcie",
            statistics.median(ratios),
            "share",
            0.8,
            interval=interval(ratios, statistics.median),
        ),
        Claim(f"{name}_nap_freed_over_held", freed / nbytes, "share", 0.95),
        Claim(f"{name}_first_nap_s", seconds[0], "s"),
    ]


def save(folder: Path) -> list[Claim]:
    """Returns what a save in the background adds to a step."""
    tokens = 16384
    model = write_model(folder, "0.6b")
    with trainer_of(model, tokens) as trainer:
        for step in range(2):
            update(trainer, step, tokens // (2 - step))
        alone = [update(trainer, step, tokens) for step in range(2, 6)]
        beside, took = [], []
        for place in range(3):
            began_s = time.perf_counter()
            trainer.begin_save(folder / f"save-{place}")
            held_s = time.perf_counter() - began_s
            beside.append(held_s + update(trainer, 10 + place, tokens))
            trainer.finish_save()
            took.append(time.perf_counter() - began_s)
    alone_s = statistics.median(alone)
    return [
        Claim("save_stall_s", max(0.0, statistics.median(beside[1:]) - alone_s), "s"),
        Claim("first_save_stall_s", max(0.0, beside[0] - alone_s), "s"),
        Claim("save_took_s", statistics.median(took), "s"),
    ]


def _quickstart(folder: Path, name: str, *settings: str) -> Path:
    """Runs eight steps of the quickstart on the GPU; returns the run's directory."""
    from gpu import RECIPE

    where = folder / name
    subprocess.run(
        [
            *(sys.executable, "-m", "gcore_core", "run", str(RECIPE), f"run.dir={where}"),
            *("plugins=[]", "cluster.devices=1", "run.steps=8", "evaluation.every=0"),
            *("roles.policy.config.device=cuda", "roles.rollout.config.device=cuda"),
            *("controller.config.prompts=16", *settings),
            "roles.policy.model.make.config={seed: 0, steps: 40}",
        ],
        check=True,
        stdout=sys.stderr,
    )
    return where


def repeat(folder: Path) -> list[Claim]:
    """Returns how many hashes two deterministic runs have."""
    from gcore_core.run.saved_weights import weights_sha256

    runs = [_quickstart(folder, f"repeat-{place}", "run.deterministic=true") for place in range(2)]
    hashes = {weights_sha256(run / "weights") for run in runs}
    return [Claim("deterministic_distinct_hashes_of_two_runs", len(hashes), "hashes", 1, "<=")]


def offload(folder: Path) -> list[Claim]:
    """Returns how many steps a run made whose state lies in host memory."""
    from gcore_core.contract.run_files import read_metrics

    run = _quickstart(folder, "offload", "roles.policy.config.offload.state=true")
    steps = max(row["step"] for row in read_metrics(run))
    return [Claim("offload_steps", steps, "steps", 8)]


PARTS: dict[str, Callable[[Path], list[Claim]]] = {
    "step": lambda folder: _step(folder, "step", 16384, 5),
    "lora": lambda folder: _step(folder, "lora", 16384, 3),
    "step_64k": lambda folder: _step(folder, "step", 65536, 2),
    "lora_64k": lambda folder: _step(folder, "lora", 65536, 1),
    "decode": decode,
    "decode_compiled": lambda folder: decode(folder, "auto"),
    "naps": naps,
    "save": save,
    "repeat": repeat,
    "offload": offload,
}


def claims_of(part: str, folder: Path) -> list[Claim]:
    """Runs a part in a process of its own; returns its claims.

    Raises subprocess.CalledProcessError where it failed.
    """
    done = subprocess.run(
        [sys.executable, __file__, part, str(folder)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [Claim(**json.loads(line)) for line in done.stdout.splitlines() if line[:1] == "{"]


if __name__ == "__main__":
    where = Path(sys.argv[2])
    for claim in PARTS[sys.argv[1]](where):
        print(json.dumps(dataclasses.asdict(claim)))
    sys.stdout.flush()
    os._exit(0)  # all is printed; a thread of a library may abort a process that exits as usual
