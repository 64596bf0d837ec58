"""A real run watched in a real Chromium: steps come by themselves, and its buttons work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import alert_is_present
from selenium.webdriver.support.wait import WebDriverWait

from gcore_core.run.checkpoints import Checkpoints
from tests.support import runs
from tests.support.chromium import browser, console_errors

__all__ = ["browser"]

WAIT_S = 60


@contextmanager
def watched(run_dir: Path) -> Iterator[str]:
    """Starts ``g-core watch`` and gives the address that it prints."""
    command = [sys.executable, "-m", "gcore_core", "watch", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(line.split()[1] for line in process.stdout if line.startswith("open "))
        finally:
            process.kill()


@pytest.mark.slow
def test_steps_of_a_real_run_come_by_themselves_and_its_buttons_save_and_stop_it(
    browser: Chrome, tmp_path: Path
) -> None:
    def until(script: str) -> None:
        wait = WebDriverWait(browser, WAIT_S, 0.05)
        wait.until(lambda _: browser.execute_script(f"return {script}"), script)

    config = runs.job(run={"steps": 2000}, checkpoint={"every": 0})
    with runs.running(tmp_path, config) as run:
        run.read_until("step    2/2000")
        with watched(run.path) as address:
            browser.get(address)
            assert "token" not in browser.current_url
            until("document.querySelector('#panel-curves .chart[data-drawn]') !== null")
            until("document.getElementById('state').textContent === 'live'")
            before = browser.execute_script("return Data.head.runs[0].finished")
            until(f"Data.head.runs[0].finished > {before + 2}")
            shown = "Number(document.getElementById('runs').innerText.split(' ')[1])"
            until(f"{shown} > {before}")
            browser.find_element(By.ID, "save").click()
            until("document.getElementById('said').textContent.includes('A checkpoint')")
            WebDriverWait(run, WAIT_S).until(lambda run: Checkpoints(run.path).steps())
            browser.find_element(By.ID, "stop").click()
            WebDriverWait(browser, WAIT_S).until(alert_is_present()).accept()
            assert run.process.wait(runs.PATIENCE_S) == 143
            until("document.getElementById('state').textContent === 'not running'")
            assert console_errors(browser) == []
