"""Which rows of a dataset are looked at before a run, and as what."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

from gcore_language.rows import longest_rows, rows_of_each_form

from gcore_core.contract.records import Prompt


class Rows:
    """A dataset that counts what is read of it."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, row: int) -> Prompt:
        self.read.append(row)
        return self.prompts[row]


def text(row: int, value: str = "a", **fields: Any) -> Prompt:
    return Prompt(row=row, text=value, fields=fields)


def chat(row: int, roles: str, content: Any = "a", **more: Any) -> Prompt:
    names = {"s": "system", "u": "user", "a": "assistant"}
    return Prompt(row=row, messages=[{"role": names[r], "content": content, **more} for r in roles])


def forms(*prompts: Prompt) -> list[int]:
    return [row["row"] for row in rows_of_each_form(Rows(prompts))]


def test_one_row_stands_for_all_of_its_form() -> None:
    assert forms(text(0), text(1, "b"), text(2, ""), text(3, "c")) == [0, 2]
    assert forms(text(0, answer="a"), text(1, answer="b"), text(2, answer=1), text(3)) == [0, 2, 3]
    assert forms(text(0), chat(1, "u"), Prompt(row=2, text="a", images=["/a.png"])) == [0, 1, 2]


def test_longer_chats_in_turns_have_one_form_and_other_orders_have_others() -> None:
    assert forms(chat(0, "uau"), chat(1, "uauau"), chat(2, "uauauau")) == [0]
    assert forms(chat(0, "u"), chat(1, "su"), chat(2, "us"), chat(3, "uu"), chat(4, "ua")) == [
        *range(5)
    ]
    assert forms(chat(0, "uau"), chat(1, "uaua")) == [0, 1]  # the second ends with an answer


def test_kinds_of_content_and_further_keys_of_turns_make_forms() -> None:
    contents = ["a", "", None, [], [{"type": "text", "text": "a"}], [{"type": "image"}], ["a"], 3]
    assert forms(*(chat(row, "u", content) for row, content in enumerate(contents))) == [*range(8)]
    assert forms(chat(0, "u"), chat(1, "u", tool_calls=[]), chat(2, "u", name="b")) == [0, 1, 2]
    parts = [[{"type": "text", "text": word}] * count for word, count in (("a", 1), ("b", 3))]
    assert forms(chat(0, "u", parts[0]), chat(1, "u", parts[1])) == [0]


def test_few_rows_of_many_are_read_from_the_first_to_the_last() -> None:
    rows = Rows([text(row, **({"odd": 1} if row == 99_999 else {})) for row in range(100_000)])
    assert [row["row"] for row in rows_of_each_form(rows)] == [0, 99_999]
    assert len(rows.read) == 2_000
    many = Rows([text(row, **{f"field{row}": 1}) for row in range(1_000)])
    assert len(rows_of_each_form(many, most=5)) == 5


def test_the_longest_prompts_come_first_and_short_ones_not_at_all() -> None:
    lengths = [3, 9, 1, 9, 20, 4]
    rows = Rows([text(row, "a" * length) for row, length in enumerate(lengths)])
    assert [row["row"] for row in longest_rows(rows, over_bytes=3)] == [4, 1, 3, 5]
    assert [row["row"] for row in longest_rows(rows, over_bytes=3, most=2)] == [4, 1]
    assert longest_rows(rows, over_bytes=20) == []
    assert [row["row"] for row in longest_rows(rows, over_bytes=20, least=2)] == [4, 1]


def test_bytes_of_all_turns_and_text_parts_count() -> None:
    parts = [{"type": "text", "text": "ä"}, {"type": "image"}, {"type": "text", "text": None}]
    rows = Rows([chat(0, "uu", "ä"), chat(1, "u", parts), chat(2, "u", None), text(3, "a\ud800")])
    found = longest_rows(rows, over_bytes=0)
    assert [row["row"] for row in found] == [0, 1, 3]
    assert [row["row"] for row in longest_rows(rows, over_bytes=2)] == [0]


def test_rows_are_plain_json_and_say_which_fields_are_not() -> None:
    fields = {"a": [1, None, {"b": 0.5}], "raw": b"\x00", "day": datetime.date(2026, 1, 2)}
    prompt = Prompt(row=7, text="ask", images=["/a.png"], fields=fields)
    odd = Prompt(row=8, messages=[{"role": "user", "content": b"\x00"}])
    one, two = rows_of_each_form(Rows([prompt, odd]))
    assert json.loads(json.dumps(one)) == one
    assert one == {
        "row": 7,
        "text": "ask",
        "images": ["/a.png"],
        "fields": {"a": [1, None, {"b": 0.5}]},
        "not_json": ["day", "raw"],
    }
    assert two["messages"] == [{"role": "user", "content": "b'\\x00'"}]
