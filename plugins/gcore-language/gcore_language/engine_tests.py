"""Holds tests that engines share: an engine's test module inherits a class and gives its fixtures.

directories: name -> model directory. Each family has a second one, ``<family>-other``, that differs
    in its weights alone.
generator: a generator with the weights of ``family``, which every test leaves in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gcore_testing.contracts.weights import load, push
from gcore_testing.safetensors_files import write_safetensors

from gcore_core.contract.errors import DataError, WeightMismatch
from gcore_core.contract.records import Prompt, TensorSpec, WeightPlan
from gcore_language.images import GRID, PIXELS
from gcore_language.testing import (
    PLACE,
    assert_agree,
    drain,
    gaps,
    image_prompts,
    requests_of,
    run,
    tensors_of,
)
from gcore_language.tiny import VOCABULARY, save_image_model

Directories = Mapping[str, Path]

#: Of ``tiny.save_image_model``'s models; four patches are a token.
_IMAGE_TOKEN = VOCABULARY + 1
_PATCHES = 4


class PushTests:
    """Tests what an engine does with a push of weights."""

    prompts: ClassVar[Sequence[str]] = ("1+2=", "7", "12+34=", "1+" * 35 + "1=")

    @pytest.fixture
    def family(self) -> str:
        return "llama"

    def test_after_each_push_log_probs_are_those_of_the_new_weights(
        self, generator: Any, family: str, directories: Directories
    ) -> None:
        for source in (f"{family}-other", family, f"{family}-other", family):
            push(generator, tensors_of(directories[source]), generator.version + 1)
            records = run(generator, requests_of(self.prompts))
            assert {record.versions for record in records} == {
                (generator.version, generator.version)
            }
            assert_agree(gaps(records, directories[source]))

    def test_a_push_that_broke_off_can_be_made_again(
        self, generator: Any, family: str, directories: Directories
    ) -> None:
        new = tensors_of(directories[f"{family}-other"])
        version = generator.version + 1
        plan = WeightPlan(version, [spec for spec, _ in new])
        half = len(new) // 2
        generator.begin_weights(plan)
        load(generator, new[:half])
        with pytest.raises(
            WeightMismatch, match=f"tensor {min(spec.name for spec, _ in new[half:])} has not come"
        ):
            generator.commit_weights(plan)
        with pytest.raises(WeightMismatch, match="has begun and was not committed"):
            generator.step()
        assert generator.version == version - 1
        push(generator, new, version)
        assert_agree(
            gaps(run(generator, requests_of(self.prompts)), directories[f"{family}-other"])
        )
        push(generator, tensors_of(directories[family]), version + 1)

    def test_a_push_of_another_model_is_refused_by_name(
        self, generator: Any, family: str, directories: Directories
    ) -> None:
        tensors = tensors_of(directories[family])
        specs = [spec for spec, _ in tensors]
        version = generator.version + 5
        first = specs[0]
        wide = TensorSpec(first.name, first.dtype, (7, *first.shape[1:]), first.nbytes)
        with pytest.raises(WeightMismatch, match=f"lacks tensor {first.name}"):
            generator.begin_weights(WeightPlan(version, specs[1:]))
        with pytest.raises(WeightMismatch, match=r"another\.scale, which the model does not have"):
            generator.begin_weights(
                WeightPlan(version, [*specs, TensorSpec("another.scale", "F32", (1,), 4)])
            )
        with pytest.raises(
            WeightMismatch, match=rf"{first.name} has shape \(7, .*\) in the plan and"
        ):
            generator.begin_weights(WeightPlan(version, [wide, *specs[1:]]))
        with pytest.raises(WeightMismatch, match="tensors came before their plan"):
            generator.load_weights(tensors)
        generator.begin_weights(WeightPlan(version, specs))
        with pytest.raises(WeightMismatch, match=f"tensor {first.name} is not as planned"):
            generator.load_weights([(first, tensors[0][1][:-4])])
        push(generator, tensors, version)
        with pytest.raises(WeightMismatch, match=f"version {version - 1} is older than {version}"):
            generator.begin_weights(WeightPlan(version - 1, specs))
        assert_agree(gaps(run(generator, requests_of(self.prompts)), directories[family]))


def save_image_models(directory: Path, family: str, patch: int = 4) -> dict[str, Path]:
    """Writes the models of ``ImageTests`` and returns name -> directory.

    One more than the module's docstring names, ``<family>-mixed``, has the vision tower of the
    other.
    """
    directories = {
        name: directory / name for name in (family, f"{family}-other", f"{family}-mixed")
    }
    first, second, mixed = directories.values()
    for seed, path in enumerate((first, second)):
        save_image_model(path, family, seed=seed, patch=patch)
    save_image_model(mixed, family, patch=patch)
    tower = {
        spec.name: (spec, array) for spec, array in tensors_of(second) if "visual" in spec.name
    }
    of_both = [tower.get(spec.name, (spec, array)) for spec, array in tensors_of(first)]
    write_safetensors(mixed / "model.safetensors", of_both)
    return directories


class ImageTests:
    """Tests what an engine does with images, on the models of ``save_image_models``.

    At most 12 actions are sampled, in a context of 128 tokens.
    """

    patch: ClassVar[int] = 4

    def held(self, generator: Any) -> AbstractContextManager[None]:
        """See ``GeneratorContract.held``."""
        return nullcontext()

    @pytest.fixture
    def family(self) -> str:
        return "qwen2_vl"

    @pytest.fixture
    def prompts(self, tmp_path: Path) -> list[Prompt]:
        return image_prompts(tmp_path, self.patch)

    def test_before_and_after_each_push_log_probs_are_those_of_the_weights(
        self, generator: Any, family: str, directories: Directories, prompts: list[Prompt]
    ) -> None:
        actions: list[int] = []
        for source in (family, f"{family}-other", f"{family}-mixed", family):
            push(generator, tensors_of(directories[source]), generator.version + 1)
            records = run(generator, requests_of(prompts)) + run(
                generator, requests_of(prompts, 1, greedy=True)
            )
            assert_agree(gaps(records, directories[source]))
            actions += [
                int(action) for record in records for action in record.columns["action_ids"]
            ]
        assert _IMAGE_TOKEN in actions, (
            "no image token was sampled, which must not stand for an image"
        )

    def test_what_a_push_brings_to_the_vision_tower_alone_changes_log_probs(
        self, generator: Any, family: str, directories: Directories, prompts: list[Prompt]
    ) -> None:
        seeing, blind = (
            [prompt for prompt in prompts if bool(prompt.images) == with_images]
            for with_images in (True, False)
        )
        run(generator, requests_of(seeing))  # fills the caches
        push(generator, tensors_of(directories[f"{family}-mixed"]), generator.version + 1)
        seeing_records = run(generator, requests_of(seeing))
        blind_records = run(generator, requests_of(blind))
        assert gaps(seeing_records, directories[family]).max() > 0.1
        assert_agree(gaps(blind_records, directories[family]))
        assert_agree(gaps(seeing_records, directories[f"{family}-mixed"]))
        push(generator, tensors_of(directories[family]), generator.version + 1)

    def test_records_hold_what_the_trainer_takes_and_those_of_a_prompt_share_their_pixels(
        self, generator: Any, prompts: list[Prompt]
    ) -> None:
        """All of them do, those that were aborted too, as far as each was."""
        requests = requests_of(prompts, 8)
        with self.held(generator):
            generator.submit(requests)
            ended = generator.step()
            aborted = generator.abort(
                [(ordinal, sample) for ordinal in range(len(prompts)) for sample in range(3, 8)]
            )
        records = ended + aborted + drain(generator, len(requests) - len(ended) - len(aborted))
        assert {record.status for record in records} > {"aborted"}
        shared: dict[int, set[int]] = {}
        for record in records:
            paths = record.request.prompt.images
            image_tokens = int((record.columns["prompt_ids"] == _IMAGE_TOKEN).sum())
            grid = record.columns.get(GRID, np.zeros((0, 3), np.int64))
            assert len(grid) == len(paths)
            assert (
                image_tokens * _PATCHES == grid.prod(1).sum() == len(record.media.get(PIXELS, ()))
            )
            assert (PIXELS in record.media) == bool(paths)
            shared.setdefault(record.request.ordinal, set()).add(id(record.media.get(PIXELS)))
        assert all(len(arrays) == 1 for arrays in shared.values())

    def test_an_image_that_is_given_as_an_array_is_seen_as_that_of_a_file(
        self, generator: Any, prompts: list[Prompt]
    ) -> None:
        from PIL import Image

        (of_file,) = requests_of(prompts[:1], 1, greedy=True)
        with Image.open(prompts[0].images[0]) as opened:
            arrays = (np.asarray(opened),)
        of_array = replace(
            of_file, ordinal=1, prompt=Prompt(row=0, text=prompts[0].text), images=arrays
        )
        from_file, from_array = sorted(
            run(generator, [of_file, of_array]), key=lambda record: record.request.ordinal
        )
        for of_one, of_other in (
            (from_file.columns, from_array.columns),
            (from_file.media, from_array.media),
        ):
            assert of_one.keys() == of_other.keys()
            for name in of_one.keys() - {"logp"}:
                np.testing.assert_array_equal(of_one[name], of_other[name])

    def test_a_prompt_that_does_not_fit_with_its_images_fails_alone(
        self, generator: Any, prompts: list[Prompt], tmp_path: Path
    ) -> None:
        from PIL import Image

        side = 16 * self.patch
        Image.effect_noise((side, side), 100).convert("RGB").save(tmp_path / "large.png")
        large = Prompt(row=0, text=PLACE * 2, images=[str(tmp_path / "large.png")] * 2)
        failed, fits = sorted(
            run(generator, requests_of([large, prompts[0]], 1)), key=lambda r: r.request.ordinal
        )
        assert (failed.status, failed.reason.partition(" ")[0]) == ("failed", "prompt_too_long:")
        assert "and the context has" in failed.reason
        assert dict(failed.columns) == dict(failed.media) == {}
        assert fits.status != "failed"

    def test_what_is_wrong_with_an_image_is_told_with_row_and_path(
        self, generator: Any, prompts: list[Prompt], tmp_path: Path
    ) -> None:
        (shown,) = prompts[0].images
        gone, broken, cut = (str(tmp_path / f"{name}.png") for name in ("gone", "broken", "cut"))
        Path(broken).write_bytes(b"no image")
        Path(cut).write_bytes(Path(shown).read_bytes()[:200])
        for text, path, message in (
            (
                PLACE,
                gone,
                r"gone\.png: an image of row 7 cannot be read\.\n  There is no such file",
            ),
            (PLACE, broken, r"broken\.png: an image of row 7 cannot be read\."),
            (PLACE, cut, r"cut\.png: an image of row 7 cannot be read\."),
            ("1+2=", shown, "row 7 names 1 images, and its prompt has places for 0"),
            (PLACE * 2, shown, "row 7 names 1 images, and its prompt has places for 2"),
        ):
            with pytest.raises(DataError, match=message):
                generator.submit(requests_of([Prompt(row=7, text=text, images=[path])]))
        assert generator.step() == []
