"""The page in a real browser: keys, undo, and an answer that tries to be a script."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gcore_rewards.human.queue import Question, Questions
from selenium.webdriver import Chrome
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from tests.support.chromium import browser

__all__ = ["browser"]

WAIT_S = 30
EVIL = "<script>document.title='owned'</script>"


@pytest.fixture
def open_page() -> Iterator[Callable[..., str]]:
    """Starts a command of the plugin, and gives the address that it prints."""
    processes: list[subprocess.Popen[str]] = []

    def start(*words: str) -> str:
        command = [sys.executable, "-m", "gcore_core", "human", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return next(line.split()[1] for line in process.stdout if line.startswith("open "))

    yield start
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ask(browser: Chrome, script: str) -> Any:
    return browser.execute_script(f"return {script}")


def wait_until(browser: Chrome, script: str) -> None:
    WebDriverWait(browser, WAIT_S).until(lambda opened: ask(opened, script), script)


def press(browser: Chrome, key: str) -> None:
    """Presses a key, and returns when another page is there."""
    browser.execute_script("window.isOld = true")
    ActionChains(browser).send_keys(key).perform()
    wait_until(browser, "!window.isOld && document.readyState === 'complete'")


def enter(browser: Chrome, address: str) -> None:
    browser.get(address)
    assert browser.current_url.endswith("/")  # the token has left the address
    ask(browser, "document.querySelector('input').value = 'anna'")
    ask(browser, "document.querySelector('form').submit()")
    wait_until(browser, "document.querySelectorAll('article').length > 0")


@pytest.mark.slow
def test_a_rater_judges_by_keys_and_takes_back_in_a_real_browser(
    browser: Chrome, open_page: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": f"prompt {i}", "answers": [f"{EVIL} {i}", f"plain {i}"]} for i in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    enter(browser, open_page("rate", "--file", str(file)))
    assert ask(browser, "document.title") == "Which answer is better?"
    lefts = []
    for key in (Keys.ARROW_LEFT, Keys.ARROW_RIGHT, "t", "b", "s"):
        lefts.append(ask(browser, "document.querySelector('article').textContent"))
        press(browser, key)
    press(browser, "u")
    judgements = tmp_path / "a.jsonl.judgements.jsonl"
    said = [json.loads(line) for line in judgements.read_text().splitlines()]
    assert [line.get("verdict", line["what"]) for line in said] == [
        "better",
        "better",
        "tie",
        "bad",
        "skip",
        "undone",
    ]
    assert said[0]["chosen"] == lefts[0] and said[1]["rejected"] == lefts[1]
    assert all(0 < line["seconds"] < 60 for line in said[:5])
    assert ask(browser, "document.querySelector('article').textContent") == lefts[4]
    assert any(EVIL in left for left in lefts)
    assert "4 of 6" in ask(browser, "document.querySelector('#progress').textContent")
    browser.save_screenshot(str(tmp_path / "page.png"))


@pytest.mark.slow
def test_a_rater_labels_by_keys_what_a_run_asks_meanwhile(
    browser: Chrome, open_page: Callable[..., str], tmp_path: Path
) -> None:
    def put(number: int, form: str) -> None:
        question = Question(
            key=f"key {number}",
            prompt=f"prompt {number}",
            answer=f"{EVIL} {number}",
            question="Is this right?",
            form=form,
            lowest=1,
            highest=5,
            raters=1,
            asker="run",
            time_unix_s=0.0,
        )
        Questions(tmp_path).append([question])

    put(0, "yes_no")
    enter(browser, open_page("label", str(tmp_path)))
    assert ask(browser, "document.querySelector('h1').textContent") == "Is this right?"
    assert ask(browser, "document.querySelector('article').textContent") == f"{EVIL} 0"
    press(browser, "y")
    assert "Nothing waits" in ask(browser, "document.querySelector('#done').textContent")
    put(1, "scale")
    wait_until(browser, "document.querySelectorAll('article').length > 0")  # it looks by itself
    browser.save_screenshot(str(tmp_path / "page.png"))
    press(browser, "4")
    said = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert [(line["key"], line["value"]) for line in said] == [("key 0", 1), ("key 1", 4)]
