from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from omegaconf import OmegaConf

from gcore_core.builtin.config import JsonLinesConfig
from gcore_core.builtin.json_lines import JsonLines
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import ConfigError, DataError, GcoreError
from gcore_core.contract.rows import same_value

CHAT = [{"role": "user", "content": "1+1="}]
Write = Callable[[str | bytes], Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("G_CORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "index"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str | bytes) -> Path:
        file = tmp_path / "rows.jsonl"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return _write


def opened(file: Path, **config: Any) -> JsonLines:
    return JsonLines(JsonLinesConfig(path=str(file), **config))


def message(error: pytest.ExceptionInfo[GcoreError]) -> str:
    text = str(error.value)
    assert len(text.splitlines()) <= 6
    return text


def test_rows_are_prompts_with_their_other_fields(write: Write) -> None:
    rows = opened(write('{"prompt": "1+1=", "answer": "2", "n": 3}\n{"prompt": "é"}\n'))
    assert isinstance(rows, Dataset)
    assert len(rows) == 2
    assert rows[0].text == "1+1=" and rows[0].messages is None and rows[0].row == 0
    assert rows[0].fields == {"answer": "2", "n": 3}
    assert rows[1].text == "é"


def test_messages_are_taken_from_the_named_field(write: Write) -> None:
    row = opened(write(json.dumps({"chat": CHAT, "prompt": "p"})), messages="chat")[0]
    assert row.messages == CHAT and row.text is None and row.fields == {"prompt": "p"}


@pytest.mark.parametrize("end", ["", "\n", "\n\n  \n", "\r\n"])
def test_blank_lines_and_the_last_newline_do_not_count(write: Write, end: str) -> None:
    rows = opened(write('\n{"prompt": "a"}\n \t\n{"prompt": "b"}\r\n{"prompt": "c"}' + end))
    assert [row.text for row in rows] == ["a", "b", "c"]


def test_a_byte_order_mark_is_skipped(write: Write) -> None:
    rows = opened(write(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n'))
    assert [row.text for row in rows] == ["a", "b"]


def test_limit_takes_the_first_rows_and_validates_no_others(write: Write) -> None:
    file = write('{"prompt": "a"}\n{"prompt": "b"}\nbroken\n')
    assert [row.text for row in opened(file, limit=2)] == ["a", "b"]
    with pytest.raises(DataError):
        opened(file)


def test_a_row_outside_is_an_index_error(write: Write) -> None:
    rows = opened(write('{"prompt": "a"}'))
    for row in (-1, 1):
        with pytest.raises(IndexError):
            rows[row]


def test_malformed_json_is_named_by_file_and_line(write: Write) -> None:
    file = write('{"prompt": "a"}\n\n{"prompt": "b" "answer": 1, "more": "' + "x" * 200 + '"}\n')
    with pytest.raises(DataError) as error:
        opened(file)
    text = message(error)
    assert text.startswith(f'{file}, line 3: not JSON: {{"prompt": "b" "answer": 1')
    assert "x" * 50 not in text and "..." in text
    assert "byte 15" in text


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"prompt": "a", "answer": 1, "answer": 2}', "answer"),
        ('{"prompt": "a", "prompt": "a"}', "prompt"),
        ('{"prompt": "a", "answ\\u0065r": 1, "answer": 2}', "answer"),
        ('{"prompt": "a", "meta": [{"x": {"k": 1, "k": 1}}]}', "k"),
        ('{"prompt": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
        ('{"prompt": [{"role": "user", "role": "system", "content": "a"}]}', "role"),
    ],
)
def test_a_key_that_stands_twice_in_a_row_is_refused_with_the_row(
    write: Write, line: str, key: str
) -> None:
    file = write(f'{{"prompt": "b"}}\n\n{line}\n')
    with pytest.raises(DataError) as caught:
        JsonLines(JsonLinesConfig(path=str(file)))
    assert f"row 1 has the key {key!r} twice" in str(caught.value)
    assert f"{file}, line 3" in str(caught.value)


def test_keys_that_objects_of_one_row_share_are_fine(write: Write) -> None:
    file = write(f'{{"prompt": "a", "x": {{"prompt": "b"}}, "n": {"9" * 30}.5, "y": "k: {{k"}}\n')
    assert len(JsonLines(JsonLinesConfig(path=str(file)))) == 1


def test_bytes_that_are_not_utf8_are_named_by_line(write: Write) -> None:
    with pytest.raises(DataError, match="line 1: not JSON"):
        opened(write(b'{"prompt": "\xe9"}'))


def test_a_line_that_is_no_object_is_refused(write: Write) -> None:
    with pytest.raises(DataError, match=r"line 2: expected an object, found \[1,2\]"):
        opened(write('{"prompt": "a"}\n[1, 2]\n'))


def test_error_for_a_missing_prompt_lists_existing_fields(write: Write) -> None:
    with pytest.raises(DataError) as error:
        opened(write('{"prompt": "a"}\n{"promt": "b", "answer": 1}\n'))
    text = message(error)
    assert "line 2: no field 'prompt' (did you mean 'promt'?)" in text
    assert "it has: promt, answer" in text
    assert "data.config.prompt" in text


def test_a_prompt_that_is_a_list_is_a_chat(write: Write) -> None:
    rows = opened(write(json.dumps({"prompt": CHAT}) + "\n" + json.dumps({"prompt": "a"})))
    chat, text = rows[0], rows[1]
    assert chat.messages == CHAT and chat.text is None
    assert text.messages is None and text.text == "a"


@pytest.mark.parametrize("value", ["text", [], [{"content": "x"}], [1]])
def test_messages_of_another_form_are_refused(write: Write, value: Any) -> None:
    with pytest.raises(DataError, match="not a list of chat messages"):
        opened(write(json.dumps({"messages": value})), messages="messages")
    if isinstance(value, list):
        with pytest.raises(DataError, match="not a list of chat messages"):
            opened(write(json.dumps({"prompt": value})))


def test_a_prompt_that_is_a_number_is_refused(write: Write) -> None:
    with pytest.raises(DataError, match="line 1: field 'prompt' is 3, neither a text"):
        opened(write('{"prompt": 3}'))


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(write: Write, cache: Path, text: str) -> None:
    with pytest.raises(DataError, match="the file holds no rows"):
        opened(write(text))
    assert not list(cache.iterdir())  # nothing half-made stays behind


def test_a_missing_file_suggests_its_neighbour(write: Write, tmp_path: Path) -> None:
    write("{}")
    with pytest.raises(
        DataError, match=r"row\.jsonl: no such file \(did you mean 'rows.jsonl'\?\)"
    ):
        opened(tmp_path / "row.jsonl")
    with pytest.raises(DataError, match=r"data files in .*: rows.jsonl"):
        opened(tmp_path / "something.else")
    with pytest.raises(DataError, match="there is no directory"):
        opened(tmp_path / "nowhere" / "rows.jsonl")


def test_a_directory_is_refused(write: Write, tmp_path: Path) -> None:
    write("{}")
    with pytest.raises(DataError, match=r"is a directory[^$]*rows.jsonl"):
        opened(tmp_path)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="limit: must be at least 1, is 0"):
        JsonLinesConfig(path="x", limit=0)


def test_the_index_is_made_once_for_the_same_content(write: Write, cache: Path) -> None:
    file = write('{"prompt": "a"}\n')
    opened(file)
    (index,) = cache.iterdir()
    made = index.stat().st_mtime_ns
    opened(file)
    assert index.stat().st_mtime_ns == made
    write('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert len(opened(file)) == 2
    assert len(list(cache.iterdir())) == 2


def test_other_fields_are_validated_anew(write: Write) -> None:
    file = write('{"prompt": "a"}\n')
    opened(file)
    with pytest.raises(DataError, match="no field 'question'"):
        opened(file, prompt="question")


def test_the_index_is_written_where_the_config_says(
    write: Write, tmp_path: Path, cache: Path
) -> None:
    opened(write('{"prompt": "a"}\n'), index_dir=str(tmp_path / "here"))
    assert len(list((tmp_path / "here").iterdir())) == 1
    assert not cache.exists()


def test_an_index_that_cannot_be_written_says_what_to_set(write: Write, tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(ConfigError) as error:
        opened(write('{"prompt": "a"}\n'), index_dir=str(tmp_path / "a_file"))
    assert "data.config.index_dir or $G_CORE_CACHE" in message(error)


def test_a_disk_that_is_full_of_an_index_says_what_to_set(
    write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device") as error:
        opened(write('{"prompt": "a"}\n'))
    assert "data.config.index_dir or $G_CORE_CACHE" in message(error)
    assert not list(cache.iterdir())


def test_writing_into_a_file_in_use_is_detected(write: Write) -> None:
    file = write('{"prompt": "aaaa"}\n')
    rows = opened(file)
    file.write_text('{"prompt" "aaaa"}\n\n')
    with pytest.raises(DataError, match="row 0 is no longer what it was"):
        rows[0]


def test_processes_that_index_at_once_all_get_the_rows(write: Write, cache: Path) -> None:
    file = write("".join(f'{{"prompt": "{number}"}}\n' for number in range(20_000)))
    code = (
        "import sys; from gcore_core.builtin.config import JsonLinesConfig; from "
        "gcore_core.builtin.json_lines import JsonLines\n"
        "rows = JsonLines(JsonLinesConfig(path=sys.argv[1])); print(len(rows), rows[19_999].text)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, file], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    assert [child.communicate()[0].split() for child in children] == [[b"20000", b"19999"]] * 3
    assert len(list(cache.iterdir())) == 1


def test_a_million_rows_do_not_grow_the_process(write: Write) -> None:
    file = write('{"prompt": "1+1="}\n' * 1_000_000)
    code = (
        "import os, sys\n"
        "from gcore_core.builtin.config import JsonLinesConfig; "
        "from gcore_core.builtin.json_lines import JsonLines\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * "
        "os.sysconf('SC_PAGE_SIZE')\n"
        "before = resident(); rows = JsonLines(JsonLinesConfig(path=sys.argv[1]))\n"
        "assert all(rows[row].row == row for row in range(0, len(rows), 101))\n"
        "print(len(rows), resident() - before)"
    )
    rows, grown = map(
        int, subprocess.run([sys.executable, "-c", code, file], capture_output=True).stdout.split()
    )
    assert rows == 1_000_000
    assert grown < 5 * 2**20


def test_the_config_comes_from_yaml_and_from_the_wire() -> None:
    tree = OmegaConf.merge(OmegaConf.structured(JsonLinesConfig), {"path": "x", "limit": 3})
    plain = OmegaConf.to_container(tree)
    assert msgspec.convert(plain, JsonLinesConfig) == JsonLinesConfig(path="x", limit=3)


def test_json_lines_need_no_pyarrow() -> None:
    code = (
        "import sys, gcore_core.builtin.json_lines, gcore_core.builtin.function_reward; "
        "print({'pyarrow', 'torch'} & "
        "set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stdout == b"set()\n"


@pytest.mark.parametrize(
    ("value", "other", "same"),
    [
        (3, 3.0, True),
        (3, "3", True),
        (3.0, "3", True),
        (7, "007", False),
        (1e-07, "0.0000001", True),
        ("3", "3.0", False),
        (True, 1, False),
        (True, "true", True),
        (False, "False", True),
        (None, "null", True),
        (None, "", False),
        ([1, 2.0], [1.0, 2], True),
        ([1], "[1]", True),
        ([True], [1], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1}, {"b": 1}, False),
        (float("nan"), "NaN", False),
        (5, "[" * 1000, False),
    ],
)
def test_values_of_rows_are_the_same_as_json_says_it(value: Any, other: Any, same: bool) -> None:
    assert same_value(value, other) is same
    assert same_value(other, value) is same
