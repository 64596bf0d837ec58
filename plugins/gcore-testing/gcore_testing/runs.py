"""Starts whole runs as a person does, in a process of their own, and reads their metrics.

It also starts the ranks of a trainer, each in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Holds the figures of a run, step by step.

    gaps: the largest difference between generator and trainer in the log-prob of one action, in
        nats, for each trained step.
    shares: the share of actions that are more than 1e-4 apart, for each trained step.
    versions: the version of the weights before the first step, then after each step.
    """

    gaps: list[float]
    shares: list[float]
    versions: list[int]


def run_together(
    programs: Sequence[Sequence[str]], timeout_s: float = 300, **environment: str
) -> None:
    """Runs programs that wait for each other, such as the ranks of a trainer.

    Each is ``python WORDS``, with this process's import path and one thread. Raises RuntimeError
    with the end of the output of those that failed, or had not ended in time.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    python = [sys.executable, "-W", "ignore"]
    processes = [
        subprocess.Popen(
            [*python, *words],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words in programs
    ]
    with ThreadPoolExecutor(len(processes)) as pool:  # all are read, so that none waits for it
        try:
            outputs = list(pool.map(lambda process: _output(process, timeout_s), processes))
        finally:
            for process in processes:
                process.kill()
    failed = [
        f"rank {rank} ended with {process.returncode}:\n{output[-3000:]}"
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True))
        if process.returncode
    ]
    if failed:
        raise RuntimeError("\n".join(failed))


def _output(process: subprocess.Popen[str], timeout_s: float) -> str:
    """Returns what a program has printed when it has ended, or was killed after its time."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.wait()
        printed: bytes = error.output or b""
        return printed.decode("utf-8", "replace")


def run_recipe(
    recipe: Path, directory: Path, overrides: Sequence[str], timeout_s: float
) -> RunResult:
    """Runs ``g-core run`` into a new run directory.

    Raises RuntimeError with the end of its output when it fails.
    """
    command = [
        sys.executable,
        "-m",
        "gcore_core",
        "run",
        str(recipe),
        f"run.dir={directory}",
        *overrides,
    ]
    completed = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    if completed.returncode:
        output = completed.stdout + completed.stderr
        raise RuntimeError(f"the run ended with {completed.returncode}:\n{output[-3000:]}")
    rows = [
        json.loads(line)
        for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    trained = [row["metrics"] for row in rows if row["step"] > 0]
    return RunResult(
        gaps=[metrics["logprob_gap_max"] for metrics in trained if "logprob_gap_max" in metrics],
        shares=[
            metrics["logprob_gap_share"] for metrics in trained if "logprob_gap_share" in metrics
        ],
        versions=[row["version"] for row in rows],
    )
