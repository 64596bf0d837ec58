"""Measures the page of a run in a real Chromium: how fast it opens, its size, and what it draws.

    python benchmarks/report_page.py [--steps N] [--answers N] [--rounds N] [--json] [--check]

The run never ran: its files are written here, with sixty metrics in each step. The page opens from
the disk into a browser that has just started, as a reader opens it. It is open when every chart
that can be seen is drawn and the page answers. The share of drawn panels is over all panels: each
is opened by a key, and its charts are scrolled through. Console errors are counted over all rounds.

``watch_overhead_share_of_step`` is what ``g-core watch`` takes from a run that is watched: the
server's processor seconds over the seconds of the steps meanwhile, while a row of the same run is
written every ``STEP_S`` and somebody listens. A run waits for it in no other way, since it does not
know of it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from report import Claim, add_options, publish, repeated

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gcore_report.page.document import PANELS, report  # noqa: E402
from gcore_report.page.runs import open_runs  # noqa: E402
from selenium.webdriver import Chrome  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

from gcore_core.contract.run_files import METRICS  # noqa: E402
from tests.support.chromium import chromium, console_errors, missing  # noqa: E402
from tests.support.page_runs import write_run  # noqa: E402

STEP_S = 0.5  # of the quickstart on two cores: quicker than any run of a real model
WAIT_S = 60.0  # for a page on a busy machine
#: Whether a panel is ready, and all of its charts that can be seen are drawn.
DRAWN = """
    const panel = document.getElementById(`panel-${arguments[0]}`);
    const charts = [...panel.querySelectorAll(".chart")].filter((chart) => {
        const place = chart.getBoundingClientRect();
        return chart.checkVisibility() && place.top < innerHeight && place.bottom > 0;
    });
    return panel.dataset.state === "ready" && panel.innerText.trim() !== ""
        && charts.every((chart) => chart.dataset.drawn);
"""
#: Scrolls by half a window; returns whether the end is reached.
SCROLL = """
    scrollBy(0, innerHeight / 2);
    return scrollY + innerHeight >= document.documentElement.scrollHeight - 1;
"""
COUNT = """
    const own = document.querySelectorAll(`#panel-${arguments[0]} details[open] .chart, `
        + `#panel-${arguments[0]} > .wide .chart, #panel-${arguments[0]} > .grid .chart`);
    return [own.length, [...own].filter((chart) => chart.dataset.drawn).length];
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast a page opens, and what it draws.")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--watched", type=int, default=60, help="steps that are watched")
    add_options(parser)
    args = parser.parse_args()
    if missing():
        parser.error(f"no browser here: apt-get install {' '.join(missing())}")
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        page = Path(folder, "page.html")
        run = write_run(Path(folder, "run"), steps=args.steps, answers=args.answers)
        page.write_text(report(open_runs([run])))
        claims = measured(page, args.rounds, args.steps)
        claims.append(
            Claim(
                "watch_overhead_share_of_step",
                watch_share(run, args.steps, args.watched),
                "0 to 1",
                0.01,
                "<=",
            )
        )
    return publish("report_page", claims, args, ("gcore-report", "plotly", "selenium"))


def measured(page: Path, rounds: int, steps: int) -> list[Claim]:
    """Opens the page so many times, each in a new browser, and looks at every panel in the last."""
    opened_s = []
    errors = 0
    share = 0.0
    for number in range(rounds):
        with chromium() as browser:
            opened_s.append(open_page(browser, page))
            if number == rounds - 1:
                share = panels_drawn(browser)
            errors += len(console_errors(browser))
    name = f"open_{steps}_steps_s"
    return [
        repeated(name, opened_s, statistics.median, "s", 2.0, "<="),
        Claim(f"report_mib_{steps}_steps", page.stat().st_size / 2**20, "MiB", 15.0, "<="),
        Claim("panels_drawn_share", share, "0 to 1", 1.0),
        Claim("console_errors", float(errors), "messages", 0.0, "<="),
    ]


def open_page(browser: Chrome, page: Path) -> float:
    """Returns the seconds until the page's first panel is drawn."""
    began_s = time.perf_counter()
    browser.get(page.as_uri())
    wait_until_drawn(browser, next(iter(PANELS)))
    return time.perf_counter() - began_s


def wait_until_drawn(browser: Chrome, panel: str) -> bool:
    """Returns whether a panel and its visible charts were drawn in time."""
    end_s = time.perf_counter() + WAIT_S
    while time.perf_counter() < end_s:
        if browser.execute_script(DRAWN, panel):
            return True
        time.sleep(0.01)
    return False


def panels_drawn(browser: Chrome) -> float:
    """Returns the share of panels all of whose charts are drawn when a reader scrolls through."""
    drawn = 0
    for number, panel in enumerate(PANELS, 1):
        browser.find_element(By.TAG_NAME, "body").send_keys(str(number))
        is_drawn = wait_until_drawn(browser, panel)
        browser.execute_script("scrollTo(0, 0)")
        while is_drawn and not browser.execute_script(SCROLL):
            is_drawn = wait_until_drawn(browser, panel)
        is_drawn = is_drawn and wait_until_drawn(browser, panel)
        charts, drawn_charts = browser.execute_script(COUNT, panel)
        drawn += is_drawn and charts == drawn_charts
    return drawn / len(PANELS)


# -- watching --------------------------------------------------------------------------------------


def watch_share(run: Path, steps: int, watched: int) -> float:
    """Returns the server's processor seconds over those of the steps that it is watched for.

    steps: those that the run has made already.
    watched: those that it makes meanwhile.
    """
    with serving(run) as (process, address):
        heard = listen(address)
        time.sleep(2.0)  # the page is loaded, once
        before = used_s(process)
        began_s = time.perf_counter()
        with (run / METRICS).open("ab", buffering=0) as file:
            last = (run / METRICS).read_bytes().splitlines()[-1]
            row = json.loads(last)
            for step in range(steps + 1, steps + watched + 1):
                file.write(json.dumps(row | {"step": step}).encode() + b"\n")
                time.sleep(STEP_S)
        time.sleep(2.0)  # the server looks once a second
        seconds = time.perf_counter() - began_s
        if len(heard) != watched:
            raise RuntimeError(f"{len(heard)} of {watched} steps were heard of")
        return (used_s(process) - before) / seconds


def used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def serving(run: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Starts ``g-core watch``; yields its process and the address that it prints."""
    command = [sys.executable, "-m", "gcore_core", "watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = (line for line in process.stdout if line.startswith("open "))
            yield psutil.Process(process.pid), next(lines).split()[1]
        finally:
            process.kill()


def listen(address: str) -> list[str]:
    """Listens to the events of a page as a browser does; returns the list of steps it fills."""
    place = urlsplit(address)
    client = http.client.HTTPConnection(place.netloc)
    client.request("GET", f"/?{place.query}")
    answer = client.getresponse()
    answer.read()
    cookie = str(answer.headers["set-cookie"]).partition(";")[0]
    client.request("GET", "/events", headers={"Cookie": cookie})
    events = client.getresponse()
    heard: list[str] = []

    def follow() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            for line in events:
                if line.startswith(b"event: step"):
                    heard.append(line.decode())

    threading.Thread(target=follow, daemon=True).start()
    return heard


if __name__ == "__main__":
    raise SystemExit(main())
