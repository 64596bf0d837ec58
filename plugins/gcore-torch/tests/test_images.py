"""A tiny image-text model: it answers prompts with images, and trains on what it answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.images import GRID, PIXELS
from gcore_language.tiny import save_image_model
from gcore_testing.contracts.agreement import train_records
from gcore_testing.runs import run_together
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.trainer import TorchTrainer
from PIL import Image
from transformers import AutoModelForImageTextToText

from gcore_core.contract.errors import ConfigError, ContractError, DataError
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import Prompt, WeightPlan
from tests.support import language_models as tiny

pytestmark = pytest.mark.rest

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
SIZES = {"wide": (16, 24), "tall": (24, 16), "small": (8, 8), "large": (32, 32)}  # height, width
#: float32 sums in another order; logits of the tiny models are about 5
SAME = 1e-5


@pytest.fixture(scope="session")
def image_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, directory in found.items():
        save_image_model(directory, family)
    return found


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    found = {name: str(directory / f"{name}.png") for name in SIZES}
    for name, size in SIZES.items():
        Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)).save(found[name])
    return found


@pytest.fixture
def prompts(pictures: dict[str, str]) -> list[Prompt]:
    """Two that differ in their image alone, one with two images, one without any, one of chat
    messages.
    """
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+"}]}]
    return [
        Prompt(row=0, text=f"{PLACE}1+2=", images=[pictures["wide"]]),
        Prompt(row=1, text=f"{PLACE}1+2=", images=[pictures["tall"]]),
        Prompt(row=2, text=f"{PLACE}3{PLACE}+2=", images=[pictures["small"], pictures["large"]]),
        Prompt(row=3, text="1+2="),
        Prompt(row=4, messages=chat, images=[pictures["large"]]),
    ]


Open = Callable[..., Any]


@pytest.fixture
def open_generator(image_models: dict[str, Path]) -> Open:
    def make(family: str = "qwen2_vl", model: Path | None = None, **config: Any) -> TorchGenerator:
        settings = TorchGeneratorConfig(**({"max_new_tokens": 12} | config))
        return TorchGenerator(
            settings, tiny.make_context(model or image_models[family], role="rollout")
        )

    return make


@pytest.fixture
def open_trainer(image_models: dict[str, Path]) -> Open:
    def make(family: str = "qwen2_vl", **config: Any) -> TorchTrainer:
        settings = TorchTrainerConfig(**({"learning_rate": 1e-3} | config))
        return TorchTrainer(settings, tiny.make_context(image_models[family], tiny.Reinforce()))

    return make


def requests_of(prompts: Sequence[Prompt], samples: int = 4) -> list[SampleRequest]:
    return [
        SampleRequest(ordinal=i, sample=j, seed=100 * i + j, prompt=prompt)
        for i, prompt in enumerate(prompts)
        for j in range(samples)
    ]


def answers(generator: TorchGenerator, prompts: Sequence[Prompt]) -> list[Finished]:
    generator.submit(requests_of(prompts))
    return list(tiny.drain(generator))


def expected(model: Any, record: Finished) -> np.ndarray:
    """Log-probs by transformers' own forward pass: the prompt with its images, then token by token
    with its cache.

    One pass over all tokens would take a sampled image token for an image.
    """
    prompt, actions = (
        torch.from_numpy(record.columns[key].astype(np.int64))
        for key in ("prompt_ids", "action_ids")
    )
    model.model.rope_deltas = None
    shown = {}
    if PIXELS in record.media:
        shown = {
            "pixel_values": torch.from_numpy(record.media[PIXELS]),
            "image_grid_thw": torch.from_numpy(record.columns[GRID]),
            "mm_token_type_ids": (prompt == model.config.image_token_id).int()[None],
        }
    out = model(input_ids=prompt[None], use_cache=True, **shown)
    found = []
    for action in actions:
        found.append(float(out.logits[0, -1].log_softmax(-1)[action]))
        out = model(
            input_ids=action[None, None], past_key_values=out.past_key_values, use_cache=True
        )
    return np.array(found)


def weights_of(trainer: TorchTrainer) -> dict[str, np.ndarray]:
    return {spec.name: array.copy() for spec, array in trainer.export_weights()}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_match_plain_transformers(
    family: str,
    open_generator: Open,
    image_models: dict[str, Path],
    prompts: list[Prompt],
) -> None:
    records = answers(open_generator(family), prompts)
    model = AutoModelForImageTextToText.from_pretrained(
        image_models[family], dtype=torch.float32
    ).eval()
    image_token = model.config.image_token_id
    assert any((r.columns["action_ids"] == image_token).any() for r in records), (
        "none was sampled; choose other seeds"
    )
    for record in records:
        np.testing.assert_allclose(record.columns["logp"], expected(model, record), atol=SAME)


def test_a_prompt_holds_a_token_for_every_four_patches(
    open_generator: Open, prompts: list[Prompt]
) -> None:
    records = answers(open_generator(), prompts)
    image_token = open_generator()._model.config.image_token_id
    for record in records:
        held = int((record.columns["prompt_ids"] == image_token).sum())
        grid = record.columns.get(GRID, np.zeros((0, 3), np.int64))
        assert held * 4 == grid.prod(1).sum() == len(record.media.get(PIXELS, ()))
        assert len(grid) == len(record.request.prompt.images)


def test_the_records_of_a_prompt_share_one_array(
    open_generator: Open, prompts: list[Prompt]
) -> None:
    records = answers(open_generator(), prompts)
    shared = {
        r.request.ordinal: {
            id(o.media.get(PIXELS)) for o in records if o.request.ordinal == r.request.ordinal
        }
        for r in records
    }
    assert all(len(arrays) == 1 for arrays in shared.values())
    assert len(set.union(*shared.values())) == len(prompts)


def test_an_image_changes_the_log_probs(open_generator: Open, prompts: list[Prompt]) -> None:
    generator = open_generator(temperature=0.0, max_new_tokens=1)
    wide, tall = (answers(generator, [prompt])[0].columns["logp"] for prompt in prompts[:2])
    assert abs(float(wide[0] - tall[0])) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [16384, 60])
def test_generator_and_trainer_agree_and_a_step_changes_every_part(
    family: str,
    budget: int,
    open_generator: Open,
    open_trainer: Open,
    prompts: list[Prompt],
) -> None:
    records = train_records(answers(open_generator(family, temperature=0.8), prompts))
    trainer = open_trainer(family, budget_tokens=budget)
    before = weights_of(trainer)
    trainer.prepare(records, frozenset())
    metrics = trainer.train(0, tiny.make_advantages(records), 1, 1)
    assert metrics["logprob_gap_max"] < 1e-4
    after = weights_of(trainer)
    assert all(np.isfinite(array.view(np.float32)).all() for array in after.values())
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    # a bias of keys moves no log-prob: softmax does not see what all scores have in common
    assert {name for name in before.keys() - changed if "k_proj.bias" not in name} == set()


def test_generator_and_trainer_agree_again_after_a_push(
    open_generator: Open, open_trainer: Open, prompts: list[Prompt]
) -> None:
    generator, trainer = open_generator(), open_trainer(learning_rate=1e-2)
    for version in (1, 2):
        records = train_records(answers(generator, prompts))
        trainer.prepare(records, frozenset())
        assert (
            trainer.train(version - 1, tiny.make_advantages(records), 1, 1)["logprob_gap_max"]
            < 1e-4
        )
        plan = WeightPlan(version, trainer.weight_specs())
        generator.begin_weights(plan)
        generator.load_weights(trainer.export_weights())
        generator.commit_weights(plan)


def test_running_samples_read_their_images_again_after_a_push(
    open_generator: Open,
    open_trainer: Open,
    prompts: list[Prompt],
    image_models: dict[str, Path],
) -> None:
    generator, trainer = open_generator(), open_trainer()
    generator.submit(requests_of(prompts))
    records = [record for _ in range(3) for record in generator.step()]
    plan = WeightPlan(
        1, trainer.weight_specs()
    )  # of the same weights, so log-probs stay what they are
    generator.begin_weights(plan)
    generator.load_weights(trainer.export_weights())
    generator.commit_weights(plan)
    records += tiny.drain(generator)
    model = AutoModelForImageTextToText.from_pretrained(
        image_models["qwen2_vl"], dtype=torch.float32
    ).eval()
    assert any(record.versions == (0, 1) for record in records)
    for record in records:
        np.testing.assert_allclose(record.columns["logp"], expected(model, record), atol=SAME)


def test_a_group_encodes_its_image_once_a_micro_batch(
    open_generator: Open,
    open_trainer: Open,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = open_trainer(resplit_every=0)  # else the gradient is computed twice
    inner = trainer._engine._policy.model.model
    encoded: list[int] = []
    encode = inner.get_image_features
    monkeypatch.setattr(
        inner,
        "get_image_features",
        lambda p, g, **k: (encoded.append(len(g)), encode(p, g, **k))[1],
    )
    records = train_records(answers(open_generator(), prompts))
    trainer.prepare(records, frozenset())
    trainer.train(0, tiny.make_advantages(records), 1, 1)
    assert encoded == [5]


def test_saved_weights_are_a_model_directory_that_generates(
    open_generator: Open, open_trainer: Open, prompts: list[Prompt], tmp_path: Path
) -> None:
    open_trainer().save_pretrained(tmp_path)
    saved, original = open_generator(model=tmp_path), open_generator()
    for one, other in zip(answers(saved, prompts), answers(original, prompts), strict=True):
        np.testing.assert_array_equal(one.columns["action_ids"], other.columns["action_ids"])


def test_two_sharded_ranks_of_which_one_has_no_image_match_one_rank(
    image_models: dict[str, Path], tmp_path: Path
) -> None:
    told = []
    for ranks in (1, 2):
        work = tmp_path / str(ranks)
        work.mkdir()
        given = [str(ranks), str(image_models["qwen2_vl"]), str(work)]
        run_together(
            [["-m", "tests.support.torch_image_ranks", str(rank), *given] for rank in range(ranks)]
        )
        told.append(json.loads((work / "numbers.json").read_text()))
    one, two = told
    assert one["metrics"] == pytest.approx(two["metrics"], rel=1e-4, abs=1e-6)
    for name, values in one["weights"].items():
        np.testing.assert_allclose(values, two["weights"][name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
def test_training_works_with_checkpointed_layers_and_bfloat16(
    settings: dict[str, Any],
    open_generator: Open,
    open_trainer: Open,
    prompts: list[Prompt],
) -> None:
    records = train_records(answers(open_generator(), prompts))
    plain, other = open_trainer(), open_trainer(**settings)
    norms = []
    for trainer in (plain, other):
        trainer.prepare(records, frozenset())
        norms.append(trainer.train(0, tiny.make_advantages(records), 1, 1)["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4 if "dtype" not in settings else 0.1)


# -- what is wrong is told -------------------------------------------------------------------------


def test_an_image_for_a_text_model_is_refused(
    open_generator: Open, model_dirs: dict[str, Path], prompts: list[Prompt]
) -> None:
    generator = open_generator(model=model_dirs["llama"])
    with pytest.raises(
        DataError, match="row 0 names 1 images, and this generator or its model takes none"
    ) as told:
        generator.submit(requests_of(prompts[:1]))
    assert prompts[0].images[0] in str(told.value)
    assert "data.config.images" in str(told.value)


def test_a_text_trainer_refuses_records_with_images(
    open_generator: Open, model_dirs: dict[str, Path], prompts: list[Prompt]
) -> None:
    records = train_records(answers(open_generator(), prompts))
    trainer = TorchTrainer(
        TorchTrainerConfig(), tiny.make_context(model_dirs["llama"], tiny.Reinforce())
    )
    trainer.prepare(records, frozenset())
    with pytest.raises(DataError, match="records have images, and the model takes none"):
        trainer.train(0, tiny.make_advantages(records), 1, 1)


def test_error_for_a_missing_image_names_row_and_path(open_generator: Open, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.png")
    with pytest.raises(
        DataError, match=r"gone\.png: an image of row 7 cannot be read\.\n  There is no such file"
    ):
        open_generator().submit(requests_of([Prompt(row=7, text=PLACE, images=[gone])]))


@pytest.mark.parametrize("broken", [b"", b"no image", "cut"])
def test_error_for_a_broken_image_names_row_and_path(
    broken: bytes | str, open_generator: Open, pictures: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "broken.png"
    file.write_bytes(
        broken if isinstance(broken, bytes) else Path(pictures["large"]).read_bytes()[:200]
    )
    with pytest.raises(DataError, match=r"broken\.png: an image of row 7 cannot be read\."):
        open_generator().submit(requests_of([Prompt(row=7, text=PLACE, images=[str(file)])]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1+2=", "row 0 names 1 images, and its prompt has places for 0"),
        (PLACE * 2, "row 0 names 1 images, and its prompt has places for 2"),
    ],
)
def test_a_prompt_with_more_or_fewer_places_than_images_is_refused(
    text: str, message: str, open_generator: Open, prompts: list[Prompt]
) -> None:
    with pytest.raises(DataError, match=message):
        open_generator().submit(requests_of([Prompt(row=0, text=text, images=prompts[0].images)]))


def test_a_prompt_with_adjacent_images_is_refused(
    open_generator: Open, prompts: list[Prompt]
) -> None:
    two = Prompt(row=5, text="<|image_pad|><|image_pad|>", images=prompts[2].images)
    with pytest.raises(DataError, match="row 5 has two images without a token between them"):
        open_generator().submit(requests_of([two]))


def test_tokens_of_images_count_for_the_context(
    open_generator: Open, prompts: list[Prompt]
) -> None:
    """Eight tokens of text fit into sixteen, with the image's they do not."""
    generator = open_generator(context_length=16)
    (large, *_), (small, *_) = (
        answers(generator, [Prompt(row=0, text=f"{PLACE}1+2=", images=[image])])
        for image in (prompts[4].images[0], prompts[2].images[0])
    )
    assert (large.status, large.reason) == (
        "failed",
        "prompt_too_long: 23 tokens, and the context has 16",
    )
    assert small.status != "failed"


def test_a_model_without_an_image_processor_is_refused(
    open_generator: Open, image_models: dict[str, Path], tmp_path: Path
) -> None:
    for file in image_models["qwen2_vl"].iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(DataError, match="transformers cannot load the image processor"):
        open_generator(model=tmp_path)


def test_options_that_image_text_models_do_not_support_are_refused(
    open_generator: Open, open_trainer: Open, prompts: list[Prompt]
) -> None:
    with pytest.raises(ConfigError, match="fused is not for models that take images"):
        open_generator(decoder="fused")
    with pytest.raises(
        ConfigError, match="packing: shared_prompt does not give this model's log-probs"
    ):
        open_trainer(packing="shared_prompt")
    generator = open_generator()
    record = answers(generator, prompts[:1])[0]
    with pytest.raises(ContractError, match="without their images"):
        generator.logprobs([record.columns])


def test_an_aborted_sample_keeps_its_images(open_generator: Open, prompts: list[Prompt]) -> None:
    generator = open_generator(max_batch=2)
    requests = requests_of(prompts[:1])
    generator.submit(requests)
    generator.step()
    aborted = generator.abort([(r.ordinal, r.sample) for r in requests])
    assert aborted
    assert all(PIXELS in record.media and GRID in record.columns for record in aborted)


def test_records_hold_the_output_of_the_transformers_processor(
    open_generator: Open,
    image_models: dict[str, Path],
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

    # it asks of which class its parts are, among them that for videos, which needs torchvision
    monkeypatch.setattr(Qwen2VLProcessor, "check_argument_for_proper_class", lambda *_: None)
    path = image_models["qwen2_vl"]
    processor = Qwen2VLProcessor(
        AutoImageProcessor.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    )
    record = answers(open_generator(), prompts[2:3])[0]
    images = [Image.open(file) for file in prompts[2].images]
    made = processor(text=[prompts[2].text], images=images, return_tensors="np")
    np.testing.assert_array_equal(made["input_ids"][0], record.columns["prompt_ids"])
    np.testing.assert_array_equal(made["pixel_values"], record.media[PIXELS])
    np.testing.assert_array_equal(made["image_grid_thw"], record.columns[GRID])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_array_is_read_as_the_file_that_holds_it(
    open_generator: Open, prompts: list[Prompt], family: str
) -> None:
    """Of a prompt with two places, with both as files, the second as an array, and both as
    arrays.
    """
    whole = prompts[2]
    arrays = [np.asarray(Image.open(file)) for file in whole.images]
    found = []
    for files in (2, 1, 0):
        generator = open_generator(family)
        prompt = Prompt(row=2, text=whole.text, images=whole.images[:files])
        generator.submit([replace(r, images=arrays[files:]) for r in requests_of([prompt])])
        found.append(tiny.drain(generator))
    for records in found[1:]:
        for record, expected in zip(records, found[0], strict=True):
            for name in ("prompt_ids", "action_ids", "logp", GRID):
                np.testing.assert_array_equal(record.columns[name], expected.columns[name])
            np.testing.assert_array_equal(record.media[PIXELS], expected.media[PIXELS])


def test_grey_arrays_are_read_as_grey_files(open_generator: Open, tmp_path: Path) -> None:
    grey = np.random.default_rng(1).integers(0, 256, (24, 16, 1), dtype=np.uint8)
    Image.fromarray(grey[..., 0]).save(tmp_path / "grey.png")
    (filed,) = requests_of([Prompt(row=0, text=PLACE, images=[str(tmp_path / "grey.png")])], 1)
    (given,) = requests_of([Prompt(row=0, text=PLACE)], 1)
    found = []
    for request in (filed, replace(given, images=[grey])):
        generator = open_generator()
        generator.submit([request])
        (record,) = tiny.drain(generator)
        found.append(record.media[PIXELS])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.zeros((8, 8, 3), np.float32), r"float32\[8, 8, 3\]"),
        (np.zeros((8, 8), np.uint8), r"uint8\[8, 8\]"),
        (np.zeros((8, 8, 4), np.uint8), r"uint8\[8, 8, 4\]"),
        (np.zeros((0, 8, 3), np.uint8), r"uint8\[0, 8, 3\]"),
    ],
)
def test_an_array_that_is_no_image_is_refused(
    open_generator: Open, array: np.ndarray, told: str
) -> None:
    (request,) = requests_of([Prompt(row=0, text=PLACE)], 1)
    with pytest.raises(DataError, match=f"what a question shows is {told}, not uint8"):
        open_generator().submit([replace(request, images=[array])])


def test_a_question_with_more_or_fewer_places_than_images_is_refused(open_generator: Open) -> None:
    (request,) = requests_of([Prompt(row=0, text=PLACE + "1" + PLACE)], 1)
    with pytest.raises(
        DataError, match="a question names 1 images, and its prompt has places for 2"
    ):
        open_generator().submit([replace(request, images=[np.zeros((8, 8, 3), np.uint8)])])


def test_a_text_model_refuses_a_question_with_images(
    open_generator: Open, model_dirs: dict[str, Path]
) -> None:
    generator = open_generator(model=model_dirs["llama"])
    (request,) = requests_of([Prompt(row=0, text="1+")], 1)
    with pytest.raises(
        DataError, match="a question shows 1 images, and this generator or its model takes none"
    ):
        generator.submit([replace(request, images=[np.zeros((8, 8, 3), np.uint8)])])


def test_an_image_shape_that_the_processor_refuses_is_reported(
    open_generator: Open, tmp_path: Path
) -> None:
    file = str(tmp_path / "thin.png")
    Image.new("RGB", (4, 1000)).save(file)
    with pytest.raises(
        DataError, match=r"thin\.png: the images of row 7 cannot be cut into patches\.\n.*ratio"
    ):
        open_generator().submit(requests_of([Prompt(row=7, text=PLACE, images=[file])]))
