"""Every advantage and objective holds its public contract; three objectives equal loops written
from their papers.
"""

from __future__ import annotations

import pytest
import torch
from gcore_testing import ObjectiveContract
from gcore_testing.conformance import contracts_of

globals().update(contracts_of("algorithms"))

COEFFICIENT = 0.1


class Terms(ObjectiveContract):
    """Every term of the loss at once, under each normalisation."""

    @pytest.fixture(params=["token", "sequence", "constant"])
    def config_fields(self, request):
        return {
            "normalise": request.param,
            "constant_length": 5,
            "kl": {"coefficient": COEFFICIENT, "estimator": "k3"},
            "entropy_coefficient": 0.02,
            "old_logprobs": "recompute",
            "correction": {"kind": "truncate", "level": "sequence", "cap": 1.2, "floor": 0.8},
        }

    @pytest.fixture
    def objective(self, config_fields):
        return self.build(**config_fields)


class TestPpoClipTerms(Terms):
    provider = "algorithms/ppo_clip"


class TestGspoTerms(Terms):
    provider = "algorithms/gspo"


class TestCispoTerms(Terms):
    provider = "algorithms/cispo"


class TestSapoTerms(Terms):
    provider = "algorithms/sapo"


class ByAge(ObjectiveContract):
    """Ratios against an interpolated policy, and records that are masked for their age."""

    @pytest.fixture(params=["token", "sequence", "constant"])
    def objective(self, request):
        return self.build(
            normalise=request.param,
            constant_length=5,
            old_logprobs="interpolate",
            correction={"kind": "truncate", "cap": 1.1, "floor": 0.9},
            stale_mask={"older_than": 3, "floor": 0.9, "cap": 1.1},
        )


class TestPpoClipByAge(ByAge):
    provider = "algorithms/ppo_clip"


class TestGspoByAge(ByAge):
    provider = "algorithms/gspo"


class TestCispoByAge(ByAge):
    provider = "algorithms/cispo"


class TestSapoByAge(ByAge):
    provider = "algorithms/sapo"


class TestPpoClipWithATarget(ObjectiveContract):
    """A coefficient that follows the entropy is kept like any other term."""

    provider = "algorithms/ppo_clip"

    @pytest.fixture
    def objective(self):
        return self.build(entropy={"target": 1.0, "change": 0.001, "largest": 0.01})


class Papers(ObjectiveContract):
    """The defaults, beside a loop over records and actions."""

    clip: tuple[float, float]

    def gains(self, ratios, advantages, logps):
        raise NotImplementedError

    @pytest.fixture
    def objective(self):
        return self.build(clip_low=1 - self.clip[0], clip_high=self.clip[1] - 1, normalise="token")

    @pytest.fixture
    def reference(self):
        def loops(columns, current):
            total, weight = torch.zeros((), dtype=torch.float64), 0
            for record in columns["record"].unique():
                places = [
                    t
                    for t, is_of_record in enumerate(columns["record"] == record)
                    if is_of_record and columns["mask"][t]
                ]
                if not places:
                    continue
                ratios = [
                    torch.exp(current["logp"][t] - columns["rollout_logp"][t]) for t in places
                ]
                advantages = [columns["advantage"][t] for t in places]
                logps = [current["logp"][t] for t in places]
                total = total - sum(self.gains(ratios, advantages, logps))
                weight += len(places)
            return total / weight, torch.tensor(float(weight))

        return loops

    def clipped(self, ratio):
        return torch.clamp(ratio, *self.clip)


class TestPpoClipOfThePaper(Papers):
    """Schulman et al., arXiv:1707.06347, Eq. 7."""

    provider = "algorithms/ppo_clip"
    clip = (0.8, 1.2)

    def gains(self, ratios, advantages, logps):
        return [
            torch.minimum(r * a, self.clipped(r) * a)
            for r, a in zip(ratios, advantages, strict=True)
        ]


class TestGspoOfThePaper(Papers):
    """Zheng et al., arXiv:2507.18071, Eqs. 5 and 7."""

    provider = "algorithms/gspo"
    clip = (0.95, 1.05)

    def gains(self, ratios, advantages, logps):
        sequence = torch.stack([torch.log(r) for r in ratios]).mean().exp()
        return [torch.minimum(sequence * a, self.clipped(sequence) * a) for a in advantages]


class TestCispoOfThePaper(Papers):
    """MiniMax, arXiv:2506.13585, Eqs. 4 and 5."""

    provider = "algorithms/cispo"
    clip = (0.9, 1.3)

    def gains(self, ratios, advantages, logps):
        parts = zip(ratios, advantages, logps, strict=True)
        return [self.clipped(r).detach() * a * logp for r, a, logp in parts]


def test_every_provider_of_the_plugin_is_held_to_a_contract():
    tested = {value.provider for value in contracts_of("algorithms").values()}
    names = [
        "grpo",
        "dr-grpo",
        "rloo",
        "reinforce-pp",
        "reinforce-pp-baseline",
        "gdpo",
        "gae",
        "ppo_clip",
        "gspo",
        "cispo",
        "sapo",
        "overlong",
        "repetition",
    ]
    assert {f"algorithms/{name}" for name in names} <= tested
