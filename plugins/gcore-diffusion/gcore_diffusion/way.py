"""How a batch of samples goes from noise to pictures: schedule, window of stochastic steps, noise
by seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Prompt
from gcore_diffusion.config import DiffusionGeneratorConfig
from gcore_diffusion.kernel import Kernel, Levels, log_prob

Condition = dict[str, Tensor]  # what a model is told of prompts: [B, ...] each


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """levels float32[T + 1] (see ``kernel``), times float32[T]: what the model is told of the
    level.
    """

    levels: Tensor
    times: Tensor


class NoiseSource(Protocol):
    def draw(self, shape: tuple[int, ...]) -> Tensor:
        """float32[B, *shape]: standard normal, and no sample's depends on which others are in the
        batch.
        """


class SeededNoise:
    """Standard normal numbers of each sample from its own seed, in the order they are drawn
    (Philox).
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._streams = [np.random.Generator(np.random.Philox(key=seed % 2**64)) for seed in seeds]
        self._device = device

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        drawn = np.stack([stream.standard_normal(shape, np.float32) for stream in self._streams])
        return torch.from_numpy(drawn).to(self._device)


class Way:
    """One batch's way, which begins at ``first``. ``stochastic``: the steps that draw noise and are
    kept as actions.

    Kept in float32: ``latents`` before each of those steps and after the last, ``logp`` of each.
    """

    schedule: Schedule

    def __init__(
        self, kernel: Kernel, steps: int, stochastic: range, first: Tensor, noise: NoiseSource
    ) -> None:
        self._kernel, self.steps, self.stochastic = kernel, steps, stochastic
        self.first, self._noise = first, noise
        self._sure = Kernel(noise=kernel.noise, scale=0.0, prediction=kernel.prediction)
        self.latents: list[Tensor] = []
        self.logp: list[Tensor] = []

    def begin(self, schedule: Schedule) -> Tensor:
        """The noise to start from, float32[B, *D]."""
        self.schedule = schedule
        return self.first

    def step(self, step: int, output: Tensor, x: Tensor) -> Tensor:
        """One transition with the model's output at ``x``; float32."""
        x = x.float()
        levels = Levels(
            here=self._level(step, x), after=self._level(step + 1, x), second=self._level(1, x)
        )
        if step not in self.stochastic:
            return self._sure.moments(output, x, levels)[0]
        mean, std = self._kernel.moments(output, x, levels)
        following = mean + std * self._noise.draw(tuple(x.shape[1:]))
        if not self.latents:
            self.latents.append(x)
        self.latents.append(following)
        self.logp.append(log_prob(following, mean, std))
        return following

    def _level(self, place: int, x: Tensor) -> Tensor:
        return self.schedule.levels[place].to(x.device, torch.float32).expand(len(x))


def window_of(settings: DiffusionGeneratorConfig, version: int, seed: int) -> range:
    """The stochastic steps under weights ``version``: the same for every sample, so that a batch is
    one batch.
    """
    if settings.scale == 0:
        return range(0)
    last = settings.last_stochastic
    if not settings.window:
        return range(last)
    places = last - settings.window + 1
    start = {
        "stay": 0,
        "slide": version % places,
        "random": int(
            np.random.Generator(np.random.Philox(key=[seed % 2**64, version])).integers(places)
        ),
    }[settings.window_moves]
    return range(start, start + settings.window)


def read_prompts(prompts: Sequence[Prompt]) -> list[str]:
    """Their texts. Raises DataError for a prompt that is chat messages, or empty."""
    found = []
    for prompt in prompts:
        if prompt.text is None:
            raise DataError(
                "a prompt is chat messages; an image model takes text.", where=f"row {prompt.row}"
            )
        if not prompt.text.strip():
            raise DataError("the prompt is empty.", where=f"row {prompt.row} of the dataset")
        found.append(prompt.text)
    return found
