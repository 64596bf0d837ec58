"""docs/how-to/first-environment.md does what it says, and its environments run in hosts."""

from __future__ import annotations

import importlib
import queue
from pathlib import Path
from typing import Any

import pytest

from tests.support import pages

PAGE = pages.REPOSITORY / "docs/how-to/first-environment.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_followed_gives_the_outputs_that_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("gcore_environments")
    (command,) = pages.follow(TEXT, tmp_path, pages.shell_environment())
    assert pages.same(command.printed) == pages.same(command.shown)


def test_the_first_environment_has_twelve_lines() -> None:
    first = next(block for block in pages.blocks(TEXT) if block.file)
    assert first.file == "calculator.py"
    assert len(first.text.splitlines()) == 12


def test_an_environment_of_the_page_plays_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The second one, of no file: it guesses until it has found the number."""
    hosts_module: Any = importlib.import_module("gcore_environments.hosts")
    (block,) = [one for one in pages.blocks(TEXT) if "class Guessing" in one.text]
    (tmp_path / "guessing.py").write_text(block.text, encoding="utf-8")
    settings = hosts_module.HostSettings(environment=f"{tmp_path}/guessing.py:Guessing")
    hosts = hosts_module.Hosts(settings)

    def hear() -> dict[str, Any]:
        _, message = hosts.replies.get(timeout=60)
        return dict(message)

    try:
        assert hear()["ready"]
        host = hosts.of((1, 0))
        host.send(op="open", id=[1, 0], seed=3, row={"prompt": ""}, endpoint={})
        assert "Guess my number" in hear()["messages"][0]["content"]
        low, high = 1, 20
        for turn in range(1, 7):
            guess = (low + high) // 2
            host.send(op="step", id=[1, 0], turn=turn, text=str(guess), calls=[])
            said = hear()
            if said["done"]:
                break
            if "lower" in said["messages"][0]["content"]:
                high = guess - 1
            else:
                low = guess + 1
        assert said["rewards"] == {"found": 1.0}
        assert pytest.raises(queue.Empty, hosts.replies.get_nowait)
    finally:
        hosts.close()
