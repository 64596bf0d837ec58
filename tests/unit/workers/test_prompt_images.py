"""Rows that name images: what a prompt holds of them, and what is told when they are wrong or
nobody takes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gcore_core.builtin.config import JsonLinesConfig
from gcore_core.builtin.json_lines import JsonLines
from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError, DataError

CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+"}]}]
JOB = {
    "run": {"name": "job"},
    "data": {"use": "core/jsonl", "config": {"path": "rows.jsonl", "images": "pictures"}},
    "advantage": {"use": "fake"},
    "objective": {"use": "fake"},
    "roles": {"policy": {"use": "fake"}, "rollout": {"use": "fake"}},
    "rewards": {"letters": {"use": "fake"}},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G_CORE_CACHE", str(tmp_path / "cache"))


def opened(directory: Path, row: dict[str, Any], **settings: Any) -> JsonLines:
    (directory / "rows.jsonl").write_text(json.dumps(row))
    (directory / "a.png").touch()
    return JsonLines(JsonLinesConfig(path=str(directory / "rows.jsonl"), **settings))


def test_paths_are_relative_to_the_data_and_leave_the_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = str(tmp_path / "a.png")
    rows = opened(
        Path(), {"prompt": "?", "pictures": ["a.png", other], "answer": 1}, images="pictures"
    )
    assert rows[0].images == [other, other]
    assert rows[0].fields == {"answer": 1}


def test_a_row_may_name_no_images(tmp_path: Path) -> None:
    assert opened(tmp_path, {"prompt": "?"}, images="pictures")[0].images == []
    assert opened(tmp_path, {"prompt": "?", "pictures": None}, images="pictures")[0].images == []


def test_the_image_field_is_an_ordinary_field_until_it_is_configured(tmp_path: Path) -> None:
    row = opened(tmp_path, {"prompt": "?", "images": ["gone.png"]})[0]
    assert row.images == [] and row.fields == {"images": ["gone.png"]}


def test_a_missing_image_is_reported_with_row_and_path_when_the_data_is_opened(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError) as told:
        opened(tmp_path, {"prompt": "?", "pictures": ["a.png", "gone.png"]}, images="pictures")
    assert str(told.value) == (
        f"{tmp_path}/rows.jsonl, line 1: row 0 names an image that is not there: "
        f"{tmp_path}/gone.png\n"
        "  paths are relative to the directory of the data"
    )


@pytest.mark.parametrize("value", ["a.png", [1], {"a": 1}])
def test_an_image_field_that_is_no_list_of_paths_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: field 'pictures' is .*, not a list of paths"):
        opened(tmp_path, {"prompt": "?", "pictures": value}, images="pictures")


def test_a_chat_must_have_as_many_image_parts_as_images(tmp_path: Path) -> None:
    row = {"chat": CHAT, "pictures": ["a.png"]}
    assert opened(tmp_path, row, messages="chat", images="pictures")[0].images == [
        str(tmp_path / "a.png")
    ]
    with pytest.raises(
        DataError, match="'chat' has 1 parts of type image, and the row names 2 images"
    ):
        opened(
            tmp_path, {"chat": CHAT, "pictures": ["a.png"] * 2}, messages="chat", images="pictures"
        )
    with pytest.raises(
        DataError, match="set data.config.images to the field that holds their paths"
    ):
        opened(tmp_path, {"chat": CHAT}, messages="chat")


def test_a_policy_that_takes_no_images_is_refused_before_anything_starts(tmp_path: Path) -> None:
    from gcore_testing import fake

    opened(tmp_path, {"prompt": "?", "pictures": ["a.png"]})
    (tmp_path / "job.yaml").write_text(json.dumps(JOB | {"local": [fake.__file__]}))
    with pytest.raises(ConfigError) as told:
        load_plan(tmp_path / "job.yaml", [])
    for role in ("rollout", "policy"):
        assert (
            f"data: its prompts have images, and fake, which roles.{role} uses, takes no images"
            in str(told.value)
        )


SHOWS = '''
"""A reward that shows images to the role that it asks."""
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits


@dataclass(frozen=True, kw_only=True)
class Config:
    def traits(self) -> Traits:
        return Traits(shows_images=True)


@hookimpl
def gcore_rewards():
    yield p.RewardProvider(summary="-", factory="shows:Shows", config=Config, asks=True)
'''


def test_a_reward_that_shows_images_to_a_text_model_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    from gcore_testing import fake

    opened(tmp_path, {"prompt": "?"})
    (tmp_path / "shows.py").write_text(SHOWS)
    roles = {**JOB["roles"], "judge": {"use": "fake"}}
    job = JOB | {"roles": roles, "rewards": {"looks": {"use": "shows", "role": "judge"}}}
    job |= {
        "data": {"use": "core/jsonl", "config": {"path": "rows.jsonl"}},
        "local": [fake.__file__, "shows.py"],
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    with pytest.raises(ConfigError) as told:
        load_plan(tmp_path / "job.yaml", [])
    said = (
        "rewards.looks: its prompts have images, and fake, which roles.judge uses, takes no images"
    )
    assert said in str(told.value)
