"""Runs a job for a caller from Python, in a process of the run's own, and shows how it goes.

run_told: runs a job to its end in this process, and tells where it is and how it goes.
Display, PlainDisplay, open_display: what shows the progress of a run, and what prints it.
create_directory: makes the directory of a new run.
numbered_directory: makes a directory with the next free number.
reset_signals: gives signals that this process was started without their usual effect.
signal_at_end: has a process get a signal when nobody can write to a pipe any more.
"""

from __future__ import annotations

from gcore_core.node.inherited import reset_signals
from gcore_core.node.spawn import signal_at_end
from gcore_core.run.directory import create as create_directory
from gcore_core.run.directory import numbered as numbered_directory
from gcore_core.run.display import Display, PlainDisplay, open_display
from gcore_core.run.start import run_told

__all__ = [
    "Display",
    "PlainDisplay",
    "create_directory",
    "numbered_directory",
    "open_display",
    "reset_signals",
    "run_told",
    "signal_at_end",
]
