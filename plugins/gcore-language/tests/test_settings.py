"""Settings of trainers and generators are within their limits, or refused by their names."""

from __future__ import annotations

from typing import Any

import pytest
from gcore_language.settings import GeneratorSettings, TrainerSettings

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
