"""Two tiny models: a denoiser of small pictures of a class, and a classifier that judges them.

A denoiser's directory holds ``config.json`` (``TinyConfig`` and ``"model_type":
"gcore-tiny-denoiser"``) and ``model.safetensors``. A classifier is one safetensors file. The recipe
of the digits makes both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from gcore_language.pretrained import refuse_not_finite
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Prompt
from gcore_diffusion.config import DiffusionGeneratorConfig, Prediction
from gcore_diffusion.way import Condition, Schedule, Way, read_prompts

MODEL_TYPE = "gcore-tiny-denoiser"


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """The sizes of a ``TinyNet``.

    classes: how many classes it draws.
    side: side of the square grey pictures, in pixels.
    width: size of the hidden vectors.
    blocks: how many residual blocks.
    prediction: what the output is: "flow" (noise - clean), "epsilon" or "v".
    """

    classes: int = 10
    side: int = 8
    width: int = 192
    blocks: int = 3
    prediction: Prediction = "flow"


def class_of(label: object, classes: int) -> int | None:
    """Returns the class, counted from 0, that a row's label names; None where it names none.

    3, 3.0, "3" and "3.0" name the same class.
    """
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return None
    try:
        number = float(label)
    except (ValueError, OverflowError):
        return None
    return int(number) if number in range(classes) else None


class _Block(nn.Module):
    """A residual block whose norm is shifted, scaled and gated by the condition; see ``TinyNet``.

    The modulation starts as zero, so that a fresh block returns its input.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition).chunk(3, -1)
        return hidden + gate * self.down(F.silu(self.up(self.norm(hidden) * (1 + scale) + shift)))


class TinyNet(nn.Module):
    """A residual network on flat pictures, with adaptive norms as in DiT (arXiv:2212.09748).

    The class after the last one stands for no class, for guidance. A fresh network outputs zeros.
    """

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        pixels = config.side**2
        width = config.width
        self.config = config
        self.inner = nn.Linear(pixels, width)
        self.label = nn.Embedding(config.classes + 1, width)
        self.time_in = nn.Linear(64, width)
        self.time_out = nn.Linear(width, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(width)
        self.outer = nn.Linear(width, pixels)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        """Returns the prediction, float32[R, pixels].

        x: float32[R, pixels], noisy pictures.
        time: float32[R] in 0..1; 1 is noise.
        label: int64[R], the classes.
        """
        frequencies = torch.exp(torch.linspace(0, math.log(1000), 32, device=x.device))
        angles = time[:, None] * frequencies
        embedded = self.time_out(F.silu(self.time_in(torch.cat([angles.sin(), angles.cos()], -1))))
        condition = F.silu(embedded + self.label(label))
        hidden = self.inner(x)
        for block in self.blocks:
            hidden = block(hidden, condition)
        return self.outer(self.norm(hidden))


def save_tiny(net: TinyNet, directory: Path) -> None:
    """Writes a directory that ``TinyDenoiser`` opens."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"model_type": MODEL_TYPE, **asdict(net.config)}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in net.state_dict().items()},
        directory / "model.safetensors",
    )


class TinyDenoiser:
    """The tiny model as a denoiser; see ``gcore_diffusion.models.Denoiser``.

    A prompt's class is its field ``label``, or else its text.
    """

    def __init__(self, directory: Path, device: torch.device, *, lora: bool) -> None:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config.pop("model_type")
        try:
            self.config = msgspec.convert(config, TinyConfig)
            self.module = TinyNet(self.config)
            self.module.load_state_dict(load_file(directory / "model.safetensors"))
        except (msgspec.ValidationError, OSError, RuntimeError, SafetensorError) as error:
            raise DataError(
                "the tiny model cannot be read.", where=str(directory), why=str(error)
            ) from error
        refuse_not_finite(self.module.named_parameters(), directory)
        if lora:
            raise DataError(
                "the tiny model takes no adapters.", where=str(directory), todo="Leave lora out."
            )
        self.module.to(device).eval()
        self.device = device
        self.prediction = self.config.prediction

    def dims(self, settings: DiffusionGeneratorConfig) -> tuple[int, ...]:
        return (self.config.side**2,)

    def encode(self, prompts: Sequence[Prompt]) -> list[dict[str, np.ndarray]]:
        classes = self.config.classes
        labels = []
        for prompt, text in zip(prompts, read_prompts(prompts), strict=True):
            label = prompt.fields.get("label", text)
            number = class_of(label, classes)
            if number is None:
                raise DataError(
                    f"{label!r} is no class of this model, which knows 0 to {classes - 1}.",
                    where=f"row {prompt.row} of the dataset",
                    todo="give the class as the field label, or as the prompt",
                )
            labels.append({"label": np.array(number, np.int64)})
        return labels

    def schedule(self, settings: DiffusionGeneratorConfig, steps: int) -> Schedule:
        """Returns evenly spaced times from 1 to 0, moved by ``shift``, and the levels at them."""
        times = torch.linspace(1, 0, steps + 1)
        times = settings.shift * times / (1 + (settings.shift - 1) * times)
        levels = times if self.prediction == "flow" else torch.cos(0.498 * math.pi * times) ** 2
        return Schedule(levels=levels, times=times[:-1])

    @torch.no_grad()
    def sample(
        self, condition: Condition, way: Way, settings: DiffusionGeneratorConfig
    ) -> tuple[Tensor, np.ndarray]:
        x = way.begin(self.schedule(settings, way.steps))
        for step in range(way.steps):
            time = way.schedule.times[step].expand(len(x)).to(self.device)
            x = way.step(step, self.output(x, time, condition, settings.guidance), x)
        side = self.config.side
        grey = ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return x, grey.view(-1, side, side, 1).cpu().numpy()

    def output(self, x: Tensor, times: Tensor, condition: Condition, guidance: float) -> Tensor:
        label = condition["label"]
        if guidance == 1:
            return self.module(x, times, label)
        none = torch.full_like(label, self.config.classes)
        halves = self.module(torch.cat([x, x]), torch.cat([times, times]), torch.cat([none, label]))
        unconditional, conditional = halves.chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    def time_of(self, sigma: Tensor) -> Tensor:
        return sigma

    def save(self, directory: Path) -> None:
        save_tiny(self.module, directory)

    def close(self) -> None:
        pass


class TinyClassifier(nn.Module):
    """Two convolutions and two linear layers, which give the logits of the classes.

    side: side of the square grey pictures, in pixels; even.
    """

    def __init__(self, width: int = 32, classes: int = 10, side: int = 8) -> None:
        super().__init__()
        self.side = side
        self.first = nn.Conv2d(1, width // 2, 3, padding=1)
        self.second = nn.Conv2d(width // 2, width, 3, padding=1)
        self.features = nn.Linear(width * (side // 2) ** 2, 64)
        self.out = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits, float32[B, classes], of flat pictures ``x``, float32[B, side * side] in
        -1..1.
        """
        hidden = F.relu(self.first(x.view(-1, 1, self.side, self.side)))
        hidden = F.max_pool2d(F.relu(self.second(hidden)), 2)
        return self.out(F.relu(self.features(hidden.flatten(1))))


def load_classifier(file: Path) -> TinyClassifier:
    """Opens a classifier, whose sizes are read from its tensors.

    Raises DataError when the file cannot be read or holds another model.
    """
    try:
        tensors = load_file(file)
        width = tensors["second.weight"].shape[0]
        classes = tensors["out.weight"].shape[0]
        side = 2 * math.isqrt(tensors["features.weight"].shape[1] // width)
        net = TinyClassifier(width, classes, side)
        net.load_state_dict(tensors)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(
            "the classifier cannot be read.", where=str(file), why=str(error)
        ) from error
    refuse_not_finite(net.named_parameters(), file)
    net.eval()
    return net


def floats(pictures: np.ndarray) -> Tensor:
    """Turns pictures uint8[B, H, W, 1] into float32[B, H * W] in -1..1."""
    return torch.from_numpy(pictures.reshape(len(pictures), -1).astype(np.float32)) / 127.5 - 1
