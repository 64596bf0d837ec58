"""Texts that are encoded together have the tokens that they have alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gcore_algorithms.offline.config import AnswersConfig, ReaderConfig
from gcore_algorithms.offline.reader import AnswerReader, RowReader, TextReader
from gcore_algorithms.offline.remembered import RememberingTokenizer
from gcore_language.prompts import load_tokenizer
from gcore_language.tiny import save_model

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt

TEXTS = ["1+2=", "12+34=46", "", "7"]


class Counting:
    """A tokenizer that counts its calls."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return self.tokenizer(*arguments, **options)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(directory, "llama")
    return directory


@pytest.fixture
def counting(directory: Path) -> Counting:
    return Counting(load_tokenizer(str(directory), None))


@pytest.mark.parametrize("special", [True, False])
def test_tokens_are_those_of_the_tokenizer(special: bool, counting: Counting) -> None:
    remembering = RememberingTokenizer(counting)
    remembering.encode([(text, special) for text in TEXTS * 2])
    assert counting.calls == 1
    for text in [*TEXTS, "5+5="]:
        own = remembering(text, add_special_tokens=special).input_ids
        assert own == counting.tokenizer(text, add_special_tokens=special).input_ids
    assert counting.calls == 2
    assert remembering.eos_token_id == counting.tokenizer.eos_token_id
    assert remembering.chat_template == counting.tokenizer.chat_template


def test_a_text_with_special_tokens_is_another_one_than_without(counting: Counting) -> None:
    remembering = RememberingTokenizer(counting)
    remembering.encode([("7", True), ("7", False)])
    with_special = remembering("7").input_ids
    assert with_special == counting.tokenizer("7").input_ids
    assert with_special != remembering("7", add_special_tokens=False).input_ids


def test_no_more_is_remembered_than_allowed(counting: Counting) -> None:
    remembering = RememberingTokenizer(counting, most_tokens=3)
    for text in ("12+34", "1"):
        remembering.encode([(text, False)])
    calls = counting.calls
    remembering.encode([("1", False)])
    assert counting.calls == calls
    remembering.encode([("12+34", False)])  # was forgotten before "1" came
    assert counting.calls == calls + 1


def _records(reader: RowReader, rows: list[dict[str, str]]) -> list[Any]:
    reader.submit(
        [
            SampleRequest(
                ordinal=place,
                sample=sample,
                seed=0,
                prompt=Prompt(row=place, text=row["prompt"], fields=row),
            )
            for place, row in enumerate(rows)
            for sample in range(2 if "chosen" in row else 1)
        ]
    )
    return [
        {name: column.tolist() for name, column in finished.columns.items()}
        for finished in reader.step()
    ]


ROWS = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(5)]
PAIRS = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": "9" * i} for i in range(1, 5)]


@pytest.mark.parametrize("rows", [ROWS, PAIRS], ids=["answers", "pairs"])
@pytest.mark.parametrize("kind", [(AnswerReader, AnswersConfig), (TextReader, ReaderConfig)])
def test_rows_that_are_read_together_are_those_that_are_read_alone(
    kind: Any, rows: list[dict[str, str]], directory: Path
) -> None:
    """And nothing but what was encoded ahead is asked for."""
    reader_of, config = kind
    context = WorkerContext(role="rollout", model={"path": str(directory)})
    reader = reader_of(config(), context)
    counting = Counting(reader.tokenizer._tokenizer)
    reader.tokenizer = RememberingTokenizer(counting)
    together = _records(reader, rows)
    assert counting.calls <= 2
    alone = reader_of(config(), context)
    assert together == [record for row in rows for record in _records(alone, [row])]
    assert _records(reader, rows) == together
    assert counting.calls <= 2, "the second epoch encodes nothing"
