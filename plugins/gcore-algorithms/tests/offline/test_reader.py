"""Rows become records, once each; those that cannot be used end alone, with their reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_algorithms.offline.config import AnswersConfig, ReaderConfig
from gcore_algorithms.offline.reader import AnswerReader, TextReader
from gcore_language.tiny import save_model

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FAILED, FINISHED, UNSAMPLED, Prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    save_model(directory, "llama")
    return directory


def opened(model: Path, kind: Any = AnswerReader, **settings: Any) -> Any:
    config = AnswersConfig(**settings) if kind is AnswerReader else ReaderConfig(**settings)
    return kind(config, WorkerContext(role="rollout", model={"path": str(model)}))


def read(reader: Any, *rows: dict[str, Any], answers: int = 2) -> list[Finished]:
    """Has every answer of the rows read; a row's fields beside ``prompt`` are its answers."""
    prompts = [
        Prompt(row=i, text=row.pop("prompt"), fields=row) for i, row in enumerate(map(dict, rows))
    ]
    reader.submit(
        [
            SampleRequest(ordinal=10 + prompt.row, sample=sample, seed=0, prompt=prompt)
            for prompt in prompts
            for sample in range(answers)
        ]
    )
    finished: list[Finished] = []
    while ended := reader.step():
        finished += ended
    return sorted(finished, key=lambda one: (one.request.ordinal, one.request.sample))


GOOD = {"prompt": "1+2=", "chosen": "3", "rejected": "45", "margin": 0.5}


def test_a_pair_is_two_records_of_nobody(model: Path) -> None:
    chosen, rejected = read(opened(model), GOOD)
    for one, text in ((chosen, b"3"), (rejected, b"45")):
        assert (one.status, one.versions) == (FINISHED, (UNSAMPLED, UNSAMPLED))
        assert one.columns["text"].tobytes() == text
        actions = len(text) + 1
        np.testing.assert_array_equal(one.columns["label"], np.full(actions, 0.5, np.float32))
        assert not one.columns["logp"].any()
    np.testing.assert_array_equal(chosen.columns["prompt_ids"], rejected.columns["prompt_ids"])


def test_rows_are_read_in_batches_and_each_once(model: Path) -> None:
    reader = opened(model, batch=2)
    records = read(reader, *[GOOD] * 5)
    keys = [(one.request.ordinal, one.request.sample) for one in records]
    assert keys == [(10 + row, sample) for row in range(5) for sample in range(2)]
    assert reader.step() == []


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**GOOD, "chosen": "3" * 40}, "prompt_too_long"),
        ({**GOOD, "rejected": "3"}, "equal_answers"),
    ],
)
@pytest.mark.parametrize("kind", [AnswerReader, TextReader])
def test_a_row_that_cannot_be_used_is_dropped_alone(
    model: Path, kind: Any, row: dict[str, Any], reason: str
) -> None:
    records = read(opened(model, kind, max_tokens=24), GOOD, row, GOOD)
    assert [one.status for one in records] == [FINISHED] * 2 + [FAILED] * 2 + [FINISHED] * 2
    reasons = {one.reason.partition(":")[0] for one in records if one.status == FAILED}
    assert reasons == {reason}


def test_an_answer_without_tokens_is_nothing_to_train_on(model: Path) -> None:
    reader = opened(model, add_end=False)
    (record,) = read(reader, {"prompt": "1", "completion": ""}, answers=1)
    assert (record.status, record.reason) == (FAILED, "nothing_to_train")


@pytest.mark.parametrize(
    ("settings", "row", "message"),
    [
        ({"too_long": "error", "max_tokens": 8}, {**GOOD, "chosen": "3" * 9}, "15 tokens, and 8"),
        ({"equal": "error"}, {**GOOD, "rejected": "3"}, "are the same tokens"),
    ],
)
def test_a_row_that_cannot_be_used_ends_the_run_where_the_settings_say_so(
    model: Path, settings: dict[str, Any], row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(opened(model, **settings), GOOD, row)
    assert "row 1" in str(caught.value)


def test_the_models_own_limit_holds_without_a_setting(model: Path) -> None:
    (record,) = read(opened(model), {"prompt": "1" * 200, "completion": "2"}, answers=1)
    assert record.reason == "prompt_too_long: 203 tokens, and 128 are allowed"


def test_a_row_that_the_template_refuses_fails_alone_and_says_why(
    model: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(model, tmp_path / "model")
    template = directory / "chat_template.jinja"
    refuses = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    template.write_text(refuses + template.read_text())
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    reader = opened(directory, TextReader)
    rows = ([{"role": "system", "content": "3"}, *talk], talk)
    reader.submit(
        [
            SampleRequest(ordinal=row, sample=0, seed=0, prompt=Prompt(row=row, messages=turns))
            for row, turns in enumerate(rows)
        ]
    )
    refused, read_one = reader.step()
    assert (refused.status, read_one.status) == (FAILED, FINISHED)
    assert refused.reason == "prompt_unreadable: the chat template refuses it: no system"


def test_a_row_with_one_answer_is_refused_where_two_are_asked_for(model: Path) -> None:
    with pytest.raises(DataError, match="the row has 1 answers"):
        read(opened(model), {"prompt": "1", "completion": "2"}, answers=2)


def test_a_row_without_an_answer_is_named(model: Path) -> None:
    with pytest.raises(DataError, match="in no format") as caught:
        read(opened(model), {"prompt": "1", "question": "2"}, answers=1)
    assert "row 0" in str(caught.value)


def test_an_engine_mapping_is_refused(model: Path) -> None:
    context = WorkerContext(role="rollout", model={"path": str(model)}, engine={"a": 1})
    with pytest.raises(ConfigError, match="has no engine"):
        AnswerReader(AnswersConfig(), context)
