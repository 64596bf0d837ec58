"""Nothing by itself: a generator that sleeps and wakes, for gpu.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt, TensorSpec, WeightPlan

#: millions of parameters -> hidden size, layers
SIZES = {50: (768, 6)}


def make_model(directory: Path, millions: int) -> None:
    """Writes a Llama of about so many million float32 parameters, with the quickstart's
    tokenizer.
    """
    import torch
    from gcore_language.tiny import VOCABULARY, save_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers = SIZES[millions]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)


class Model:
    """A generator, and what it samples.

    generator: the generator itself.
    mode: what a sleep does with the weights, "keep" or "discard".
    tensors: the weights' bytes, for the push after a sleep that discards them.
    tokens: what it samples for one prompt.
    """

    def __init__(
        self, directory: Path, mode: str, tensors: Sequence[tuple[TensorSpec, np.ndarray]]
    ) -> None:
        from gcore_torch.config import TorchGeneratorConfig
        from gcore_torch.generator import TorchGenerator

        # one row: the cache of the default 256 would take more memory than the weights
        settings = TorchGeneratorConfig(max_new_tokens=4, max_batch=1, sleep=mode)  # type: ignore[arg-type]
        context = WorkerContext(role="rollout", model={"path": str(directory)})
        self.generator: Any = TorchGenerator(settings, context)
        self.mode = mode
        self.tensors = tensors
        self.tokens = self.sample()

    def sample(self) -> list[int]:
        """Returns the tokens of one sample for a fixed prompt and seed."""
        self.generator.submit(
            [SampleRequest(ordinal=0, sample=0, seed=1, prompt=Prompt(row=0, text="1+2="))]
        )
        while not (finished := self.generator.step()):
            pass
        return [int(token) for token in finished[0].columns["action_ids"]]

    def wake(self) -> None:
        """Wakes the generator, and pushes its weights where they were discarded."""
        self.generator.wake()
        if self.mode == "discard":
            plan = WeightPlan(self.generator.version, [spec for spec, _ in self.tensors])
            self.generator.begin_weights(plan)
            self.generator.load_weights(iter(self.tensors))
            self.generator.commit_weights(plan)


def _tensors(directory: Path) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Yields every tensor in the safetensors files of a directory, with its bytes."""
    from safetensors.numpy import load_file

    for file in sorted(directory.glob("*.safetensors")):
        for name, array in load_file(file).items():
            yield (
                TensorSpec(name, "F32", array.shape, array.nbytes),
                array.reshape(-1).view(np.uint8),
            )
