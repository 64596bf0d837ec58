"""What ``g-core conformance diffusion`` runs: the kit's contracts on a tiny random model.

``known_gaps`` are tests that read columns of tokens, which a denoising record does not have; what
they ask of tokens is held for transitions by this plugin's own tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_testing import (
    GeneratorContract,
    ScorerContract,
    TrainerContract,
    TrainerWithGeneratorContract,
)
from gcore_testing.contracts.agreement import sampled
from gcore_testing.contracts.base import make
from gcore_testing.contracts.generator import requests_of

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import FINISHED, Prompt
from gcore_core.contract.scorer import ScoredRecord
from gcore_core.contract.trainer import TrainRecord

_TOKENS = "reads action_ids or prompt_ids, which a denoising record does not have"
_PROMPTS = [Prompt(row=row, text=f"digit {row}", fields={"label": row}) for row in range(4)]


class _OnTiny:
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        return {"path": str(_random_model(tmp_path_factory.mktemp("tiny")))}

    @pytest.fixture
    def prompts(self) -> list[Prompt]:
        return list(_PROMPTS)


class TestGenerator(_OnTiny, GeneratorContract):
    provider = "diffusion"
    config = {"steps": 4}
    known_gaps = {
        "test_a_record_answers_its_own_request": _TOKENS,
        "test_columns_have_their_names_and_dtypes": _TOKENS,
        "test_every_action_has_its_logprob": _TOKENS,
        "test_a_record_says_how_it_ended": _TOKENS,
        "test_greedy_samples_do_not_depend_on_the_seed": (
            "an image's noise to start from is its seed's"
        ),
        "test_samples_of_a_prompt_differ": _TOKENS,
        "test_two_batches_in_flight_do_not_mix": _TOKENS,
        "test_the_same_seed_gives_the_same_tokens": _TOKENS,
        "test_the_seed_decides_and_not_the_place": _TOKENS,
        "test_the_same_action_has_the_same_logprob": _TOKENS,
        "test_first_actions_occur_as_often_as_their_logprobs_say": _TOKENS,
        "test_samples_that_run_through_a_push_say_so": (
            "a sample ends in the step in which it begins"
        ),
    }


class TestTrainer(_OnTiny, TrainerContract):
    provider = "diffusion"
    config = {"learning_rate": 1e-3, "eps": 1e-2}
    micro_batches = {"budget_rows": 1}
    known_gaps = {
        "test_the_loss_is_a_mean_over_actions": _TOKENS,
        "test_masked_actions_have_no_influence": _TOKENS,
        "test_two_ranks_train_as_one": _TOKENS,
    }

    @pytest.fixture
    def records(self, context: WorkerContext) -> list[TrainRecord]:
        generator = make(
            self.description("generator"), {"steps": 4}, replace(context, role="rollout")
        )
        return sampled(generator, requests_of(_PROMPTS, 3))


class TestTrainerWithGenerator(_OnTiny, TrainerWithGeneratorContract):
    provider = "diffusion"
    config = {"learning_rate": 1e-2, "eps": 1e-2}
    generator_config = {"steps": 4}
    tolerance = 1e-5


class _Image(ScorerContract):
    @pytest.fixture
    def records(self) -> list[ScoredRecord]:
        draw = np.random.default_rng(0)
        return [
            _scored(row, draw.integers(0, 1 + 30 * row, (8, 8, 1)).astype(np.uint8))
            for row in range(8)
        ]

    @pytest.fixture
    def unscorable(self) -> ScoredRecord | None:
        """It has no image."""
        return _scored(99, None)


class TestBrightness(_Image):
    provider = "diffusion/brightness"


class TestCompressibility(_Image):
    provider = "diffusion/compressibility"


class TestClassifier(_Image):
    provider = "diffusion/classifier"
    tolerance = 1e-6

    @pytest.fixture
    def scorer(self, context: WorkerContext, tmp_path: Path) -> Any:
        import torch
        from safetensors.torch import save_file

        from gcore_diffusion.tiny import TinyClassifier

        torch.manual_seed(0)
        save_file(TinyClassifier(width=8).state_dict(), tmp_path / "classifier.safetensors")
        return self.build(context, path=str(tmp_path))


class TestPreference(_Image):
    provider = "diffusion/preference"
    tolerance = 1e-4

    @pytest.fixture
    def scorer(self, context: WorkerContext, tmp_path: Path) -> Any:
        pytest.importorskip("diffusers")
        from gcore_diffusion.tiny_pipelines import save_clip

        save_clip(tmp_path)
        return self.build(context, path=str(tmp_path))


def _random_model(directory: Path) -> Path:
    """A tiny model whose output is not zero, as a fresh one's is."""
    import torch

    from gcore_diffusion.tiny import TinyConfig, TinyNet, save_tiny

    torch.manual_seed(0)
    net = TinyNet(TinyConfig(width=32, blocks=1))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save_tiny(net, directory)
    return directory


def _scored(row: int, image: np.ndarray | None) -> ScoredRecord:
    media: Mapping[str, np.ndarray] = {} if image is None else {"image": image}
    for medium in media.values():
        medium.flags.writeable = False
    prompt = Prompt(row=row, text="a digit", fields={"label": row % 10})
    return ScoredRecord(
        ordinal=row, sample=0, prompt=prompt, text="", status=FINISHED, columns={}, media=media
    )
