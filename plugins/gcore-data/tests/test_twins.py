"""Twins of data sets: the columns of the original, in rows that its own settings read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gcore_data.config import HubConfig
from gcore_data.formats import prompt_of
from gcore_data.twins import twin_of_hub

KNOWN = {
    "BytedTsinghua-SIA/DAPO-Math-17k": {"columns": {"answer": "reward_model.ground_truth"}},
    "DigitalLearningGmbH/MATH-lighteval": {
        "columns": {"answer": "solution"},
        "template": "{problem} Go.",
        "extract": {"answer": "boxed"},
    },
    "hiyouga/geometry3k": {"columns": {"prompt": "problem"}, "images": "images", "form": "chat"},
    "openai/gsm8k": {"columns": {"prompt": "question"}, "extract": {"answer": "gsm8k"}},
    "someone/unknown": {"columns": {"prompt": "asked", "answer": "solved.by"}},
    "trl-lib/ultrafeedback-prompt": {},
    "trl-lib/ultrafeedback_binarized": {},
}


def rows_of(config: HubConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(config.path).read_text().splitlines()]


@pytest.mark.parametrize("name", KNOWN)
def test_rows_of_a_twin_are_read_by_the_originals_settings(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"path": name, "subset": "main", **KNOWN[name]}
    changes = twin_of_hub({"config": settings}, tmp_path)["config"]
    merged = {**settings, **changes}
    config = HubConfig(**{key: value for key, value in merged.items() if value is not None})
    assert config.is_local and not config.subset
    for number, row in enumerate(rows_of(config)):
        for picture in row.pop(config.images or "", []):
            assert (Path(config.path).parent / picture).is_file()
        prompt = prompt_of(number, row, config, name)
        assert (prompt.text is None) != (prompt.messages is None)
        if "answer" in prompt.fields:
            assert prompt.fields["answer"] == str(number + number % 7)
        if "binarized" in name:
            assert prompt.fields["chosen"] != prompt.fields["rejected"]


def test_pictures_stand_where_the_text_says(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"path": "hiyouga/geometry3k", **KNOWN["hiyouga/geometry3k"]}
    changes = twin_of_hub({"config": settings}, tmp_path)["config"]
    config = HubConfig(**{**settings, **changes})
    row = rows_of(config)[3]
    row.pop("images")
    (turn,) = prompt_of(3, row, config, "row 3").messages or []
    assert turn["content"] == [{"type": "image"}, {"type": "text", "text": "Find 3+3."}]


def test_files_of_the_user_stay_and_only_fewer_rows_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "?"}\n')
    assert twin_of_hub({"config": {"path": str(file)}}, tmp_path) == {"config": {"limit": 24}}
