"""Computes the density of one denoising transition, x -> next.

Sampler and trainer share this module, so that there is one such computation.

Shapes: R rows, each one transition of one sample. x, next and output are float32[R, *D], with D the
dimensions of one latent. Levels are float32[R].

What a level is depends on what the model predicts:

- flow: the noise level sigma. 1 is pure noise and 0 is clean:
  x = (1 - sigma) clean + sigma noise.
- epsilon (the noise) or v: the signal's share alpha_bar. 0 is pure noise and 1 is clean:
  x = sqrt(alpha_bar) clean + sqrt(1 - alpha_bar) noise.

Log-probs and KL are means over dimensions, in nats a dimension, as all published objectives clip
them. Multiplied by the number of dimensions they are those of the whole latent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gcore_diffusion.config import Noise, Prediction


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The levels of rows, float32[R] each.

    here: the level before the transition.
    after: the level after the transition.
    second: the second level of the schedule.
    """

    here: Tensor
    after: Tensor
    second: Tensor

    def part(self, part: slice) -> Levels:
        """Returns the levels of some rows."""
        return Levels(here=self.here[part], after=self.after[part], second=self.second[part])

    def wide(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (here, after, second) in a shape [R, 1, ...] that broadcasts with ``like``."""
        shape = (-1, *[1] * (like.dim() - 1))
        return self.here.view(shape), self.after.view(shape), self.second.view(shape)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """How a transition is drawn.

    noise: the kind of noise.
    scale: how much noise; 0 is the deterministic sampler.
    prediction: what the model predicts.
    """

    noise: Noise
    scale: float
    prediction: Prediction

    def moments(self, output: Tensor, x: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
        """Returns mean float32[R, *D] and standard deviation float32[R, 1, ...] of next."""
        output = output.float()
        x = x.float()
        here, after, second = levels.wide(x)
        if self.noise == "ddim":
            return _ddim(*_parts(self.prediction, output, x, here), here, after, self.scale)
        if self.scale == 0:
            return x + output * (after - here), torch.zeros_like(here)
        if self.noise == "sde":
            return _sde(output, x, here, after, second, self.scale)
        if self.noise == "dance":
            return _dance(output, x, here, after, self.scale)
        return _cps(output, x, here, after, self.scale)


def log_prob(following: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Returns log N(following; mean, std^2), mean over dimensions, float32[R]."""
    terms = -((following - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return terms.flatten(1).mean(1)


def entropy(std: Tensor, like: Tensor) -> Tensor:
    """Returns the entropy of N(., std^2), mean over dimensions, float32[R].

    It depends on no weight.
    """
    return (
        (torch.log(std) + 0.5 * math.log(2 * math.pi * math.e)).expand_as(like).flatten(1).mean(1)
    )


def divergence(mean: Tensor, reference: Tensor, std: Tensor) -> Tensor:
    """Returns KL(N(mean, std^2) || N(reference, std^2)), mean over dimensions, float32[R].

    It is exact, and symmetric.
    """
    return ((mean - reference) ** 2 / (2 * std**2)).flatten(1).mean(1)


def _sde(
    v: Tensor, x: Tensor, here: Tensor, after: Tensor, second: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Flow-GRPO (arXiv:2505.05470, Eq. 9): the SDE whose marginals are the flow's.

    Its coefficient is sigma_t = a sqrt(t / (1 - t)) with ``scale`` as a. At t = 1 that is infinite;
    the schedule's second level is used in place of 1 there, as in the authors' code.
    """
    step = after - here
    spread = torch.sqrt(here / (1 - torch.where(here == 1, second, here))) * scale
    mean = (
        x * (1 + spread**2 / (2 * here) * step)
        + v * (1 + spread**2 * (1 - here) / (2 * here)) * step
    )
    return mean, spread * torch.sqrt(-step)


def _dance(
    v: Tensor, x: Tensor, here: Tensor, after: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """DanceGRPO (arXiv:2505.07818, Eq. 8): the noise is constant, the score corrects the drift."""
    step = after - here
    clean = x - here * v
    score = -(x - clean * (1 - here)) / here**2
    return x + v * step - 0.5 * scale**2 * score * step, scale * torch.sqrt(-step)


def _cps(v: Tensor, x: Tensor, here: Tensor, after: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Coefficients-preserving sampling (arXiv:2509.05952).

    The noise that is added is taken out of the predicted noise, so that the level after the step is
    exactly the schedule's.
    """
    std = after * math.sin(scale * math.pi / 2)
    clean = x - here * v
    noise = x + v * (1 - here)
    return clean * (1 - after) + noise * torch.sqrt(torch.clamp(after**2 - std**2, min=0)), std


def _ddim(
    clean: Tensor, noise: Tensor, here: Tensor, after: Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    """DDIM (arXiv:2010.02502, Eqs. 12 and 16); eta 1 is ancestral sampling."""
    std = eta * torch.sqrt((1 - after) / (1 - here) * (1 - here / after))
    direction = torch.sqrt(torch.clamp(1 - after - std**2, min=0))
    return torch.sqrt(after) * clean + direction * noise, std


def _parts(
    prediction: Prediction, output: Tensor, x: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (clean, noise) that the model's output implies."""
    signal = torch.sqrt(share)
    spread = torch.sqrt(1 - share)
    if prediction == "v":
        return signal * x - spread * output, signal * output + spread * x
    return (x - spread * output) / signal, output
