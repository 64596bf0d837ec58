"""Prompts with images: the real engine against transformers' forward pass, in float32, with the
pixels of the records.

A server for each family.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from gcore_language.engine_tests import ImageTests, save_image_models
from gcore_language.testing import assert_agree, drain, gaps, requests_of, run, tensors_of
from gcore_sglang.config import SglangGeneratorConfig
from gcore_sglang.engine import SglangGenerator
from gcore_sglang.stepwise import held
from gcore_testing.contracts.weights import push

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import Prompt

pytestmark = pytest.mark.engine

PATCH = 14


@pytest.fixture(
    scope="module", params=["qwen2_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)]
)
def of_family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directories(of_family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_image_models(tmp_path_factory.mktemp("models"), of_family, PATCH)


@pytest.fixture(scope="module")
def generator(
    of_family: str, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangGenerator]:
    model, logs = {"path": str(directories[of_family])}, str(tmp_path_factory.mktemp("logs"))
    config = SglangGeneratorConfig(max_new_tokens=12, max_batch=16, temperature=0.8)
    made = SglangGenerator(config, WorkerContext(role="rollout", model=model, directory=logs))
    yield made
    made.close()


class TestImages(ImageTests):
    patch = PATCH

    @pytest.fixture
    def family(self, of_family: str) -> str:
        return of_family

    def held(self, generator: SglangGenerator) -> AbstractContextManager[None]:
        return held(generator)

    def test_samples_running_during_a_push_see_their_images_under_the_new_weights(
        self,
        generator: SglangGenerator,
        family: str,
        directories: dict[str, Path],
        prompts: list[Prompt],
    ) -> None:
        """As with text, those that have begun go on: SGLang is held until the push is over."""
        for source, other in [(family, f"{family}-other"), (f"{family}-other", family)]:
            requests, old = requests_of(prompts[:3], 12), generator.version
            with held(generator):
                generator.submit(requests)
                before = generator.step()
                while not generator._begun and len(before) < len(requests):
                    before += generator.step()  # those before ended with their first action
                push(generator, tensors_of(directories[other]), old + 1)
            after = drain(generator, len(requests) - len(before))
            both = [record for record in after if record.versions == (old, old + 1)]
            assert both, "no sample ran through the push"
            assert_agree(gaps(both, directories[source], slice(0, 1)))
            assert_agree(gaps(both, directories[other], slice(-1, None)))

    def test_pixels_share_one_file_while_samples_of_the_prompt_run(
        self, generator: SglangGenerator, prompts: list[Prompt]
    ) -> None:
        requests = requests_of(prompts[:3])
        generator.submit(requests)
        files = list(generator._server.private.glob("*.npz"))
        assert len(files) == 3
        with np.load(files[0]) as told:
            assert set(told) == {"pixels", "grid"}
        drain(generator, len(requests))
        assert list(generator._server.private.glob("*.npz")) == []

    def test_samples_of_a_prompt_share_its_images_in_the_cache(
        self, generator: SglangGenerator, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        generator._forget_cache()
        (first,) = run(generator, requests_of(prompts[:1], 1))
        seen, wait = [], generator._client.wait

        def spy(timeout_s: float) -> list[object]:
            events = wait(timeout_s)
            seen.extend(
                event.answer["meta_info"]["cached_tokens"] for event in events if event.ended
            )
            return list(events)

        monkeypatch.setattr(generator._client, "wait", spy)
        run(generator, requests_of(prompts[:2], 1))  # the second prompt differs in its image alone
        whole, begun = len(first.columns["prompt_ids"]) - 1, 2
        assert sorted(seen) == [begun, whole]
