"""Opens pages in a real Chromium without a window, for tests and benchmarks of pages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

#: What has to be installed, by the names that Debian gives.
PROGRAMS = {"chromium": "chromium", "chromedriver": "chromium-driver"}


def missing() -> list[str]:
    """Returns the packages that are not installed."""
    return [package for program, package in PROGRAMS.items() if shutil.which(program) is None]


@contextlib.contextmanager
def chromium(width: int = 1400, height: int = 900) -> Iterator[Chrome]:
    """Opens a browser that writes down what pages say in its console.

    width, height: of the window, in pixels.
    """
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(word)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # The driver is named, so that selenium does not look for one on the network.
    browser = Chrome(options, Service(shutil.which("chromedriver") or "chromedriver"))
    try:
        yield browser
    finally:
        browser.quit()


@pytest.fixture
def browser() -> Iterator[Chrome]:
    """Opens a browser. Where there is none, says what to install: by a skip, and by a failure
    where ``CI`` is set.
    """
    if missing():
        leave = pytest.fail if os.environ.get("CI") else pytest.skip
        leave(f"no browser here: apt-get install {' '.join(missing())}")
    with chromium() as opened:
        yield opened


def console_errors(browser: Chrome) -> list[str]:
    """Returns what pages have written into the console as errors since this was asked last."""
    entries = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]
