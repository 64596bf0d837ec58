"""Prompts with images: the real engine against transformers' forward pass, in float32, with the
records' pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gcore_language.engine_tests import ImageTests, save_image_models
from gcore_language.testing import (
    assert_agree,
    drain,
    gaps,
    image_prompts,
    requests_of,
    run,
    tensors_of,
)
from gcore_testing.contracts.weights import push
from gcore_vllm.config import VllmGeneratorConfig
from gcore_vllm.engine import VllmGenerator

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import Prompt

pytestmark = pytest.mark.engine

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
Open = Callable[..., VllmGenerator]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {
        name: path
        for family in FAMILIES
        for name, path in save_image_models(directory, family).items()
    }


@pytest.fixture(scope="module")
def opened(directories: dict[str, Path]) -> Iterator[Open]:
    """Makes a generator of a family, or gives the one that was made."""
    made: dict[str, VllmGenerator] = {}

    def make(family: str, devices: tuple[int, ...] = (), **settings: object) -> VllmGenerator:
        key = repr((family, devices, settings))
        if key not in made:
            config = VllmGeneratorConfig(max_new_tokens=12, kv_cache_gib=0.05, **settings)  # type: ignore[arg-type]
            model = {"path": str(directories[family])}
            made[key] = VllmGenerator(
                config, WorkerContext(role="rollout", model=model, devices=devices)
            )
        return made[key]

    yield make
    for generator in made.values():
        generator.close()


class TestImages(ImageTests):
    @pytest.fixture(params=FAMILIES)
    def family(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def generator(self, opened: Open, family: str) -> VllmGenerator:
        return opened(family, temperature=0.8)


@pytest.fixture
def generator(opened: Open) -> VllmGenerator:
    return opened("qwen2_vl", temperature=0.8)


@pytest.fixture
def prompts(tmp_path: Path) -> list[Prompt]:
    return image_prompts(tmp_path)


def test_a_push_without_cache_reset_would_keep_images_of_the_old_vision_tower(
    generator: VllmGenerator,
    directories: dict[str, Path],
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = requests_of(prompts[:1])
    run(generator, requests)
    with monkeypatch.context() as patched:
        patched.setattr(generator._engine, "reset_encoder_cache", lambda: None)
        push(generator, tensors_of(directories["qwen2_vl-mixed"]), generator.version + 1)
        assert gaps(run(generator, requests), directories["qwen2_vl-mixed"]).max() > 0.1
    push(generator, tensors_of(directories["qwen2_vl-mixed"]), generator.version + 1)
    assert_agree(gaps(run(generator, requests), directories["qwen2_vl-mixed"]))
    push(generator, tensors_of(directories["qwen2_vl"]), generator.version + 1)


def test_samples_running_during_a_push_see_their_images_under_the_new_weights(
    generator: VllmGenerator, directories: dict[str, Path], prompts: list[Prompt]
) -> None:
    requests, old = requests_of(prompts), generator.version
    generator.submit(requests)
    before = [*generator.step(), *generator.step()]
    push(generator, tensors_of(directories["qwen2_vl-other"]), old + 1)
    after = drain(generator, len(requests) - len(before))
    assert {record.versions for record in after} == {(old, old + 1)}
    assert_agree(gaps(after, directories["qwen2_vl"], slice(0, 2)))
    assert_agree(gaps(after, directories["qwen2_vl-other"], slice(2, None)))
    push(generator, tensors_of(directories["qwen2_vl"]), old + 2)


def test_samples_of_a_prompt_encode_its_images_once(
    generator: VllmGenerator, directories: dict[str, Path], prompts: list[Prompt]
) -> None:
    push(
        generator, tensors_of(directories["qwen2_vl"]), generator.version + 1
    )  # forgets the images
    model = generator._engine.model_executor.driver_worker.worker.model_runner.get_model()
    encoded: list[int] = []

    def spy(module: object, args: tuple[object, ...], given: dict[str, list[object]]) -> None:
        encoded.append(len(given["grid_thw"]))

    hook = model.visual.register_forward_pre_hook(spy, with_kwargs=True)
    try:
        run(generator, requests_of(prompts[:3]))
    finally:
        hook.remove()
    assert sum(encoded) == 4


def test_a_model_split_over_two_devices_sees_images_like_an_unsplit_one(
    opened: Open, directories: dict[str, Path], prompts: list[Prompt]
) -> None:
    generator = opened("qwen2_vl", devices=(0, 1), top_k=8)
    for source in ("qwen2_vl", "qwen2_vl-other"):
        push(generator, tensors_of(directories[source]), generator.version + 1)
        assert_agree(gaps(run(generator, requests_of(prompts)), directories[source]))
