"""Runs watched in a real Chromium: steps come by themselves, buttons work, samples are found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gcore_report.page import limits
from gcore_report.page.answers import answers, halving
from gcore_report.page.pictures import pictures
from gcore_report.page.runs import open_runs
from gcore_report.page.tokens import tokens
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.expected_conditions import alert_is_present
from selenium.webdriver.support.wait import WebDriverWait

from gcore_core.contract import run_files
from gcore_core.run.checkpoints import Checkpoints
from tests.support import runs
from tests.support.chromium import browser, console_errors
from tests.support.page_runs import write_answers, write_run

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


@pytest.mark.slow
def test_samples_and_tokens_that_a_file_leaves_out_are_searched_and_opened_in_the_browser(
    browser: Chrome, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "job" / "001", steps=1500, answers=limits.ANSWERS + 2000)
    run = open_runs([run_dir])
    assert answers(run)["shown"] == limits.ANSWERS
    shown = {row["step"] for row in tokens(run)["records"]}
    left_out = next(r for r in run_files.read_tokens(run_dir) if r.step not in shown)
    # An answer of the last line of a step that the file's rule reaches last.
    step = list(halving(run[0].sampled_steps()))[-1]
    line = len(run_files.read_samples(run_dir, step)) - 1
    last = run_files.read_samples(run_dir, step)[line]
    assert last["text"] not in answers(run)["texts"]

    def until(script: str) -> None:
        wait = WebDriverWait(browser, WAIT_S, 0.05)
        wait.until(lambda _: browser.execute_script(f"return {script}"), script)

    def text_of(selector: str) -> str:
        return f"(document.querySelector('{selector}')?.innerText ?? '')"

    with watched(run_dir) as address:
        browser.get(address)
        until("document.getElementById('panel-curves').dataset.state === 'ready'")
        browser.find_element(By.TAG_NAME, "body").send_keys("2")
        total = sum(1 for s in run[0].sampled_steps() for _ in run_files.read_samples(run_dir, s))
        until(f"{text_of('#panel-answers output')} === '{total:,} answers'")
        assert f"All {total:,} evaluated answers" in browser.page_source
        browser.find_element(By.CSS_SELECTOR, "#panel-answers .more").click()
        until("document.querySelectorAll('#panel-answers .item').length === 120")
        search = browser.find_element(By.CSS_SELECTOR, "#panel-answers [data-search]")
        search.send_keys(last["text"][:150])
        until(f"{text_of('#panel-answers output')} === '1 answers'")
        until(f"{text_of('#panel-answers .detail')}.includes({json.dumps(last['text'])})")
        browser.find_element(By.CSS_SELECTOR, ".detail select").send_keys(Keys.ARROW_DOWN)
        until("document.querySelectorAll('.detail ins').length > 0")

        browser.find_element(By.ID, "tab-tokens").click()
        until("document.getElementById('panel-tokens').dataset.state === 'ready'")
        later = "#panel-tokens button:nth-of-type(2)"
        browser.find_element(By.CSS_SELECTOR, later).click()
        until(f"{text_of('#panel-tokens output')}.startsWith('records 101 to 200 of 600')")
        name = f"{left_out.ordinal}/{left_out.sample}"
        browser.find_element(By.CSS_SELECTOR, "#panel-tokens [data-search]").send_keys(name)
        until(f"{text_of('#panel-tokens h3')}.includes('step {left_out.step}, record {name},')")
        assert len(browser.find_elements(By.CSS_SELECTOR, ".token")) == len(left_out.action_ids)
        assert console_errors(browser) == []
    # The server is gone: the page says so where the result would be.
    browser.find_element(By.CSS_SELECTOR, "#panel-tokens [data-search]").send_keys("0")
    until(f"{text_of('#panel-tokens .nothing')}.startsWith('It could not be read')")


@pytest.mark.slow
def test_the_gallery_pages_through_all_pictures_of_a_run_in_the_browser(
    browser: Chrome, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "job" / "001", steps=100, answers=22)
    write_answers(run_dir, list(range(101, 200)), 198)
    total = pictures(open_runs([run_dir]))["total"]
    assert total > 60

    def until(script: str) -> None:
        wait = WebDriverWait(browser, WAIT_S, 0.05)
        wait.until(lambda _: browser.execute_script(f"return {script}"), script)

    panel = "document.querySelector('#panel-pictures"
    with watched(run_dir) as address:
        browser.get(address)
        until("document.getElementById('panel-curves').dataset.state === 'ready'")
        browser.find_element(By.ID, "tab-pictures").click()
        until(f"{panel} output')?.innerText === 'pictures 1 to 60 of {total:,}'")
        assert f"All {total:,} pictures" in browser.page_source
        until("[...document.querySelectorAll('#panel-pictures img')].every((i) => i.naturalWidth)")
        later = browser.find_element(By.CSS_SELECTOR, "#panel-pictures button:nth-of-type(2)")
        while later.is_enabled():
            before = browser.find_element(By.CSS_SELECTOR, "#panel-pictures output").text
            later.click()
            until(f"{panel} output').innerText !== {json.dumps(before)}")
        until(f"{panel} output').innerText.endsWith('to {total:,} of {total:,}')")
        search = browser.find_element(By.CSS_SELECTOR, "#panel-pictures [data-search]")
        search.send_keys("in no prompt")
        until(f"{panel} output').innerText === '0 pictures'")
        assert console_errors(browser) == []
