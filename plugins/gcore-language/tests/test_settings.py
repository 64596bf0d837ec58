"""Settings of trainers and generators are within their limits, or refused by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gcore_language.settings import GeneratorSettings, TrainerSettings, threads_of

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate: must not be negative, is -1.0"),
        ({"learning_rate": float("nan")}, "learning_rate: must not be negative, is nan"),
        ({"weight_decay": -0.1}, "weight_decay: must not be negative, is -0.1"),
        ({"eps": -1e-8}, "eps: must not be negative, is -1e-08"),
        ({"warmup_updates": -1}, "warmup_updates: must not be negative, is -1"),
        ({"final_fraction": 1.5}, r"final_fraction: must be in 0\.\.1, is 1\.5"),
    ],
)
def test_a_setting_beyond_its_limit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainerSettings(**settings)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_a_temperature_by_which_no_logits_can_be_divided_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature: must be a finite number of at least 0"):
        GeneratorSettings(temperature=temperature)


def test_what_a_generator_itself_gives_to_a_chat_template_is_no_variable_of_it() -> None:
    GeneratorSettings(chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ConfigError, match="chat_template_kwargs: tokenize: what the template is"):
        GeneratorSettings(chat_template_kwargs={"tokenize": True})


@pytest.mark.parametrize(
    ("setting", "mebibytes", "processes", "threads"),
    [("auto", 65, 1, 8), ("auto", 65, 3, 2), ("auto", 1, 1, 1), (3, 1, 1, 3), (3, 65, 2, 3)],
)
def test_a_model_of_some_size_gets_its_part_of_the_cores(
    setting: int | str, mebibytes: int, processes: int, threads: int, tmp_path: Path
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(mebibytes << 20)
    context = WorkerContext(role="any", threads=8)
    assert threads_of(setting, context, tmp_path, processes=processes) == threads


@pytest.mark.parametrize("threads", [0, -1, "many"])
@pytest.mark.parametrize("settings", [GeneratorSettings, TrainerSettings])
def test_no_threads_are_refused(settings: Any, threads: int | str) -> None:
    with pytest.raises(ConfigError, match="threads: must be auto or a positive number"):
        settings(threads=threads)
