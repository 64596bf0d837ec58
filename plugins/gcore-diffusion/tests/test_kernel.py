"""The transition density: against closed forms, against torch's own normal distribution, at its
edges.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gcore_diffusion.config import DiffusionGeneratorConfig, Noise
from gcore_diffusion.kernel import Kernel, Levels, divergence, entropy, log_prob
from gcore_diffusion.way import window_of

from gcore_core.contract.errors import ConfigError

ROWS = 512
DIMS = 64


def levels(here: float, after: float, second: float = 0.9) -> Levels:
    return Levels(here=full(here), after=full(after), second=full(second))


def full(value: float) -> torch.Tensor:
    return torch.full((ROWS,), value)


def noisy(sigma: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(clean, noise, x) of a flow at sigma."""
    draw = torch.Generator().manual_seed(0)
    clean = torch.randn(ROWS, DIMS, generator=draw)
    noise = torch.randn(ROWS, DIMS, generator=draw)
    return clean, noise, (1 - sigma) * clean + sigma * noise


def test_log_prob_and_divergence_match_normal_distributions() -> None:
    mean, other, x = torch.randn(3, ROWS, DIMS)
    std = torch.rand(ROWS, 1) + 0.1
    ours = torch.distributions.Normal(mean, std)
    theirs = torch.distributions.Normal(other, std)
    torch.testing.assert_close(log_prob(x, mean, std), ours.log_prob(x).mean(1))
    expected = torch.distributions.kl_divergence(ours, theirs).mean(1)
    torch.testing.assert_close(divergence(mean, other, std), expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(entropy(std, x), ours.entropy().mean(1))


@pytest.mark.parametrize("noise", ["sde", "dance", "cps"])
def test_a_step_without_noise_equals_the_flow_step(noise: str) -> None:
    """With the true velocity x(0.6) goes to x(0.4) exactly."""
    clean, eps, x = noisy(0.6)
    mean, std = Kernel(noise=noise, scale=0.0, prediction="flow").moments(
        eps - clean, x, levels(0.6, 0.4)
    )
    torch.testing.assert_close(mean, 0.4 * eps + 0.6 * clean, atol=1e-5, rtol=1e-5)
    assert float(std.abs().max()) == 0


def test_coefficients_preserving_noise_keeps_the_noise_level_exactly() -> None:
    """What is added and what is taken away sum to the schedule's level: variance of (next - (1 -
    after) clean).
    """
    clean, eps, x = noisy(0.6)
    mean, std = Kernel(noise="cps", scale=0.8, prediction="flow").moments(
        eps - clean, x, levels(0.6, 0.4)
    )
    kept = (mean - 0.6 * clean) / eps
    torch.testing.assert_close(
        kept**2 + std**2, torch.full_like(kept, 0.4**2), atol=1e-4, rtol=1e-4
    )


def test_the_flow_sde_keeps_the_marginal_to_first_order() -> None:
    """For data that are one point the marginal at sigma is N((1 - sigma) c, sigma^2), and a small
    step keeps it.
    """
    clean = torch.zeros(ROWS, DIMS)
    x = 0.6 * torch.randn(ROWS, DIMS, generator=torch.Generator().manual_seed(1))
    velocity = x / 0.6 - clean  # the posterior's mean noise, less the point
    mean, std = Kernel(noise="sde", scale=0.7, prediction="flow").moments(
        velocity, x, levels(0.6, 0.59)
    )
    variance = (mean / x) ** 2 * 0.6**2 + std**2
    assert float((variance.sqrt() - 0.59).abs().max()) < 2e-3


def test_the_flow_sde_is_the_one_of_the_paper() -> None:
    """Eq. 9 of arXiv:2505.05470, read in numpy and float64: x' = x + [v + s^2 / (2 t) (x + (1 - t)
    v)] dt + s sqrt(|dt|) e with s = a sqrt(t / (1 - t)), where dt is negative; 1e-6 is float32.
    """
    random = np.random.default_rng(0)
    x, v, e = random.standard_normal((3, 4, 16))
    t, after, a = np.array([0.95, 0.7, 0.4, 0.1]), np.array([0.9, 0.55, 0.3, 0.02]), 0.7
    dt = (after - t)[:, None]
    s = (a * np.sqrt(t / (1 - t)))[:, None]
    wide = t[:, None]
    expected = x + (v + s**2 / (2 * wide) * (x + (1 - wide) * v)) * dt + s * np.sqrt(-dt) * e
    z = (e**2).mean(1)
    density = -z / 2 - np.log(s * np.sqrt(-dt))[:, 0] - 0.5 * np.log(2 * np.pi)
    kernel = Kernel(noise="sde", scale=a, prediction="flow")
    levels = Levels(
        here=torch.tensor(t, dtype=torch.float32),
        after=torch.tensor(after, dtype=torch.float32),
        second=torch.full((4,), 0.99),
    )
    here, output = (torch.tensor(array, dtype=torch.float32) for array in (x, v))
    mean, std = kernel.moments(output, here, levels)
    following = mean + std * torch.tensor(e, dtype=torch.float32)
    assert following.numpy() == pytest.approx(expected, abs=1e-6)
    assert log_prob(following, mean, std).numpy() == pytest.approx(density, abs=1e-4)


def test_at_level_1_the_second_level_of_the_schedule_replaces_1() -> None:
    clean, eps, x = noisy(1.0)
    mean, std = Kernel(noise="sde", scale=0.7, prediction="flow").moments(
        eps - clean, x, levels(1.0, 0.9)
    )
    assert torch.isfinite(mean).all()
    torch.testing.assert_close(std, torch.full_like(std, 0.7 * (1 / (1 - 0.9)) ** 0.5 * 0.1**0.5))


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_ddim_steps_to_the_next_level_along_its_prediction(prediction: str) -> None:
    """eta 0 is exact for the true noise; eta 1 has the posterior's variance (ancestral
    sampling).
    """
    draw = torch.Generator().manual_seed(0)
    clean = torch.randn(ROWS, DIMS, generator=draw)
    eps = torch.randn(ROWS, DIMS, generator=draw)
    here = 0.3
    after = 0.5
    x = here**0.5 * clean + (1 - here) ** 0.5 * eps
    predicted = eps if prediction == "epsilon" else here**0.5 * eps - (1 - here) ** 0.5 * clean
    mean, _ = Kernel(noise="ddim", scale=0.0, prediction=prediction).moments(
        predicted, x, levels(here, after)
    )
    torch.testing.assert_close(
        mean, after**0.5 * clean + (1 - after) ** 0.5 * eps, atol=1e-5, rtol=1e-5
    )
    _, std = Kernel(noise="ddim", scale=1.0, prediction=prediction).moments(
        predicted, x, levels(here, after)
    )
    beta = 1 - here / after
    torch.testing.assert_close(std**2, torch.full_like(std, (1 - after) / (1 - here) * beta))


def test_windows_lie_before_the_end_and_follow_the_version() -> None:
    config = DiffusionGeneratorConfig(steps=10, window=2, window_end=6)
    windows = {window_of(config, version, seed=3) for version in range(50)}
    assert windows == {range(k, k + 2) for k in range(5)}
    assert [window_of(config, v, 3) for v in range(9)] == [
        window_of(config, v, 3) for v in range(9)
    ]
    sliding = DiffusionGeneratorConfig(steps=10, window=2, window_end=6, window_moves="slide")
    assert [window_of(sliding, v, 0).start for v in range(6)] == [0, 1, 2, 3, 4, 0]
    assert window_of(DiffusionGeneratorConfig(steps=10), 0, 0) == range(9)
    assert window_of(DiffusionGeneratorConfig(steps=10, scale=0.0), 0, 0) == range(0)


def test_a_window_that_does_not_fit_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"window: must be in 0..6, is 7"):
        DiffusionGeneratorConfig(window=7, window_end=6)
    with pytest.raises(ConfigError, match=r"window_end: must be in 1..10, is 11"):
        DiffusionGeneratorConfig(window_end=11)


@pytest.mark.parametrize("noise", ["cps", "ddim"])
def test_a_last_step_that_adds_no_noise_is_no_action(noise: Noise) -> None:
    """It would have the standard deviation 0, and so no log-prob."""
    with pytest.raises(ConfigError, match=rf"window_end: must be below 10 with noise {noise}"):
        DiffusionGeneratorConfig(noise=noise, window_end=10)
    DiffusionGeneratorConfig(noise=noise, window_end=9)
    DiffusionGeneratorConfig(noise=noise, window_end=10, scale=0.0)
    DiffusionGeneratorConfig(noise="sde", window_end=10)
