"""Prints what the rule ``number`` finds in a text beside what is right; None: no plain number."""

import json
from pathlib import Path

from gcore_data.extraction import extracted

for line in Path(__file__).with_name("cases.jsonl").read_text(encoding="utf-8").splitlines():
    case = json.loads(line)
    found = extracted("number", case["text"])
    print("ok " if found == case["right"] else "BAD", repr(case["text"]), repr(found))
