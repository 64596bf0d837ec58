"""Measures verl beside ours: its default path, through TransferQueue, and the one before it.

Used by controllers.py, which gives what it measures of ours. On the default path payload goes
past the controlling process, as it does in ours (verl_transferqueue.py); on the old one, which
verl 0.9.1 calls deprecated, it goes through it (verl_controller.py).

verl runs in an environment of its own, by its own interpreter; each measurement is a process of
its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from report import Claim, interval, median_ratio

HERE = Path(__file__).parent
#: Names of the old path's claims -> its serialisation; "" is its default.
OLD = {"verl_old": "", "verl_old_numpy": "numpy"}
#: Names of the default path's claims -> the word for its settings.
V1 = {"verl_v1": "default", "verl_v1_tuned": "tuned"}
#: By a side's name, what its time over ours is held to where the payload is read.
AIMS = {"inline_single": 10.0, "verl_v1": 10.0}
STEPS = 3
#: Bytes that a measurement may need: so much for each byte of payload, and for its processes.
OLD_NEEDS = (10, 4e9)  # measured: 6 x in the driver, the rest in workers and store
V1_NEEDS = (5, 6e9)

Measured = dict[str, float]  # "step_s" and "memory_mib"


def old_path(python: Path, nbytes: int, records: int, serialisation: str) -> Measured | None:
    """Returns what verl_controller.py prints; None where a step needs more memory than there is."""
    if not fits(nbytes, OLD_NEEDS):
        return None
    settings = {"VERL_DATAPROTO_SERIALIZATION_METHOD": serialisation} if serialisation else {}
    words = [str(nbytes), str(records), "1"]
    return last_line([str(python), str(HERE / "verl_controller.py"), *words], settings)


def default_path(python: Path, nbytes: int, records: int, word: str) -> Measured | None:
    """Returns what verl_transferqueue.py prints; None where there is too little memory.

    word: "default" or "tuned", for the settings of TransferQueue.
    """
    if not fits(nbytes, V1_NEEDS):
        return None
    words = [str(nbytes), str(records), str(STEPS), word]
    return last_line([str(python), str(HERE / "verl_transferqueue.py"), *words], {})


def fits(nbytes: int, needs: tuple[float, float]) -> bool:
    """Whether a measurement with ``nbytes`` of payload has the memory that it needs."""
    factor, least = needs
    return factor * nbytes + least <= psutil.virtual_memory().available


def last_line(command: Sequence[str], settings: dict[str, str]) -> Measured:
    """Returns the JSON object that a command prints; ends the benchmark when it fails."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **settings},
            timeout=600,
            check=False,
        )
        lines = [line for line in process.stdout.splitlines() if line.startswith(b"{")]
        if process.returncode or not lines:
            errors.seek(0)
            raise SystemExit(
                f"verl ended with {process.returncode}:\n{errors.read()[-2000:].decode()}"
            )
    return dict(json.loads(lines[-1]))


def measure_readers(
    sides: dict[str, Callable[[], Measured | None]],
    rounds: int,
    note: Callable[[str], None],
) -> dict[str, list[Measured]]:
    """Returns what each side measured in each round, in which all take a turn.

    Every second round goes through them backwards. A side that says None is left out.
    """
    results = defaultdict[str, list[Measured]](list)
    for number in range(rounds):
        order = list(sides.items())[:: -1 if number % 2 else 1]
        for name, side in order:
            if (result := side()) is not None:
                results[name].append(result)
                note(f"{name}: {result['step_s']:.2f} s, {result['memory_mib']:.0f} MiB")
    return dict(results)


def verl_sides(python: Path, nbytes: int, records: int) -> dict[str, Callable[[], Measured | None]]:
    """Returns how each of verl's paths is measured, by the name of its claims."""
    sides: dict[str, Callable[[], Measured | None]] = {}
    for name, word in V1.items():
        sides[name] = lambda word=word: default_path(python, nbytes, records, word)
    for name, how in OLD.items():
        sides[name] = lambda how=how: old_path(python, nbytes, records, how)
    return sides


def readers_claims(results: dict[str, list[Measured]], size: str) -> list[Claim]:
    """Returns the claims about steps whose payload is read: each rival's time over ours.

    results: of each side; "ours" is one of them, "inline_single" may be.
    size: as it stands in the claims' names.
    """
    ours = [result["step_s"] for result in results["ours"]]
    claims = []
    for name, measured in results.items():
        seconds = [result["step_s"] for result in measured]
        if name != "ours" and len(seconds) == len(ours):
            label = f"time_{size}_read"
            label = f"{label}_{name}" if name == "inline_single" else f"{name}_{label}"
            pairs = list(zip(seconds, ours, strict=True))
            claims.append(
                Claim(
                    f"{label}_over_ours",
                    median_ratio(pairs),
                    "ratio",
                    AIMS.get(name),
                    interval=interval(pairs, median_ratio),
                )
            )
        peak_mib = statistics.median(result["memory_mib"] for result in measured)
        claims += [
            Claim(f"step_s_{name}_read_{size}", statistics.median(seconds), "s"),
            Claim(f"peak_mib_{name}_read_{size}", peak_mib, "MiB, peak resident"),
        ]
    return claims
