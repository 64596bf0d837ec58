"""Runs many jobs at the same time that know nothing of each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
from user_code import Gate

STARTING = 4  # jobs that start at a time: more would take longer than processes wait for each other
MIB_OF_A_JOB = 700  # measured: 570, of five processes and what they share
PATIENCE_S = 3600.0  # a job that waits at the gate answers nobody
STORE_GIB = 0.1  # of a job; by default each would take half of the machine's

Metrics = list[dict[str, float]]


def count_that_fits(jobs: int) -> int:
    """Returns how many of so many jobs with one controller each the machine has memory for."""
    return min(jobs, int(psutil.virtual_memory().available) // (MIB_OF_A_JOB * 2**20))


def run_strangers(
    run: Callable[[dict[str, Any]], Metrics], plan: dict[str, Any], jobs: int, gate: Gate
) -> list[Metrics]:
    """Runs the same job many times at once; returns the metrics of each.

    They begin together, when all of them have come to the gate. They need not end together.

    plan: of one job, whose controllers have the filter ``user/waits``.
    """
    plan = {**plan, "filter": {"use": "user/waits"}}
    plan["run"] = plan["run"] | {"patience_s": PATIENCE_S}
    launcher = plan["launcher"]
    plan["launcher"] = launcher | {"config": launcher["config"] | {"store_gib": STORE_GIB}}
    running: list[Future[Metrics]] = []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for n in range(jobs):
                running.append(pool.submit(run, plan))
                _wait_for(n + 2 - STARTING, gate, running)
            _wait_for(jobs, gate, running)
        finally:
            gate.open()
        return [job.result() for job in running]


def _wait_for(count: int, gate: Gate, running: list[Future[Metrics]]) -> None:
    """Waits until so many jobs have come to the gate. Raises what a job failed of before."""
    while gate.count() < count:
        for job in running:
            if job.done():
                job.result()
        time.sleep(0.1)
