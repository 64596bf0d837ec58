"""Makes report_tokens.png, the panel Tokens of a run of the quickstart.

    g-core run recipes/quickstart.yaml
    python docs/figures/shoot_tokens.py runs/quickstart/latest

It needs gcore-report, selenium, Chromium and its driver.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # where it is run as a script

from tests.support.chromium import chromium  # noqa: E402

TO = Path(__file__).with_name("report_tokens.png")
STEP = "20"  # half way between guesses and worked answers
WAIT_S = 60
_DARK = 'document.documentElement.dataset.theme = "dark"'


def shoot(browser: Chrome, page: Path) -> None:
    """Opens the panel at a step, goes to a token, and takes the picture."""
    browser.get(f"{page.as_uri()}#tokens")
    browser.execute_script(_DARK)
    tools = "#panel-tokens .tools select"
    wait = WebDriverWait(browser, WAIT_S)
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".tokens"))
    Select(browser.find_elements(By.CSS_SELECTOR, tools)[0]).select_by_value(STEP)
    title = "#panel-tokens article h3"
    wait.until(
        lambda _: browser.find_element(By.CSS_SELECTOR, title).text.startswith(f"step {STEP},")
    )
    browser.find_element(By.CSS_SELECTOR, ".tokens").send_keys(Keys.ARROW_RIGHT * 3)
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "#panel-tokens .chart[data-drawn]"))
    browser.execute_script("window.scrollTo(0, 0)")
    browser.save_screenshot(str(TO))


def main(run: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "report.html"
        command = [sys.executable, "-m", "gcore_core", "report", run, "--to", str(page)]
        subprocess.run(command, check=True)
        with chromium(1280, 800) as browser:
            shoot(browser, page)


if __name__ == "__main__":
    main(sys.argv[1])
