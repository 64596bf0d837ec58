"""Rewards of images: what they measure, and that a bad one fails alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_diffusion.config import ClassifierConfig
from gcore_diffusion.rewards import Brightness, Classifier, Compressibility

from gcore_core.builtin.config import FunctionRewardConfig
from gcore_core.builtin.function_reward import FunctionScorer
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.generator import Prompt
from gcore_core.contract.scorer import ScoredRecord

pytestmark = pytest.mark.rest

CONTEXT = WorkerContext(role="scorer")


def record(image: np.ndarray | None, **fields: Any) -> ScoredRecord:
    media = {} if image is None else {"image": image}
    prompt = Prompt(row=0, text="a", fields=fields)
    return ScoredRecord(
        ordinal=0, sample=0, prompt=prompt, text="", status="finished", columns={}, media=media
    )


def picture(level: int) -> np.ndarray:
    return np.full((8, 8, 1), level, np.uint8)


def test_brightness_is_the_mean_pixel() -> None:
    scores = Brightness(None, CONTEXT).score(
        [record(picture(0)), record(picture(255)), record(picture(51))]
    )
    assert [score.value for score in scores] == [0, 1, pytest.approx(0.2)]


def test_noise_compresses_worse_than_one_colour() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    plain, noisy = Compressibility(None, CONTEXT).score(
        [record(np.zeros_like(noise)), record(noise)]
    )
    assert plain.value > 0.99 and noisy.value < 0.6


def test_an_image_may_come_as_a_column() -> None:
    as_column = replace(record(None), columns={"image": picture(255)})
    assert Brightness(None, CONTEXT).score([as_column])[0].value == 1


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (None, "the record has no image"),
        (np.zeros((8, 8), np.uint8), r"the image is uint8[8, 8], not uint8[H, W, C]"),
        (np.zeros((8, 8, 1), np.float32), r"the image is float32[8, 8, 1], not uint8[H, W, C]"),
    ],
)
def test_a_record_without_a_valid_image_fails_alone(image: np.ndarray | None, reason: str) -> None:
    good, bad = Brightness(None, CONTEXT).score([record(picture(255)), record(image)])
    assert good.value == 1
    assert (bad.value, bad.status, bad.reason) == (None, "failed", reason)


def test_a_reward_that_is_not_a_number_is_a_failure_that_says_so(tmp_path: Path) -> None:
    """A user's function of images: NaN, the wrong shape, too few values."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "def nan(record): return float('nan')\n"
        "def picture(record): return record.media['image']\n"
        "def few(records): return [1.0]\n"
    )
    records = [record(picture(1)), record(picture(2))]

    def reasons(name: str, batch: bool = False) -> set[str]:
        scorer = FunctionScorer(
            FunctionRewardConfig(path=str(file), name=name, batch=batch), CONTEXT
        )
        scores = scorer.score(records)
        assert {score.status for score in scores} == {"failed"} and {
            score.value for score in scores
        } == {None}
        return {score.reason for score in scores}

    assert reasons("nan") == {"nan returned nan"}
    assert reasons("picture") == {"picture returned ndarray, not a number"}
    assert reasons("few", batch=True) == {"few returned 1 values for 2 records"}


def test_the_classifier_recognises_held_out_digits(taught_dir: Path) -> None:
    from gcore_diffusion.watch import RealImages

    real = RealImages.of_model(taught_dir)
    assert real is not None
    records = [
        record(i, label=int(label)) for i, label in zip(real.images, real.labels, strict=True)
    ]
    for file in ("classifier.safetensors", "judge.safetensors"):
        config = ClassifierConfig(path=str(taught_dir), file=file, measure="correct")
        assert np.mean([score.value for score in Classifier(config, CONTEXT).score(records)]) > 0.9


def test_a_record_without_a_class_fails_alone(taught_dir: Path) -> None:
    scorer = Classifier(ClassifierConfig(path=str(taught_dir)), CONTEXT)
    good, bad, none = scorer.score(
        [record(picture(9), label=3), record(picture(9)), record(None, label=3)]
    )
    assert good.status == "ok" and 0 <= good.value <= 1
    assert bad.reason == "the row's field 'label' is None, which is no class"
    assert none.reason == "the record has no image"


@pytest.mark.parametrize("label", [3, 3.0, "3", "3.0"])
def test_a_label_is_its_class_whatever_a_table_made_of_it(taught_dir: Path, label: object) -> None:
    scorer = Classifier(ClassifierConfig(path=str(taught_dir)), CONTEXT)
    right, same = scorer.score([record(picture(9), label=3), record(picture(9), label=label)])
    assert right.value == same.value


@pytest.mark.parametrize(
    ("image", "label", "reason"),
    [
        (
            np.zeros((8, 8, 3), np.uint8),
            3,
            "the image is uint8[8, 8, 3], and the classifier takes uint8[8, 8, 1]",
        ),
        (
            np.zeros((16, 16, 1), np.uint8),
            3,
            "the image is uint8[16, 16, 1], and the classifier takes uint8[8, 8, 1]",
        ),
        (picture(9), 10, "the row's field 'label' is 10, which is no class"),
        (picture(9), 3.5, "the row's field 'label' is 3.5, which is no class"),
        (picture(9), True, "the row's field 'label' is True, which is no class"),
    ],
)
def test_what_the_classifier_does_not_know_fails_alone(
    taught_dir: Path, image: np.ndarray, label: object, reason: str
) -> None:
    """An image of another size must not shift the scores of the others, nor end the batch."""
    scorer = Classifier(ClassifierConfig(path=str(taught_dir)), CONTEXT)
    (alone,) = scorer.score([record(picture(9), label=3)])
    bad, good = scorer.score([record(image, label=label), record(picture(9), label=3)])
    assert (bad.value, bad.status, bad.reason) == (None, "failed", reason)
    assert good.value == pytest.approx(alone.value, rel=1e-6)


def test_a_batch_of_any_size_goes_through_the_classifier_in_parts_of_bounded_size(
    taught_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    records = [
        record(draw.integers(0, 256, (8, 8, 1)).astype(np.uint8), label=i % 10) for i in range(10)
    ]
    scorer = Classifier(ClassifierConfig(path=str(taught_dir)), CONTEXT)
    at_once = [score.value for score in scorer.score(records)]
    sizes: list[int] = []
    scorer._net.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    monkeypatch.setattr("gcore_diffusion.rewards._PASS_PIXELS", 4 * 64)
    in_parts = [score.value for score in scorer.score(records)]
    assert sizes == [4, 4, 2]
    assert in_parts == pytest.approx(at_once, rel=1e-6)


def test_a_missing_classifier_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the classifier cannot be read"):
        Classifier(ClassifierConfig(path=str(tmp_path)), CONTEXT)
    with pytest.raises(ConfigError, match="no such directory"):
        Classifier(ClassifierConfig(path=str(tmp_path / "gone")), CONTEXT)
