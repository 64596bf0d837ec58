"""Gathers evaluated answers, to be searched and compared between steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gcore_core.contract import run_files
from gcore_report.page import limits
from gcore_report.page.runs import Run

RULE = (
    "All answers of the first and of the last evaluation come first, then those in between, from "
    f"the middle outwards, until there are {limits.ANSWERS:,} answers or "
    f"{limits.ANSWER_CHARACTERS // 1_000_000} million characters. A text is cut after "
    f"{limits.TEXT_CHARACTERS:,} characters. g-core watch RUN shows the rest, whole."
)


def answers(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the answers that the page shows, and the rule by which they were chosen.

    rows: each [run, step, mode, prompt, text, rewards, status]; ``prompts`` and ``texts`` hold the
        texts, and a row their numbers, since a prompt is asked again at each evaluation.
    shown, total: how many answers are here, and how many the runs have.
    """
    texts: dict[str, int] = {}
    rows: list[list[Any]] = []
    total = 0
    share = max(1, len(runs))
    for number, run in enumerate(runs):
        characters = 0
        count = 0
        for step in halving(run.sampled_steps()):
            for row in run_files.read_samples(run.directory, step):
                total += 1
                prompt = plain(row.get("prompt", ""))
                text = plain(row.get("text", ""))
                characters += len(text) + (0 if prompt in texts else len(prompt))
                count += 1
                is_full = count > limits.ANSWERS / share
                if is_full or characters > limits.ANSWER_CHARACTERS / share:
                    continue
                rows.append(
                    [
                        number,
                        step,
                        row.get("mode", ""),
                        texts.setdefault(prompt, len(texts)),
                        texts.setdefault(text, len(texts)),
                        row.get("rewards", {}),
                        row.get("status", ""),
                    ]
                )
    rows.sort(key=lambda row: (row[0], row[1]))
    return {"rows": rows, "texts": list(texts), "shown": len(rows), "total": total, "rule": RULE}


def halving(steps: Sequence[int]) -> Iterator[int]:
    """Yields the first and the last step, then what lies in the middle of what is left.

    So however early somebody stops, what was yielded is spread over the whole run.
    """
    if not steps:
        return
    yield steps[0]
    if len(steps) > 1:
        yield steps[-1]
    spans = [(0, len(steps) - 1)]
    while spans:
        first, last = spans.pop(0)
        if last - first < 2:
            continue
        middle = (first + last) // 2
        yield steps[middle]
        spans += [(first, middle), (middle, last)]


def plain(prompt: Any) -> str:
    """Returns a prompt or a text as one text, cut where it is too long for the page."""
    text = whole(prompt)
    if len(text) > limits.TEXT_CHARACTERS:
        return f"{text[: limits.TEXT_CHARACTERS]} [...]"
    return text


def whole(prompt: Any) -> str:
    """Returns a prompt or a text as one text; a chat has the role before each turn."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(turn, dict) for turn in prompt):
        turns = [f"[{turn.get('role', '')}] {_content(turn.get('content', ''))}" for turn in prompt]
        return "\n".join(turns)
    return json.dumps(prompt, ensure_ascii=False)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    parts = [part if isinstance(part, dict) else {"text": str(part)} for part in content]
    return " ".join(str(part.get("text", f"<{part.get('type', '?')}>")) for part in parts)
