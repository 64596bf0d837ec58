"""Lets tests compare an engine's samples and log-probs with transformers' forward pass in
float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gcore_testing.runs import run_recipe
from gcore_testing.safetensors_files import Tensors, read_safetensors
from msgspec import structs
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from gcore_core.contract.generator import Finished, Generator, SampleRequest
from gcore_core.contract.records import Prompt
from gcore_language.image_requests import name_in_modules
from gcore_language.images import Images, takes_images

#: What stands for an image in a prompt of ``tiny.save_image_model``'s models.
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
#: Steps of ``drain`` until all samples must have ended.
_STEPS = 10_000
#: Band of float32 in nats, of 99% of the actions. Measured on a CPU: 1e-6.
_MOST = 1e-4
#: Band of float32 in nats, of all actions.
_ALL = 5e-4


def requests_of(
    prompts: Sequence[str | Prompt], samples: int = 6, *, greedy: bool = False
) -> list[SampleRequest]:
    """Makes ``samples`` requests of each prompt.

    Their seeds are larger than an int64 can hold.
    """
    rows = [
        Prompt(row=i, text=prompt) if isinstance(prompt, str) else prompt
        for i, prompt in enumerate(prompts)
    ]
    return [
        SampleRequest(ordinal=i, sample=j, seed=2**63 + 1000 * i + j, prompt=prompt, greedy=greedy)
        for i, prompt in enumerate(rows)
        for j in range(samples)
    ]


def drain(generator: Generator, count: int) -> list[Finished]:
    """Steps until ``count`` samples have ended; returns their records.

    Raises AssertionError when they do not end in 10,000 steps.
    """
    records: list[Finished] = []
    for _ in range(_STEPS):
        if len(records) == count:
            return records
        records += generator.step()
    raise AssertionError(f"{count - len(records)} samples did not end")


def run(generator: Generator, requests: Sequence[SampleRequest]) -> list[Finished]:
    """Submits the requests and steps until they have ended; returns their records."""
    generator.submit(requests)
    return drain(generator, len(requests))


def tensors_of(directory: Path) -> Tensors:
    """Reads the weights of a model directory, named as a trainer would push them."""
    tensors = read_safetensors(directory / "model.safetensors")
    if not takes_images(AutoConfig.from_pretrained(directory)):
        return tensors
    return [
        (structs.replace(spec, name=name_in_modules(spec.name)), array) for spec, array in tensors
    ]


def gaps(records: Sequence[Finished], directory: Path, actions: slice = slice(None)) -> np.ndarray:
    """Returns |log-prob of a record - that of transformers' forward pass| in nats, float[*].

    directory: the model that transformers loads.
    actions: which actions of each record; by default all.
    """
    seeing = takes_images(AutoConfig.from_pretrained(directory))
    kind: Any = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    record_gaps = []
    for record in records:
        columns = record.columns
        prompt, ids = (
            torch.from_numpy(columns[key].astype(np.int64)) for key in ("prompt_ids", "action_ids")
        )
        with torch.no_grad():
            if seeing:
                logits = _logits_one_by_one(model, prompt, ids, Images.of(columns, record.media))
            else:
                logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        logp = (
            (logits / float(columns["temperature"]))
            .log_softmax(-1)
            .gather(1, ids[:, None])[:, 0]
            .numpy()
        )
        record_gaps.append(np.abs(logp - columns["logp"])[actions])
    return np.concatenate(record_gaps)


def _logits_one_by_one(
    model: Any, prompt: torch.Tensor, actions: torch.Tensor, images: Images | None
) -> torch.Tensor:
    """Returns the logits of the actions, float32[A, V], computed action by action.

    One pass over all tokens would take a sampled image token for an image.
    """
    model.model.rope_deltas = None
    image_arguments = {}
    if images is not None:
        image_arguments = {
            "pixel_values": torch.from_numpy(images.pixels),
            "image_grid_thw": torch.from_numpy(images.grid),
            "mm_token_type_ids": (prompt == model.config.image_token_id).int()[None],
        }
    out = model(input_ids=prompt[None], use_cache=True, **image_arguments)
    logits = [out.logits[0, -1]]
    for action in actions[:-1]:
        out = model(
            input_ids=action[None, None], past_key_values=out.past_key_values, use_cache=True
        )
        logits.append(out.logits[0, -1])
    return torch.stack(logits)


def image_prompts(directory: Path, patch: int = 4) -> list[Prompt]:
    """Makes prompts with images, which are written into the directory.

    Two differ in their image alone, one has two images, one is of chat turns, and one has no image.

    patch: side of a patch in pixels; see ``tiny.save_image_model``.
    """
    from PIL import Image

    draw = np.random.default_rng(0)
    files = {}
    for name, size in {"wide": (2, 3), "tall": (3, 2), "small": (1, 1), "large": (4, 4)}.items():
        files[name] = str(directory / f"{name}.png")
        height, width = (2 * patch * tokens for tokens in size)
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(files[name])
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+"}]}]
    return [
        Prompt(row=0, text=f"{PLACE}1+2=", images=[files["wide"]]),
        Prompt(row=1, text=f"{PLACE}1+2=", images=[files["tall"]]),
        Prompt(row=2, text=f"{PLACE}3{PLACE}+2=", images=[files["small"], files["large"]]),
        Prompt(row=3, messages=turns, images=[files["large"]]),
        Prompt(row=4, text="1+2="),
    ]


def assert_agree(differences: np.ndarray) -> None:
    """Asserts that 99% of the gaps are below 1e-4 nats and all below 5e-4, the band of float32."""
    assert differences.size
    assert np.quantile(differences, 0.99) < _MOST
    assert differences.max() < _ALL


def has_cuda() -> bool:
    """Returns whether torch sees a CUDA device."""
    return bool(torch.cuda.is_available())


def used_on_device() -> int:
    """Returns how many bytes of the first CUDA device's memory are taken, by whichever process."""
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)


_DIGITS = """
def digits(record):
    return sum(c.isdigit() for c in record.text) / 8
"""


def assert_image_run_agrees(
    generator: str, config: Mapping[str, Any], directory: Path, timeout_s: float, patch: int = 4
) -> None:
    """Trains an image-text model on torch for two steps, and asserts that trainer and generator
    agree.

    Before and after a push their log-probs may differ by 1e-4.

    patch: see ``tiny.save_image_model``.
    """
    from gcore_language.tiny import save_image_model

    save_image_model(directory / "model", patch=patch)
    (directory / "reward.py").write_text(_DIGITS)
    seeing = [prompt for prompt in image_prompts(directory, patch) if prompt.images]
    rows = [
        json.dumps({"text": prompt.text or f"{PLACE}1+", "images": prompt.images})
        for prompt in seeing * 2
    ]
    (directory / "rows.jsonl").write_text("\n".join(rows))
    job: dict[str, Any] = {
        "run": {"name": "images", "steps": 2},
        "controller": {"shards": 2, "config": {"prompts": 4}},
        "data": {
            "use": "core/jsonl",
            "config": {"path": "rows.jsonl", "prompt": "text", "images": "images"},
        },
        "advantage": {"use": "algorithms/grpo", "config": {"group_size": 4}},
        "objective": {"use": "algorithms/ppo_clip"},
        "roles": {
            "policy": {
                "use": "torch",
                "model": {"path": "model"},
                "config": {"learning_rate": 1e-2},
            },
            "rollout": {
                "use": generator,
                "follows": "policy",
                "config": {"max_new_tokens": 8, **config},
            },
        },
        "rewards": {
            "digits": {"use": "core/function", "config": {"path": "reward.py", "name": "digits"}}
        },
    }
    (directory / "job.yaml").write_text(json.dumps(job))
    outcome = run_recipe(directory / "job.yaml", directory / "run", ["plugins=[]"], timeout_s)
    assert len(outcome.gaps) == 2
    assert max(outcome.gaps) < _MOST
    assert outcome.versions == [0, 1, 2]


def assert_run_agrees(
    recipe: Path, directory: Path, steps: int, overrides: Sequence[str], timeout_s: float
) -> None:
    """Trains a short run, and asserts that generator and trainer agree after every push.

    Their log-probs may differ by 1e-4; a push that was not taken shows as 1e-2.
    """
    settings = [
        "plugins=[]",
        f"run.steps={steps}",
        "roles.policy.model.make.config={seed: 0, steps: 40}",
    ]
    settings += ["evaluation.prompts=32", "evaluation.every=0", *overrides]
    outcome = run_recipe(recipe, directory, settings, timeout_s)
    assert len(outcome.gaps) == steps
    assert max(outcome.gaps) < _MOST
    assert outcome.versions == list(range(steps + 1))


def assert_run_agrees_with_sleep(
    recipe: Path, directory: Path, steps: int, overrides: Sequence[str], timeout_s: float
) -> None:
    """Asserts the same of a run whose trainer sleeps while generators draw, and that it slept."""
    settings = [*overrides, "placement.sleep_in_rollout=always"]
    assert_run_agrees(recipe, directory, steps, settings, timeout_s)
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    told = [json.loads(line)["metrics"] for line in lines]
    slept = [row for row in told if "trainer_sleep_s" in row]
    assert len(slept) == steps - 1  # after the last step there is no rollout
    assert all(row["trainer_sleep_s"] > 0 and row["trainer_wake_s"] > 0 for row in slept)
