"""What both sides of episode_rivals.py share: the texts of an episode, and a clock.

It needs the standard library alone, since others' interpreters run it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: The variable with the number of the file for answers.
ANSWERS = "G_CORE_ANSWERS"
EPISODES = 16
TURNS = 30
ASKED = "Guess a number between 1 and 20."
#: What the policy says in each turn of a conversation with a user.
SAID = "[5]"
#: What it says last in one with a tool.
LAST = "I give up."


def told(turn: int) -> str:
    """Returns what the policy is told behind this turn; the first is 1."""
    return f"It is not that. {TURNS - turn} guesses are left, so guess again."


def called(turn: int) -> str:
    """Returns what the policy says in this turn of a conversation with a tool."""
    if turn == TURNS:
        return LAST
    call = {"name": "guess", "arguments": {"number": turn}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def cpu_s() -> float:
    """Returns the processor seconds of this process and of all that it has started."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = sum(time.clock_gettime(_clock_of(pid)) for pid in _below(os.getpid()))
    return time.process_time() + running + ended.ru_utime + ended.ru_stime


def _clock_of(pid: int) -> int:
    """Returns the number of the clock that counts a process's time, as Linux makes it."""
    return ~pid << 3 | 2


def _below(pid: int) -> Iterator[int]:
    """Yields the processes that a process has started, and those that these have."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            yield child
            yield from _below(child)


def serve(play: Callable[[], dict[str, Any]]) -> None:
    """Plays a round for each line of the standard input, and writes what it was as a line of JSON.

    It writes into the file whose number is the variable ``ANSWERS``, since libraries print.
    """
    with os.fdopen(int(os.environ[ANSWERS]), "w") as answers:
        print(json.dumps("ready"), file=answers, flush=True)
        for _ in sys.stdin:
            print(json.dumps(play()), file=answers, flush=True)
