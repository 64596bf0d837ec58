"""The preference reward is transformers' own CLIP, whatever records come together."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers")

from gcore_diffusion.checks import file_problems  # noqa: E402
from gcore_diffusion.config import PreferenceConfig  # noqa: E402
from gcore_diffusion.preference import Preference  # noqa: E402
from gcore_diffusion.tiny_pipelines import save_clip  # noqa: E402

from gcore_core.contract.context import WorkerContext  # noqa: E402
from gcore_core.contract.errors import ConfigError, DataError  # noqa: E402
from gcore_core.contract.factories import import_attribute  # noqa: E402
from gcore_core.contract.looking import Look  # noqa: E402
from gcore_core.contract.records import FINISHED, Prompt  # noqa: E402
from gcore_core.contract.scorer import ScoredRecord  # noqa: E402


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("clip")
    save_clip(directory)
    return directory


def scorer(path: Path, **settings: Any) -> Preference:
    return Preference(PreferenceConfig(path=str(path), **settings), WorkerContext(role="rewards"))


def record(number: int, text: str | None, image: np.ndarray | None) -> ScoredRecord:
    return ScoredRecord(
        ordinal=number,
        sample=0,
        prompt=Prompt(row=number, text=text),
        text="",
        status=FINISHED,
        columns={},
        media={} if image is None else {"image": image},
    )


def records() -> list[ScoredRecord]:
    """Six images of two prompts, of which one is longer than the model reads."""
    random = np.random.default_rng(0)
    texts = ["a red circle", "a blue square " * 40]
    return [
        record(i, texts[i % 2], random.integers(0, 256, (48, 40, 3)).astype(np.uint8))
        for i in range(6)
    ]


def test_a_score_is_the_scaled_cosine_of_the_two_embeddings(clip: Path) -> None:
    """By numpy in float64 from transformers' embeddings; 1e-4 is float32 at scores of tens."""
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    model = CLIPModel.from_pretrained(clip).eval()
    processor = CLIPImageProcessor.from_pretrained(clip)
    tokenizer = AutoTokenizer.from_pretrained(clip)
    for own, score in zip(records(), scorer(clip).score(records()), strict=True):
        pixels = processor(images=[own.media["image"]], return_tensors="pt")
        ids = tokenizer([own.prompt.text], truncation=True, max_length=77, return_tensors="pt")
        with torch.no_grad():
            image = model.get_image_features(pixel_values=pixels["pixel_values"])
            text = model.get_text_features(input_ids=ids["input_ids"])
        a, b = (np.asarray(one.pooler_output[0], np.float64) for one in (image, text))
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        expected = np.exp(model.logit_scale.item()) * cosine
        assert score.value == pytest.approx(expected, abs=1e-4)


def test_a_score_does_not_depend_on_the_batch(clip: Path) -> None:
    """2e-5 is what other batch shapes move float32 by."""
    together = [score.value for score in scorer(clip).score(records())]
    apart = [score.value for score in scorer(clip, batch_images=1).score(records())]
    assert together == pytest.approx(apart, abs=2e-5)
    assert len(set(together)) == 6


def test_a_record_without_image_or_text_fails_alone(clip: Path) -> None:
    image = np.zeros((32, 32, 1), np.uint8)
    scores = scorer(clip).score(
        [record(0, "a", None), record(1, None, image), record(2, "a", image)]
    )
    assert [score.status for score in scores] == ["failed", "failed", "ok"]
    assert scores[0].reason == "the record has no image"
    assert scores[1].reason == "the prompt is no text"


def test_a_directory_without_a_clip_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        scorer(tmp_path)


def test_settings_say_what_is_wrong_with_them() -> None:
    with pytest.raises(ConfigError, match="path: no directory of a preference model"):
        PreferenceConfig(path="")
    with pytest.raises(ConfigError, match="batch_images: must be positive, is 0"):
        PreferenceConfig(path="x", batch_images=0)


def test_a_clip_whose_weights_are_not_the_files_is_a_problem_and_refused(
    clip: Path, tmp_path: Path
) -> None:
    def plan(path: Path) -> dict[str, Any]:
        return {
            "roles": {},
            "rewards": {"taste": {"use": "diffusion/preference", "config": {"path": str(path)}}},
        }

    [look] = file_problems(plan(clip), True)
    assert isinstance(look, Look)
    assert look.where == "rewards.taste.config.path"
    assert list(import_attribute(look.function)(look.arguments)) == []
    broken = tmp_path / "broken"
    shutil.copytree(clip, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    [look] = file_problems(plan(broken), True)
    assert isinstance(look, Look)
    for refuses in (
        lambda: list(import_attribute(look.function)(look.arguments)),
        lambda: scorer(broken),
    ):
        with pytest.raises(DataError, match=r"Missing: visual_projection\.weight"):
            refuses()
