"""The page in a real browser: keys, undo, and an answer that tries to be a script."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gcore_human.queue import Question, Questions

ARROWS = {"left": "\ue012", "right": "\ue014"}  # as WebDriver names the keys
EVIL = "<script>document.title='owned'</script>"


class Browser:
    """Chromium, by the WebDriver protocol."""

    def __init__(self, driver: str) -> None:
        self._client = httpx2.Client(base_url=driver, timeout=60)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,800"]
        options = {"goog:chromeOptions": {"args": arguments}}
        self._session = ""
        self._session = self("session", capabilities={"alwaysMatch": options})["sessionId"]

    def __call__(self, what: str, **values: Any) -> Any:
        path = f"/session/{self._session}/{what}" if self._session else f"/{what}"
        answer = self._client.post(path, json=values)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def script(self, text: str) -> Any:
        return self("execute/sync", script=text, args=[])

    def press(self, key: str) -> None:
        """Presses a key, and returns when another page is there."""
        self.script("window.isOld = true")
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self("actions", actions=[{"type": "key", "id": "keys", "actions": actions}])
        self.until("return !window.isOld && document.readyState === 'complete'")

    def until(self, script: str) -> None:
        end_s = time.monotonic() + 30
        while not self.script(script):
            assert time.monotonic() < end_s, f"never true: {script}"
            time.sleep(0.02)

    def screenshot(self) -> bytes:
        answer = self._client.get(f"/session/{self._session}/screenshot")
        return base64.b64decode(answer.json()["value"])

    def close(self) -> None:
        self._client.delete(f"/session/{self._session}")
        self._client.close()


@pytest.fixture
def browser() -> Iterator[Browser]:
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        pytest.fail(f"{' and '.join(missing)} missing: apt-get install chromium chromium-driver")
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        said = next(line for line in driver.stdout if "started successfully" in line)
        port = re.findall(r"port (\d+)", said)[0]
        browser = Browser(f"http://127.0.0.1:{port}")
        yield browser
        browser.close()
    finally:
        driver.kill()
        driver.wait()


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


def enter(browser: Browser, address: str) -> None:
    browser("url", url=address)
    assert browser.script("return location.href").endswith("/")  # the token has left the address
    browser.script("document.querySelector('input').value = 'anna'")
    browser.script("document.querySelector('form').submit()")
    browser.until("return document.querySelectorAll('article').length > 0")


@pytest.mark.slow
def test_a_rater_judges_by_keys_and_takes_back_in_a_real_browser(
    browser: Browser, open_page: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": f"prompt {i}", "answers": [f"{EVIL} {i}", f"plain {i}"]} for i in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    enter(browser, open_page("rate", "--file", str(file)))
    assert browser.script("return document.title") == "Which answer is better?"
    lefts = []
    for key in (ARROWS["left"], ARROWS["right"], "t", "b", "s"):
        lefts.append(browser.script("return document.querySelector('article').textContent"))
        browser.press(key)
    browser.press("u")
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
    assert browser.script("return document.querySelector('article').textContent") == lefts[4]
    assert any(EVIL in left for left in lefts)
    assert "4 of 6" in browser.script("return document.querySelector('#progress').textContent")
    (tmp_path / "page.png").write_bytes(browser.screenshot())


@pytest.mark.slow
def test_a_rater_labels_by_keys_what_a_run_asks_meanwhile(
    browser: Browser, open_page: Callable[..., str], tmp_path: Path
) -> None:
    def ask(number: int, form: str) -> None:
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

    ask(0, "yes_no")
    enter(browser, open_page("label", str(tmp_path)))
    assert browser.script("return document.querySelector('h1').textContent") == "Is this right?"
    assert browser.script("return document.querySelector('article').textContent") == f"{EVIL} 0"
    browser.press("y")
    assert "Nothing waits" in browser.script("return document.querySelector('#done').textContent")
    ask(1, "scale")
    browser.until("return document.querySelectorAll('article').length > 0")  # it looks by itself
    (tmp_path / "page.png").write_bytes(browser.screenshot())
    browser.press("4")
    said = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert [(line["key"], line["value"]) for line in said] == [("key 0", 1), ("key 1", 4)]
