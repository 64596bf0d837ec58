"""diffusers' own pipelines sample through the shared kernel, and a trainer without them says the
same.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from gcore_diffusion import components, tiny_pipelines  # noqa: E402
from gcore_diffusion.checks import file_problems  # noqa: E402
from gcore_diffusion.config import LoraSettings  # noqa: E402
from gcore_diffusion.rows import transitions  # noqa: E402
from gcore_diffusion.way import SeededNoise  # noqa: E402
from gcore_testing.contracts.weights import digests, exported, push  # noqa: E402

from gcore_core.contract.errors import ConfigError, DataError  # noqa: E402
from gcore_core.contract.factories import import_attribute  # noqa: E402
from gcore_core.contract.looking import Look  # noqa: E402
from tests.support import diffusion_models as kit  # noqa: E402

pytestmark = pytest.mark.rest

GUIDANCE = {"sd3": 4.5, "flux": 3.5, "sana": 3.0, "qwen": 2.0}
SIZE = {"height": 32, "width": 32, "steps": 4, "max_sequence_length": 16}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> directory; each pipeline is made when it is first asked for."""
    directories: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in directories:
            directories[name] = tmp_path_factory.mktemp(name)
            tiny_pipelines.save(name, directories[name])
        return directories[name]

    return folder


def gap(trainer: Any, records: list[Any]) -> float:
    """Largest difference of log-probs, as the trainer computes them now."""
    trainer._denoising.kernel = trainer._kernel(records)
    rows = transitions(
        list(enumerate(records)), trainer._engine.device, trainer._diffusion.guidance
    )
    (logp,) = trainer._denoising.logprobs([rows], "policy")
    return float((logp - rows.columns["rollout_logp"]).abs().max())


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", list(GUIDANCE))
def test_a_trainer_reproduces_what_the_pipeline_sampled(
    folders: Any, name: str, guided: bool
) -> None:
    """0 in the same batches, at most 1e-6 in others."""
    same = {
        "guidance": GUIDANCE[name] if guided else 1.0,
        "max_sequence_length": SIZE["max_sequence_length"],
    }
    generator = kit.make_generator(folders(name), **{**SIZE, **same})
    requests = kit.make_requests(3, 2, text="a red circle, and a cat" if guided else "a")
    records = kit.records_of(kit.sampled(generator, requests))
    trainer = kit.make_trainer(folders(name), **same, reference=False)
    assert len(records[0].columns["logp"]) == 3
    for k in range(3):
        assert gap(trainer, [kit.only(record, k) for record in records]) == 0.0
    assert gap(trainer, records) <= 1e-6
    small = kit.make_trainer(folders(name), **same, reference=False, budget_rows=2)
    assert gap(small, records) <= 1e-6
    image = records[0].media["image"]
    assert image.dtype == np.uint8 and image.shape[-1] == 3 and len(image) >= 32


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_without_noise_a_sampler_draws_what_diffusers_draws(folders: Any, name: str) -> None:
    """With diffusers' own scheduler from the same first noise; one level of 255 is rounding."""
    import diffusers

    settings = {**SIZE, "guidance": GUIDANCE[name], "scale": 0.0}
    generator = kit.make_generator(folders(name), **settings)
    (record,) = kit.sampled(generator, kit.make_requests(1, 1, text="a red circle"))
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folders(name)))
    pipeline.set_progress_bar_config(disable=True)
    first = SeededNoise([record.request.seed], torch.device("cpu")).draw(generator._dims)
    with torch.no_grad():
        images = pipeline(
            record.request.prompt.text,
            height=SIZE["height"],
            width=SIZE["width"],
            num_inference_steps=SIZE["steps"],
            max_sequence_length=SIZE["max_sequence_length"],
            guidance_scale=GUIDANCE[name],
            latents=first,
            output_type="np",
        ).images
    expected = (np.clip(images[0], 0, 1) * 255).round().astype(int)
    assert np.abs(expected - record.media["image"].astype(int)).max() <= 1


@pytest.mark.parametrize("name", list(GUIDANCE))
def test_adapters_are_trained_pushed_and_switched_off_for_the_reference(
    folders: Any, name: str
) -> None:
    """The push holds the adapters alone; KL is 0 before the first update and positive after it;
    they agree again.
    """
    same: dict[str, Any] = {"max_sequence_length": 16, "lora": LoraSettings(rank=4, alpha=8.0)}
    generator = kit.make_generator(folders(name), **{**SIZE, **same})
    trainer = kit.make_trainer(folders(name), **same, learning_rate=1e-2, kl_coefficient=0.1)
    assert {spec.name.split(".lora_")[-1][:2] for spec in trainer.weight_specs()} == {"A.", "B."}
    step_metrics = []
    for step in range(2):
        records = kit.records_of(kit.sampled(generator, kit.make_requests(2, 3, step=step)))
        step_metrics.append(kit.train(trainer, records, step=step))
        push(generator, exported(trainer), step + 1)
    assert step_metrics[0]["kl_to_reference"] == 0
    assert step_metrics[1]["kl_to_reference"] > 0
    assert step_metrics[1]["logprob_gap_max"] <= 1e-6


def test_a_saved_pipeline_is_one_that_diffusers_loads(folders: Any, tmp_path: Path) -> None:
    trainer = kit.make_trainer(folders("sana"), max_sequence_length=16, learning_rate=1e-2)
    records = kit.records_of(
        kit.sampled(kit.make_generator(folders("sana"), **SIZE), kit.make_requests(2, 2))
    )
    kit.train(trainer, records)
    trainer.save_pretrained(tmp_path / "weights")
    trained = {spec.name: array.tobytes() for spec, array in exported(trainer)}
    again = kit.make_trainer(tmp_path / "weights", max_sequence_length=16)
    assert {spec.name: array.tobytes() for spec, array in exported(again)} == trained
    import diffusers

    assert (
        type(diffusers.DiffusionPipeline.from_pretrained(str(tmp_path / "weights"))).__name__
        == "SanaPipeline"
    )


@pytest.mark.parametrize("settings", [{}, {"lora": LoraSettings(rank=4, alpha=8.0)}])
def test_final_weights_that_find_no_place_are_an_error_and_can_be_written_again(
    settings: dict[str, Any], folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no rank waits for ever for the one that writes."""
    trainer = kit.make_trainer(folders("sana"), max_sequence_length=16, **settings)
    before = digests(exported(trainer))
    engine = trainer._denoising
    monkeypatch.setattr(engine, "ranks", Mock(rank=0, wraps=engine.ranks))
    place = tmp_path / "weights"
    place.write_text("a file where a directory should be")
    with pytest.raises(FileExistsError):
        trainer.save_pretrained(place)
    engine.ranks.wait.assert_called_once_with()
    place.unlink()
    trainer.save_pretrained(place)
    assert list(place.rglob("*.safetensors"))
    assert digests(exported(trainer)) == before


def test_error_for_an_unknown_pipeline_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "KandinskyPipeline"}))
    with pytest.raises(ConfigError, match="no adapter for KandinskyPipeline") as caught:
        kit.make_generator(tmp_path)
    assert "StableDiffusion3Pipeline, FluxPipeline, SanaPipeline, QwenImagePipeline" in str(
        caught.value
    )


def test_a_half_written_pipeline_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(DataError, match="the pipeline cannot be read"):
        kit.make_generator(tmp_path)
    with pytest.raises(DataError, match="the pipeline cannot be read"):
        kit.make_trainer(tmp_path)


def test_a_trainer_loads_only_the_transformer(folders: Any) -> None:
    trainer = kit.make_trainer(folders("sd3"), max_sequence_length=16)
    assert trainer._denoising.denoiser.pipeline is None


# -- weights are what the files say ----------------------------------------------------------------


def _rewritten(folder: Path, directory: Path, part: str, edit: Any) -> Path:
    """Copies a pipeline, and writes the weights of a part again after ``edit`` has changed them."""
    shutil.copytree(folder, directory)
    (file,) = (directory / part).glob("*.safetensors")
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def _first_matrix(tensors: dict[str, torch.Tensor]) -> str:
    return min(name for name, tensor in tensors.items() if tensor.dim() > 1)


def _lose(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[_first_matrix(tensors)]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["more.weight"] = torch.zeros(2, 2)


def _spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_first_matrix(tensors)].view(-1)[0] = torch.nan


def _shorten(tensors: dict[str, torch.Tensor]) -> None:
    name = _first_matrix(tensors)
    tensors[name] = tensors[name][1:].clone()


def _pack(tensors: dict[str, torch.Tensor]) -> None:
    name = _first_matrix(tensors)
    tensors[name] = tensors[name].to(torch.int8)


@pytest.mark.parametrize("edit", [_lose, _add, _spoil, _shorten, _pack])
@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
@pytest.mark.parametrize("name", list(GUIDANCE))
def test_a_part_whose_weights_are_not_the_files_is_refused(
    folders: Any, tmp_path: Path, name: str, part: str, edit: Any
) -> None:
    directory = _rewritten(folders(name), tmp_path / "broken", part, edit)
    with pytest.raises(DataError, match=re.escape(str(directory / part))):
        list(components.problems({"directory": str(directory)}))
    with pytest.raises(DataError, match=re.escape(str(directory / part))):
        kit.make_generator(directory)
    if part == "transformer":
        with pytest.raises(DataError, match=re.escape(str(directory / part))):
            kit.make_trainer(directory)


@pytest.mark.parametrize("name", list(GUIDANCE))
def test_a_whole_pipeline_is_no_problem(folders: Any, name: str) -> None:
    role = {"use": "diffusion", "model": {"path": str(folders(name))}}
    [look] = file_problems({"roles": {"policy": role}}, True)
    assert isinstance(look, Look)
    assert str(folders(name) / "transformer") in look.files
    assert list(import_attribute(look.function)(look.arguments)) == []


def test_a_tiny_model_whose_weights_are_not_the_files_is_refused(tmp_path: Path) -> None:
    directory = kit.random_tiny(tmp_path / "tiny")
    assert list(components.problems({"directory": str(directory)})) == []
    for edit in (_lose, _add, _spoil, _shorten):
        broken = _rewritten(directory, tmp_path / edit.__name__, ".", edit)
        with pytest.raises(DataError):
            kit.make_generator(broken)
        with pytest.raises(DataError):
            list(components.problems({"directory": str(broken)}))
