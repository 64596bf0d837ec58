"""Which ids end an answer, whatever the files beside a model's weights say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gcore_language.end_ids import end_ids

from gcore_core.contract.errors import DataError

SIZE = 22
NO_ID = "is no token's id, and the model has the ids 0 to 21"


def ids(directory: Path, own: int | None = 2, **files: Any) -> list[int]:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text)
    return end_ids(directory, SIZE, SimpleNamespace(eos_token_id=own))


@pytest.mark.parametrize(
    ("generation", "config", "own", "found"),
    [
        (4, 3, 2, [2, 3, 4]),
        ([4, 5, 4], None, 2, [2, 4, 5]),
        ([], None, 2, [2]),
        (None, None, None, []),
        (0, None, None, [0]),
        (21, None, None, [21]),
    ],
)
def test_all_that_the_files_name_end_an_answer(
    tmp_path: Path, generation: Any, config: Any, own: int | None, found: list[int]
) -> None:
    named = ids(
        tmp_path,
        own,
        generation_config={"eos_token_id": generation},
        config={"eos_token_id": config, "pad_token_id": -1, "bos_token_id": None},
    )
    assert named == found


def test_a_file_that_is_missing_names_none(tmp_path: Path) -> None:
    assert ids(tmp_path) == [2]


def test_a_text_model_within_another_names_its_own(tmp_path: Path) -> None:
    assert ids(tmp_path, config={"text_config": {"eos_token_id": 7}}) == [2, 7]


@pytest.mark.parametrize("file", ["generation_config", "config"])
@pytest.mark.parametrize(
    "value",
    [-1, 22, 128009, "</s>", "4", 4.0, 1.5, True, False, [4, 128009], [-1], [[4]], {"a": 1}],
)
def test_what_is_no_id_is_refused_with_file_and_key(tmp_path: Path, file: str, value: Any) -> None:
    with pytest.raises(DataError, match=NO_ID) as caught:
        ids(tmp_path, **{file: {"eos_token_id": value}})
    assert f"{file}.json: eos_token_id: " in str(caught.value)


@pytest.mark.parametrize("value", ["x", 1.5, True, 22, [1], -2])
def test_an_id_of_padding_that_no_embedding_has_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="config.json: pad_token_id: .* is no token's id"):
        ids(tmp_path, config={"pad_token_id": value})


def test_the_tokenizers_own_id_must_be_one_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"the tokenizer in .*: eos_token_id: 22 {NO_ID}"):
        ids(tmp_path, own=22)


@pytest.mark.parametrize("content", ["{", "", "[" * 100_000, "[4]", "4", "nan"])
def test_a_file_that_holds_no_settings_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match="generation_config.json: the file (is not JSON|holds no)"):
        ids(tmp_path, generation_config=content)
