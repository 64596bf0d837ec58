"""How a batch of samples goes from noise to pictures.

``Schedule`` holds the noise levels, ``window_of`` chooses the stochastic steps, ``SeededNoise``
draws each sample's noise from its own seed, and ``Way`` makes the transitions.
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

Condition = dict[str, Tensor]  # what a model takes for a batch's prompts, [B, ...] each


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Noise levels of T denoising steps.

    levels: float32[T + 1], the noise level before each step and after the last; see ``kernel``.
    times: float32[T], the model's time input at each step.
    """

    levels: Tensor
    times: Tensor


class NoiseSource(Protocol):
    """Draws the noise of a batch."""

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        """Draws standard normal numbers, float32[B, *shape].

        A sample's numbers do not depend on which other samples are in the batch.
        """


class SeededNoise:
    """Noise of each sample from a Philox stream of its own seed."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._streams = [np.random.Generator(np.random.Philox(key=seed % 2**64)) for seed in seeds]
        self._device = device

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        numbers = np.stack([stream.standard_normal(shape, np.float32) for stream in self._streams])
        return torch.from_numpy(numbers).to(self._device)


class Way:
    """The transitions of one batch, from noise to clean latents; it keeps the stochastic ones.

    schedule: the noise levels; set by ``begin``.
    steps: denoising steps of the batch.
    stochastic: the steps that draw noise, which are kept as actions.
    first: the noise to start from, float32[B, *D].
    latents: float32[B, *D] before each stochastic step and after the last of them.
    logp: float32[B] of each stochastic step, mean over dimensions.
    """

    schedule: Schedule

    def __init__(
        self, kernel: Kernel, steps: int, stochastic: range, first: Tensor, noise: NoiseSource
    ) -> None:
        self._kernel = kernel
        self.steps = steps
        self.stochastic = stochastic
        self.first = first
        self._noise = noise
        # the same kernel without noise, for the steps that are not stochastic
        self._sure = Kernel(noise=kernel.noise, scale=0.0, prediction=kernel.prediction)
        self.latents: list[Tensor] = []
        self.logp: list[Tensor] = []

    def begin(self, schedule: Schedule) -> Tensor:
        """Takes the schedule; returns the noise to start from, float32[B, *D]."""
        self.schedule = schedule
        return self.first

    def step(self, step: int, output: Tensor, x: Tensor) -> Tensor:
        """Makes one transition with the model's output at ``x``; returns the next latent, float32.

        A stochastic step is kept with its log-prob.
        """
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
        """Returns one noise level of the schedule for every sample, float32[B]."""
        return self.schedule.levels[place].to(x.device, torch.float32).expand(len(x))


def window_of(settings: DiffusionGeneratorConfig, version: int, seed: int) -> range:
    """Returns the stochastic steps of samples from weights ``version``.

    They are the same for every sample, so that all samples of a batch take the same steps. The
    range is empty with scale 0.
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
    """Returns the texts of the prompts.

    Raises DataError for a prompt that is chat messages, or empty.
    """
    texts = []
    for prompt in prompts:
        if prompt.text is None:
            raise DataError(
                "a prompt is chat messages; an image model takes text.", where=f"row {prompt.row}"
            )
        if not prompt.text.strip():
            raise DataError("the prompt is empty.", where=f"row {prompt.row} of the dataset")
        texts.append(prompt.text)
    return texts
