"""Data sets by name and from local files: one reader, whatever wrote them."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from gcore_data.config import HubConfig
from gcore_data.extraction import extracted
from gcore_data.hub import Hub

from gcore_core.contract.errors import ConfigError, DataError

WORD = "Tom has {0} and buys one.\n#### {1}"
COMMIT = "0" * 40


def gsm8k(rows: int) -> datasets.Dataset:
    """Rows as GSM8K has them."""
    return datasets.Dataset.from_dict(
        {
            "question": [f"{n}+1?" for n in range(rows)],
            "answer": [WORD.format(n, f"{n + 1:,}") for n in range(rows)],
        }
    )


def opened(path: Path | str, **config: Any) -> Hub:
    return Hub(HubConfig(path=str(path), **config))


def one(tmp_path: Path, row: dict[str, Any], **config: Any) -> Any:
    """The prompt of a data set of one row."""
    datasets.Dataset.from_list([row]).save_to_disk(str(tmp_path / "one"))
    return opened(tmp_path / "one", **config)[0]


def message(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert len(text.splitlines()) <= 6
    return text


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "hub"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("G_CORE_CACHE", str(tmp_path / "cache"))
    return home


def saved(folder: Path) -> Path:
    gsm8k(12).save_to_disk(str(folder))
    return folder


def splits(folder: Path) -> Path:
    datasets.DatasetDict({"train": gsm8k(12), "test": gsm8k(3)}).save_to_disk(str(folder))
    return folder


def as_on_the_hub(folder: Path) -> Path:
    """A folder without a script: names of files say the splits."""
    (folder / "data").mkdir(parents=True)
    gsm8k(12).select(range(7)).to_parquet(folder / "data" / "train-00000-of-00002.parquet")
    gsm8k(12).select(range(7, 12)).to_parquet(folder / "data" / "train-00001-of-00002.parquet")
    gsm8k(3).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    return folder


def json_lines(folder: Path) -> Path:
    folder.mkdir()
    gsm8k(12).to_json(folder / "rows.jsonl")
    return folder / "rows.jsonl"


@pytest.mark.parametrize("make", [saved, splits, as_on_the_hub, json_lines])
def test_every_layout_gives_the_same_rows(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    rows = opened(
        make(tmp_path / "set"), columns={"prompt": "question"}, extract={"answer": "gsm8k"}
    )
    found = [rows[row] for row in range(len(rows))]
    assert [prompt.text for prompt in found] == [f"{n}+1?" for n in range(12)]
    assert [prompt.row for prompt in found] == list(range(12))
    assert [prompt.fields for prompt in found] == [{"answer": str(n + 1)} for n in range(12)]


def test_a_name_is_found_in_the_cache_without_the_hub(
    tmp_path: Path, own_caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``datasets`` leaves it behind when it has fetched openai/gsm8k once."""
    builder = datasets.load_dataset_builder(str(as_on_the_hub(tmp_path / "set")))
    builder.download_and_prepare()
    place = own_caches / "openai___gsm8k" / "default" / "0.0.0" / COMMIT
    place.parent.mkdir(parents=True)
    prepared = Path(builder.cache_dir)
    prepared.rename(place)
    for file in place.glob(f"{builder.dataset_name}-*"):
        file.rename(place / file.name.replace(builder.dataset_name, "gsm8k", 1))
    rows = opened("openai/gsm8k", columns={"prompt": "question"}, split="test")
    assert [rows[row].text for row in range(len(rows))] == ["0+1?", "1+1?", "2+1?"]
    with pytest.raises(DataError) as error:
        opened("openai/gsm9k")
    assert "HF_HUB_OFFLINE is set" in message(error)
    assert "in the cache: openai/gsm8k" in message(error)


@pytest.mark.slow  # a stream of datasets imports torch
def test_a_stream_is_fetched_once_and_then_read_from_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def load(path: str, **options: Any) -> Any:
        asked.append((path, options["streaming"], options["revision"]))
        return gsm8k(50).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    for _ in range(2):
        rows = opened(
            "openai/gsm8k", streaming=True, limit=5, revision="v1", columns={"prompt": "question"}
        )
        assert [rows[row].text for row in range(len(rows))] == [f"{n}+1?" for n in range(5)]
    assert asked == [("openai/gsm8k", True, "v1")]


def test_a_missing_split_column_or_field_says_what_there_is(tmp_path: Path) -> None:
    folder = as_on_the_hub(tmp_path / "set")
    for path, there in ((folder, "test"), (splits(tmp_path / "saved"), "train, test")):
        with pytest.raises(DataError) as error:
            opened(path, split="validation")
        assert there in message(error), message(error)
    for wrong, says in {
        "columns": ({"prompt": "questions"}, "no column 'questions' (did you mean 'question'?)"),
        "template": ("{query}", "the template names 'query'"),
        "images": ("pictures", "no column 'pictures'"),
        "extract": ({"result": "gsm8k"}, "field 'result'"),
    }.items():
        config: dict[str, Any] = {"columns": {"prompt": "question"}, wrong: says[0]}
        with pytest.raises(DataError) as error:
            opened(folder, **config)
        assert says[1] in message(error)
        assert "answer" in message(error)  # of what there is
    with pytest.raises(DataError) as error:
        opened(folder)
    assert "nothing in the row is a prompt" in message(error)
    assert "it has: question, answer" in message(error)


#: Names of files that ``datasets`` would take for one split "train", beside one of another.
OF_SPLITS = {
    "sharded": ["train_sft-00000-of-00002", "train_sft-00001-of-00002", "train_gen-00000-of-00001"],
    "plain": ["train_sft", "train-gen", "test_sft"],
    "folders": ["train_sft/0000", "train_sft/0001", "train_gen/0000"],
    "deep": ["train_sft/en/0", "train_gen/en/0"],
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("names", OF_SPLITS.values(), ids=OF_SPLITS)
def test_splits_whose_names_begin_alike_are_never_mixed(
    names: list[str], suffix: str, tmp_path: Path
) -> None:
    folder = tmp_path / "test_of_training"  # words of splits, but not of these files
    for name in names:
        file = folder / f"{name}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = datasets.Dataset.from_list([{"prompt": name}])
        rows.to_json(str(file)) if suffix == ".jsonl" else rows.to_parquet(str(file))
    with pytest.raises(DataError, match="no split 'train'") as error:
        opened(folder)
    assert "there are: train_" in message(error) and "train_gen" in message(error)
    assert "set data.config.split" in message(error)
    of_sft = [name for name in names if "train_sft" in name]
    chosen = opened(folder, split="train_sft")
    assert [chosen[row].text for row in range(len(chosen))] == of_sft
    assert len(opened(folder, split="train_sft+train_gen[:1]")) == len(of_sft) + 1
    with pytest.raises(DataError, match="no split 'train_gem'.*did you mean 'train_gen'"):
        opened(folder, split="train_sft+train_gem")


def test_a_readme_says_which_files_are_a_split_whatever_their_names(tmp_path: Path) -> None:
    for name in ("train_sft", "train_gen"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    card = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: [train_gen.jsonl, train_sft.jsonl]}
---
"""
    (tmp_path / "README.md").write_text(card)
    assert len(opened(tmp_path)) == 2


def test_a_subset_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        opened(as_on_the_hub(tmp_path / "set"), subset="socratic")
    assert "socratic" in message(error) and "default" in message(error)


def test_a_template_is_filled_with_fields_and_never_read_again(tmp_path: Path) -> None:
    prompt = one(
        tmp_path,
        {"question": "{answer}?", "answer": "4", "meta": {"level": "2"}},
        columns={"level": "meta.level"},
        template="{question} (level {level}) {{}}",
        form="chat",
        system="Think.",
    )
    assert prompt.messages == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "{answer}? (level 2) {{}}"},
    ]
    assert prompt.fields["answer"] == "4"


USER = {"role": "user", "content": "1+1?"}
ASSISTANT = {"role": "assistant", "content": "2"}
SHAREGPT = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": [USER]}, [USER]),
        ({"messages": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ({"conversations": SHAREGPT}, [USER, ASSISTANT]),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, {**ASSISTANT, "content": "3"}]}, [USER]),
    ],
)
def test_chats_are_recognised(tmp_path: Path, row: dict[str, Any], expected: Any) -> None:
    assert one(tmp_path, row).messages == expected


def test_the_last_answer_of_a_chat_can_be_taken_off(tmp_path: Path) -> None:
    prompt = one(tmp_path, {"messages": [USER, ASSISTANT]}, last_answer="take")
    assert prompt.messages == [USER]
    assert prompt.fields == {"completion": "2"}


def test_a_last_answer_never_takes_the_place_of_a_column(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the place of the field 'completion'"):
        one(tmp_path, {"completion": "old", "messages": [USER, ASSISTANT]}, last_answer="take")


def test_the_system_turn_of_a_row_stays_alone(tmp_path: Path) -> None:
    for role in ("system", "developer"):
        own = {"role": role, "content": "Its own."}
        assert one(tmp_path, {"prompt": [own, USER]}, system="Think.").messages == [own, USER]
    assert one(tmp_path, {"prompt": [USER]}, system="Think.").messages == [
        {"role": "system", "content": "Think."},
        USER,
    ]


def test_preferences_without_a_prompt_are_split_where_they_part(tmp_path: Path) -> None:
    asked = "\n\nHuman: 1+1?\n\nAssistant:"
    both = {"chosen": f"{asked} 2", "rejected": f"{asked} 3"}
    prompt = one(tmp_path, both)
    assert prompt.text == asked
    assert prompt.fields == {"chosen": " 2", "rejected": " 3"}


def test_images_in_the_rows_become_files_with_the_same_content(tmp_path: Path) -> None:
    from PIL import Image

    picture = Image.new("RGB", (4, 4), (10, 200, 30))
    features = datasets.Features(
        {"problem": datasets.Value("string"), "images": datasets.List(datasets.Image())}
    )
    rows = datasets.Dataset.from_dict({"problem": ["?"], "images": [[picture]]}, features=features)
    rows.save_to_disk(str(tmp_path / "set"))
    found = opened(tmp_path / "set", columns={"prompt": "problem"}, images="images")
    (path,) = found[0].images
    assert found[0].images == [path]
    assert Image.open(path).getpixel((0, 0)) == (10, 200, 30)


def test_cells_of_a_csv_are_the_texts_that_stand_there(tmp_path: Path) -> None:
    text = 'prompt,answer,flag,none\nx,007,True,\ny,1e5,NA,"a,\nb"\n'
    (tmp_path / "rows.csv").write_text("\ufeff" + text, encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.csv").write_text(text, encoding="utf-8")
    for path in (tmp_path / "rows.csv", folder):
        rows = opened(path)
        assert [rows[row].fields for row in range(len(rows))] == [
            {"answer": "007", "flag": "True", "none": ""},
            {"answer": "1e5", "flag": "NA", "none": "a,\nb"},
        ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("2+3=,5,\n4+4=,8,\n", "line 2: has 3 cells, and the header has 2: 2+3=,5,"),
        ("What is 1,000+5?,1005\n2+2=,4\n", "line 2: has 3 cells"),
        ("1,000+5?,1005\n", "line 2: has 3 cells"),
        ("1,000+5?,1005\n1,000+6?,1006\n", "line 3: has 3 cells"),
        ('"a\nb",5\n\n1,000+5?,1005\n', "line 5: has 3 cells"),
        ("2+3=\n4+4=,8\n", "line 2: has 1 cells"),
        ("4+4=,8\n2+3=", "line 3: has 1 cells"),
        (r'"Say \"hi\", then 5",5', "line 2: not CSV"),
        ('x,1\n"5" pipe,5\n', "line 3: not CSV"),
        ('x,1\n"open,5\ny,2\n', "line 3: not CSV: unexpected end of data"),
    ],
)
def test_a_row_of_a_csv_that_does_not_fit_its_header_is_refused_with_its_line(
    tmp_path: Path, content: str, says: str
) -> None:
    (tmp_path / "rows.csv").write_text(f"prompt,answer\n{content}")
    with pytest.raises(DataError) as error:
        opened(tmp_path / "rows.csv")
    assert says in message(error)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("prompt,answer,answer\n2+3=,5,6\n", "line 1: two columns are named 'answer'"),
        ("prompt,answer,\n1,000+5?,1005\n", "line 2: a cell stands in a column without a name"),
    ],
)
def test_a_header_of_a_csv_that_names_no_column_for_each_cell_is_refused(
    tmp_path: Path, content: str, says: str
) -> None:
    (tmp_path / "rows.csv").write_text(content)
    with pytest.raises(DataError) as error:
        opened(tmp_path / "rows.csv")
    assert says in message(error)


@pytest.mark.parametrize(
    "content",
    [
        ",prompt,answer\n0,2+3=,5\n1,4+4=,8\n",
        '"","prompt","answer"\n"1","2+3=","5"\n"2","4+4=","8"\n',
        '"prompt","answer"\n"1","2+3=","5"\n"2","4+4=","8"\n',
        "prompt,answer\n0,2+3=,5\n1,4+4=,8\n",
        "prompt,answer,\n2+3=,5,\n4+4=,8,\n",
        "prompt,answer\r2+3=,5\r4+4=,8",
        "prompt,answer\r\n   \r\n2+3=,5\r\n\r\n4+4=,8\r\n",
    ],
)
def test_columns_of_a_csv_without_a_name_and_blank_lines_are_left_out(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "rows.csv").write_bytes(content.encode())
    rows = opened(tmp_path / "rows.csv")
    found = [(rows[row].text, rows[row].fields) for row in range(len(rows))]
    assert found == [("2+3=", {"answer": "5"}), ("4+4=", {"answer": "8"})]


def test_a_cell_of_a_csv_may_be_as_long_as_a_book(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"prompt,answer\n{'x' * 200_000},5\n")
    assert len(str(opened(tmp_path / "rows.csv")[0].text)) == 200_000


def test_files_of_csv_with_other_columns_than_the_first_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train-0.csv").write_text("prompt,answer\nx,1\n")
    (tmp_path / "train-1.csv").write_text("y,2\nz,3\n")
    with pytest.raises(DataError, match="train-1.csv: has the columns y, 2"):
        opened(tmp_path)


def test_values_of_json_are_what_the_file_says(tmp_path: Path) -> None:
    rows = [
        {"prompt": "x", "answer": 3, "day": "2020-01-05", "nested": {"day": "2020-01-05"}},
        {"prompt": "y", "answer": 3.5, "day": "2020-01-06"},
        {"prompt": "z", "answer": "007", "big": 12345678901234567890123},
    ]
    lines = "\n\n".join(map(json.dumps, rows))
    (tmp_path / "rows.jsonl").write_text("\ufeff" + lines, encoding="utf-8")
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, row in enumerate(rows):
        (folder / f"train-{number:05}-of-00003.jsonl").write_text(json.dumps(row))
    nothing = dict.fromkeys(("answer", "day", "nested", "big"))
    for path in (tmp_path / "rows.jsonl", tmp_path / "rows.json", folder):
        found = opened(path)
        values = [{"prompt": found[row].text, **found[row].fields} for row in range(len(found))]
        assert values == [{**nothing, **row} for row in rows]
        assert [type(value["answer"]) for value in values] == [int, float, str]


@pytest.mark.parametrize("as_list", [False, True])
def test_what_a_caller_changes_of_a_row_of_json_stays_with_the_caller(
    tmp_path: Path, as_list: bool
) -> None:
    row = {"messages": [{"role": "user", "content": "x"}], "tests": [{"in": "1"}]}
    (tmp_path / "rows.json").write_text(json.dumps([row] if as_list else row))
    rows = opened(tmp_path / "rows.json")
    rows[0].fields["tests"].pop()["in"] = "2"
    assert rows[0].messages is not None
    rows[0].messages.clear()
    assert (rows[0].messages, rows[0].fields) == (row["messages"], {"tests": row["tests"]})


def test_rows_of_json_are_chosen_as_those_of_other_formats(tmp_path: Path) -> None:
    for name, count in (("train-00000-of-00002", 3), ("train-00001-of-00002", 4), ("test", 2)):
        rows = [json.dumps({"prompt": f"{name[:7]}{row}"}) for row in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    for split, limit, expected in (
        ("train", None, ["train-00", "train-01", "train-02", "train-00", "train-01"]),
        ("train[2:5]", None, ["train-02", "train-00", "train-01"]),
        ("train[:50%]+test", None, ["train-00", "train-01", "train-02", "train-00", "test0"]),
        ("train", 2, ["train-00", "train-01"]),
    ):
        found = opened(tmp_path, split=split, limit=limit)
        texts = [found[row].text for row in range(len(found))]
        assert texts[: len(expected)] == expected
        assert limit is None or len(texts) == limit
    with pytest.raises(DataError, match="Unknown split"):
        opened(tmp_path, split="validation")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prompt": "x"}\n{"prompt"', "line 2: not JSON"),
        ('{"prompt": "x"}\n[1]', "line 2: expected an object"),
        ("[1, 2]", "row 0: expected an object"),
        ('[{"prompt": "x"}, {"prompt": "a", "b": 1, "b": 2}]', "row 1 has the key 'b' twice"),
        ('{"prompt": "x"}\n{"prompt": "a", "b": {"c": 1, "c": 2}}', "row 1 has the key 'c' twice"),
        ("[", "not JSON"),
        ("", "the file holds no rows"),
    ],
)
def test_a_file_that_is_no_rows_of_json_is_refused_with_its_line(
    tmp_path: Path, content: str, says: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError) as error:
        opened(tmp_path / "rows.jsonl")
    assert says in message(error)


def test_texts_of_json_that_datasets_takes_for_times_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A data set by its name is read by ``datasets`` alone, which keeps no text of them."""
    day = datetime.datetime(2020, 1, 5)
    found = datasets.Dataset.from_list([{"prompt": "x", "answer": {"day": day}}])
    found.info.builder_name = "json"
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    with pytest.raises(DataError, match="'answer' has texts that look like times"):
        opened("org/name")


def test_a_template_takes_numbers_as_json_and_refuses_null(tmp_path: Path) -> None:
    row = {"n": 3, "share": 0.5, "flag": True, "choices": ["a", "b"], "none": None}
    template = "{n} {share} {flag} {choices}"
    assert one(tmp_path, row, template=template).text == '3 0.5 true ["a","b"]'
    with pytest.raises(DataError, match="'none', which is null"):
        one(tmp_path, row, template="{none}")


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ("gsm8k", "so 5\n#### 1,234", "1234"),
        ("gsm8k", "no mark 5", None),
        ("boxed", r"\boxed{1} then \boxed{\frac{1}{2}} ok", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", None),
        ("boxed", r"\boxed{}", None),
        ("boxed", r"\boxed{\boxed{5}}", "5"),
        ("gsm8k", "#### 1,5", "1,5"),
        ("gsm8k", "#### $1,234", "1234"),
        ("gsm8k", "#### yes", "yes"),
        ("number", "The answer is 1/2", "1/2"),
        ("number", "so it is \u22125", "-5"),
        ("number", r"it is $\frac{1}{2}$", r"\frac{1}{2}"),
        ("number", "It is 50%", "50%"),
        ("number", "It is 1,234.", "1234"),
        ("number", "It is .5", ".5"),
        ("number", "It is 2 1/2 hours", "2 1/2"),
        ("number", "1.5 million", None),
        ("number", "sqrt(16)", None),
        ("number", "1,5", None),
        ("number", "10-12", None),
        ("number", "3 and 4", None),
        ("number", "it was 3, now \u0665", None),
        ("number", "2, then -3.50.", "-3.50"),
        ("The answer is {answer}.", "The answer is 1. No. The answer is 42. Yes.", "42"),
        ("The answer is {answer}.", "The answer is 3.5.", "3.5"),
        ("The answer is {answer}.", "The answer is $1.50. Yes.", "$1.50"),
        ("The answer is {answer}.", "The answer is 5.\n6 is none.", "5"),
        ("The answer is {answer}.", "The answer is Paris.\nYes.", "Paris"),
        ("The answer is {answer}.", "The answer is node.js.", "node.js"),
        ("The answer is {answer}.", "The answer is St. Louis.", None),
        ("The answer is {answer}.", "The answer is Paris. Yes.", None),
        ("Answer: {answer},", "Answer: 1,234, I think", "1,234"),
        ("At {answer}: ", "At 4:30: go", "4:30"),
        ("<a>{answer}</a>", "<a>5</a>6</a>", "5"),
        ("Answer: {answer}", "Answer: 42 ", "42"),
        ("{answer} (end)", "42 (end)", "42"),
        ("Answer: {answer}", "nothing", None),
    ],
)
def test_an_answer_is_found_by_its_rule(rule: str, text: str, answer: str | None) -> None:
    assert extracted(rule, text) == answer


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"limit": 0}, "limit"),
        ({"streaming": True}, "streaming"),
        ({"extract": {"answer": "gsm9k"}}, "extract.answer"),
        ({"extract": {"answer": "{answer}"}}, "extract.answer"),
        ({"system": "x", "form": "text"}, "system"),
    ],
)
def test_wrong_settings_are_refused(config: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as error:
        HubConfig(path="openai/gsm8k", **config)
    assert where in message(error)


def test_what_means_the_hub_is_refused_for_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="revision means the hub"):
        opened(saved(tmp_path / "set"), revision="main")


def test_values_of_rows_are_those_of_the_columns_and_no_texts_of_them(tmp_path: Path) -> None:
    """As ``data/parquet`` gives them: a reward can tell a time or a decimal from a text."""
    import datetime
    import decimal

    values = {
        "when": datetime.datetime(2024, 1, 2),
        "day": datetime.date(2024, 1, 2),
        "price": decimal.Decimal("1.50"),
        "raw": b"2",
        "nested": [{"raw": b"3"}],
    }
    assert one(tmp_path, {"prompt": "?", **values}).fields == values


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_one_local_file_is_opened_without_the_library_datasets(name: str, tmp_path: Path) -> None:
    """It takes most of a second to import, and a check opens the rows each time."""
    content = {"rows.csv": "prompt\n1+1?\n", "rows.json": '[{"prompt": "1+1?"}]'}
    (tmp_path / name).write_text(content.get(name, '{"prompt": "1+1?"}\n'))
    code = (
        "import sys\nfrom gcore_data.config import HubConfig\nfrom gcore_data.hub import Hub\n"
        f"rows = Hub(HubConfig(path={str(tmp_path / name)!r}))\n"
        "print(len(rows), rows[0].text, 'datasets' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1+1?", "False"], done.stderr
