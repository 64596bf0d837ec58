"""One generator of gcore-torch: what it holds at most, beside what its plan foresees, as JSON.

``python -m tests.support.generator_memory DIRECTORY PUSHED``, by test_memory.py. It draws, gets a
push of "weights" or of an "adapter" alone, and draws again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from gcore_language import adapter_testing
from gcore_language.host_memory import return_free_pages
from gcore_language.tiny import save_tokenizer
from gcore_language.weights import to_bytes
from gcore_testing.contracts.weights import load
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.memory import generator_memory
from transformers import LlamaConfig, LlamaForCausalLM

from gcore_core.contract.memory import WorkerShape
from gcore_core.contract.records import WeightPlan
from tests.support.language_models import drain, make_context, make_requests

ROWS = 12


def save(directory: Path, layers: int = 8) -> None:
    """Saves a model of 42 million numbers, or of fewer layers."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=16384,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)


def held(word: str) -> int:
    """Returns a number of this process's status in bytes; VmHWM is its most memory so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{word}:"))


def draw(generator: TorchGenerator) -> None:
    generator.submit(make_requests(groups=3, samples=ROWS // 3))
    drain(generator)


def open_generator(directory: Path) -> TorchGenerator:
    config = TorchGeneratorConfig(max_new_tokens=12, max_batch=ROWS)
    return TorchGenerator(config, make_context(directory, role="rollout"))


def receive(generator: TorchGenerator, directory: Path, pushed: str) -> None:
    """Has a generator receive what its files have already, or a new adapter."""
    if pushed == "adapter":
        plan, tensors = adapter_testing.adapter_push(directory, directory / "adapter", 4, 1)
        generator.begin_weights(plan)
        load(generator, tensors)
    else:
        plan = WeightPlan(1, generator.weight_specs())
        generator.begin_weights(plan)
        for spec in plan.tensors:  # one at a time, so that this process holds no second model
            load(generator, [(spec, to_bytes(generator._tensors[spec.name]))])
    generator.commit_weights(plan)


def run(directory: Path, pushed: str) -> dict[str, int]:
    """Returns the most bytes that the model takes, and those that are foreseen for it."""
    torch.set_num_threads(1)
    save(directory / "small", layers=1)
    draw(open_generator(directory / "small"))  # imports what any generator needs
    adapter_testing.save_adapter(directory / "adapter", directory)
    return_free_pages()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the most memory so far
    begun = held("VmRSS")
    generator = open_generator(directory)
    draw(generator)
    receive(generator, directory, pushed)
    draw(generator)
    shape = WorkerShape(role="rollout", model={"path": str(directory)})
    needs = list(generator_memory(TorchGeneratorConfig(), shape))
    foreseen = sum(
        need.nbytes or 0
        for need in needs
        if need.phase == "rollout" and need.what in ("weights", "packed weights")
    )
    return {"held": held("VmHWM") - begun, "foreseen": foreseen}


if __name__ == "__main__":
    save(Path(sys.argv[1]))
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2])))
