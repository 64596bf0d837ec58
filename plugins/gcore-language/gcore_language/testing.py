"""For tests of engines: their samples and log-probs beside transformers' forward pass in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from gcore_core.protocols import Finished, Generator, SampleRequest
from gcore_core.records import Prompt
from gcore_core.testing.runs import run_recipe
from gcore_core.testing.safetensors_files import Tensors, read_safetensors

#: Steps of ``drain`` until all samples must have ended.
_STEPS = 10_000
#: Band of float32 in nats: of 99% of the actions, and of all. Measured on a CPU: 1e-6.
_MOST, _ALL = 1e-4, 5e-4


def requests_of(prompts: Sequence[str], samples: int = 6, *, greedy: bool = False) -> list[SampleRequest]:
    """Every prompt ``samples`` times; seeds are larger than an int64 can hold."""
    return [
        SampleRequest(ordinal=i, sample=j, seed=2**63 + 1000 * i + j, prompt=Prompt(row=i, text=text), greedy=greedy)
        for i, text in enumerate(prompts)
        for j in range(samples)
    ]


def drain(generator: Generator, count: int) -> list[Finished]:
    """Steps until ``count`` samples have ended."""
    found: list[Finished] = []
    for _ in range(_STEPS):
        if len(found) == count:
            return found
        found += generator.step()
    raise AssertionError(f"{count - len(found)} samples did not end")


def run(generator: Generator, requests: Sequence[SampleRequest]) -> list[Finished]:
    """Submits and drains."""
    generator.submit(requests)
    return drain(generator, len(requests))


def tensors_of(directory: Path) -> Tensors:
    """The weights of a model directory, as a trainer would push them."""
    return read_safetensors(directory / "model.safetensors")


def gaps(records: Sequence[Finished], directory: Path, actions: slice = slice(None)) -> np.ndarray:
    """|log-prob of the record - of transformers' forward pass|, for all (or some) actions of the records."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    for record in records:
        columns = record.columns
        prompt, ids = (torch.from_numpy(columns[key].astype(np.int64)) for key in ("prompt_ids", "action_ids"))
        with torch.no_grad():
            logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        logp = (logits / float(columns["temperature"])).log_softmax(-1).gather(1, ids[:, None])[:, 0].numpy()
        found.append(np.abs(logp - columns["logp"])[actions])
    return np.concatenate(found)


def assert_agree(found: np.ndarray) -> None:
    """All gaps are within the band of float32."""
    assert found.size
    assert np.quantile(found, 0.99) < _MOST
    assert found.max() < _ALL


def has_cuda() -> bool:
    return torch.cuda.is_available()


def used_on_device() -> int:
    """Bytes of the first CUDA device's memory that are taken, by whichever process."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def assert_run_agrees(recipe: Path, directory: Path, steps: int, overrides: Sequence[str], timeout_s: float) -> None:
    """Trains a short run: after every push generator and trainer are within 1e-4; one not taken shows as 1e-2."""
    settings = ["plugins=[]", f"run.steps={steps}", "roles.policy.model.make.config={seed: 0, steps: 40}"]
    settings += ["evaluation.prompts=32", "evaluation.every=0", *overrides]
    found = run_recipe(recipe, directory, settings, timeout_s)
    assert len(found.gaps) == steps
    assert max(found.gaps) < _MOST
    assert found.versions == list(range(steps + 1))
