"""What the tasks of this folder share: topics, and how their rows are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TRAINED = (
    "the sea;a mountain;bread;winter;a bicycle;the moon;a library;coffee;rain;a train;the desert;"
    "a cat;a farmer;the city;a garden;music;a bridge;the stars;a doctor;chess;a river;the market;"
    "an island;snow;a teacher;apples;a lighthouse;the forest;a clock;tea;a ship;the wind;football;"
    "a painter;honey;a castle;the sun;a dog;a letter;fire;a kitchen;the night;a horse;paper;"
    "an airport;a storm;the beach;a baker"
)
_KEPT_BACK = (
    "books;a museum;friendship;the spring;a farm;glass;a robot;the harbour;a violin;salt;a village;"
    "summer"
)
TOPICS = _TRAINED.split(";")
#: No row that is trained on has one of these.
HELD_OUT = _KEPT_BACK.split(";")

Row = dict[str, Any]


def asked(text: str) -> list[dict[str, str]]:
    """Returns a chat in which a person says a text."""
    return [{"role": "user", "content": text}]


def write(task: str, train: list[Row], heldout: list[Row]) -> None:
    """Writes the rows of a task as TASK_train.jsonl and TASK_heldout.jsonl, next to this file."""
    for name, rows in (("train", train), ("heldout", heldout)):
        file = Path(__file__).parent / f"{task}_{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
