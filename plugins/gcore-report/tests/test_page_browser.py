"""The page in a real Chromium: every panel is drawn, by keys alone, and nothing complains."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_report.page.document import PANELS, report
from gcore_report.page.runs import open_runs
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from tests.support.chromium import browser, console_errors
from tests.support.page_runs import EVIL, write_run

__all__ = ["browser"]


def press(browser: Chrome, *keys: str) -> None:
    browser.switch_to.active_element.send_keys(*keys)


def until(browser: Chrome, script: str) -> None:
    WebDriverWait(browser, 60, 0.02).until(lambda _: browser.execute_script(f"return {script}"))


def is_drawn(name: str) -> str:
    """Returns a script that is true when a panel is ready and all its visible charts are drawn."""
    return f"""(() => {{
        const panel = document.getElementById("panel-{name}");
        const seen = [...panel.querySelectorAll(".chart")].filter((chart) => {{
            const place = chart.getBoundingClientRect();
            return chart.checkVisibility() && place.top < innerHeight && place.bottom > 0;
        }});
        return panel.dataset.state === "ready" && panel.innerText.trim() !== ""
            && seen.every((chart) => chart.dataset.drawn && chart.querySelector("svg"));
    }})()"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    runs = open_runs([write_run(tmp_path / name) for name in ("one", "two")])
    (tmp_path / "page.html").write_text(report(runs))
    return tmp_path / "page.html"


def test_every_panel_is_drawn_by_keys_alone_and_the_console_is_silent(
    browser: Chrome, page: Path
) -> None:
    browser.get(page.as_uri())
    until(browser, is_drawn("curves"))
    press(browser, "1")
    for name in list(PANELS)[1:]:
        press(browser, Keys.ARROW_RIGHT)
        until(browser, is_drawn(name))
        focused = browser.switch_to.active_element
        assert focused.get_attribute("id") == f"tab-{name}"
        assert focused.get_attribute("aria-selected") == "true"
    press(browser, Keys.HOME)
    until(browser, "!document.getElementById('panel-curves').hidden")
    browser.find_element(By.ID, "theme").click()
    assert console_errors(browser) == []
    assert browser.title.endswith("/one, " + page.parent.name + "/two - G-Core")


@pytest.mark.slow
def test_answers_are_found_and_compared_and_a_script_in_one_is_text(
    browser: Chrome, page: Path
) -> None:
    browser.get(f"{page.as_uri()}#answers")
    until(browser, is_drawn("answers"))
    press(browser, "/", EVIL[:20])
    until(browser, "document.querySelector('output').textContent === '22 answers'")
    browser.find_element(By.CSS_SELECTOR, ".item").send_keys(Keys.ARROW_DOWN)
    assert EVIL in browser.find_element(By.CSS_SELECTOR, ".detail").text
    against = browser.find_element(By.CSS_SELECTOR, ".detail select")
    against.send_keys(Keys.ARROW_DOWN)
    until(browser, "document.querySelectorAll('.detail ins').length === 1")
    assert "owned" not in browser.title
    assert browser.execute_script("return document.querySelectorAll('main img').length") == 0
    assert console_errors(browser) == []


@pytest.mark.slow
def test_a_metric_is_found_by_a_part_of_its_name(browser: Chrome, page: Path) -> None:
    browser.get(page.as_uri())
    until(browser, is_drawn("curves"))
    browser.find_element(By.CSS_SELECTOR, "#panel-curves [data-search]").send_keys("entropy")
    shown = "[...document.querySelectorAll('#panel-curves .card')].filter((c) => !c.hidden)"
    until(browser, f"{shown}.length === 1 && {shown}[0].innerText.startsWith('entropy')")


@pytest.mark.slow
def test_tokens_and_pictures_are_reached_by_keys(browser: Chrome, page: Path) -> None:
    browser.get(f"{page.as_uri()}#tokens")
    until(browser, is_drawn("tokens"))
    browser.find_element(By.CSS_SELECTOR, ".tokens").send_keys(Keys.ARROW_RIGHT * 3)
    facts = browser.find_element(By.CSS_SELECTOR, ".token-facts").text
    assert facts.startswith("token 2 (2)") and "ratio 0.99005" in facts
    assert len(browser.find_elements(By.CSS_SELECTOR, ".token.masked")) == 1
    browser.find_element(By.TAG_NAME, "body").send_keys("4")
    until(browser, is_drawn("pictures"))
    loaded = "[...document.querySelectorAll('#panel-pictures img')].every((i) => i.naturalWidth)"
    until(browser, loaded)
    assert console_errors(browser) == []
