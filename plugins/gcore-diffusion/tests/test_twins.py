"""Twins of pipelines: the original's class, tiny, and alike in both roles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")

from gcore_diffusion.config import DiffusionGeneratorConfig  # noqa: E402
from gcore_diffusion.sizes import PUBLISHED  # noqa: E402
from gcore_diffusion.twins import (  # noqa: E402
    twin_of_generator,
    twin_of_preference,
    twin_of_trainer,
)

from gcore_core.contract.errors import ConfigError  # noqa: E402
from tests.support import diffusion_models as kit  # noqa: E402


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_twin_has_the_class_of_its_original_and_is_made_once(name: str, tmp_path: Path) -> None:
    node = {"model": {"path": name, "revision": "abc"}, "config": {"lora": {"rank": 32}}}
    changes = twin_of_trainer(node, tmp_path)
    place = Path(changes["model"]["path"])
    index = json.loads((place / "model_index.json").read_text())
    assert index["_class_name"] == PUBLISHED[name].pipeline
    assert changes["model"]["revision"] is None
    assert changes["config"]["lora"] == {"rank": 4}
    written = (place / "model_index.json").stat().st_mtime_ns
    assert twin_of_trainer(node, tmp_path) == changes
    assert (place / "model_index.json").stat().st_mtime_ns == written
    again = {"model": {"path": str(place)}, "config": {}}
    assert "model" not in twin_of_trainer(again, tmp_path)


def test_sampler_and_trainer_get_the_same_of_what_they_share(tmp_path: Path) -> None:
    model = {"path": "black-forest-labs/FLUX.1-dev"}
    shared = {"guidance": 3.5, "lora": {"rank": 2}}
    trainer = twin_of_trainer({"model": model, "config": shared, "like": model}, tmp_path)
    settings = {**shared, "steps": 10, "window": 3, "window_end": 6, "height": 512}
    generator = twin_of_generator({"config": settings, "like": model}, tmp_path)
    for name in ("lora", "max_sequence_length"):
        assert generator["config"][name] == trainer["config"][name]
    made = generator["config"]
    assert made["steps"] == 4 and made["window"] == 2 and made["window_end"] == 3
    assert made["height"] == made["width"] == 32
    assert "model" not in generator


def test_a_twin_of_two_steps_has_a_window_that_fits(tmp_path: Path) -> None:
    model = {"path": "black-forest-labs/FLUX.1-dev"}
    settings = {"steps": 2, "window": 2, "window_end": 2}
    made = twin_of_generator({"config": settings, "like": model}, tmp_path)["config"]
    assert DiffusionGeneratorConfig(**made).window == 1


def test_a_job_with_a_tiny_model_of_its_own_stays_as_it_is(tmp_path: Path) -> None:
    kit.random_tiny(tmp_path / "tiny")
    for model in ({"path": str(tmp_path / "tiny")}, {"make": {"path": "digits.py"}}):
        node: dict[str, Any] = {"config": {"steps": 10}, "like": model}
        assert twin_of_generator(node, tmp_path) == {}


def test_a_pipeline_that_nobody_knows_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no twin of someone/unknown"):
        twin_of_trainer({"model": {"path": "someone/unknown"}}, tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "KandinskyPipeline"}')
    with pytest.raises(ConfigError, match="of KandinskyPipeline none can be made"):
        twin_of_trainer({"model": {"path": str(tmp_path)}}, tmp_path)


def test_a_preference_model_becomes_a_random_clip(tmp_path: Path) -> None:
    node = {"config": {"path": "yuvalkirstain/PickScore_v1", "processor": "laion/CLIP-ViT-H-14"}}
    config = twin_of_preference(node, tmp_path)["config"]
    assert config["processor"] is None
    assert (Path(config["path"]) / "preprocessor_config.json").is_file()
    assert twin_of_preference({"config": {"path": config["path"]}}, tmp_path) == {}
