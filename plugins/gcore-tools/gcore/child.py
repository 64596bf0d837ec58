"""Is the process that a Python call starts: ``python -m gcore.child``.

It does what ``g-core run`` or ``g-core resume`` does, and tells by a pipe what these would print.
When the process that started it is gone, it gets SIGTERM: it saves its state and ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from gcore import events
from gcore_core.contract.errors import GcoreError
from gcore_core.kits.calls import Display, reset_signals, run_told, signal_at_end


class Order(msgspec.Struct, frozen=True):
    """Says what to run; it comes as the first word of the command.

    file: the job.
    overrides: words ``key=value``.
    resume: the directory of a run that goes on; "": a new one.
    events: descriptor that events are written to.
    lifeline: descriptor of a pipe that nobody writes to once the caller is gone.
    """

    file: str
    overrides: list[str]
    resume: str
    events: int
    lifeline: int


def main() -> NoReturn:
    reset_signals()
    order = msgspec.json.decode(sys.argv[1], type=Order)
    signal_at_end(order.lifeline, os.getpid(), signal.SIGTERM, is_group=False)
    if select.select([order.lifeline], [], [], 0)[0]:
        sys.exit(128 + signal.SIGTERM)  # the caller was gone before the kernel knew

    def display_of(steps: int) -> Display:
        return events.EventDisplay(order.events, steps)

    def tell_directory(directory: str) -> None:
        events.send(order.events, events.Begun(directory=directory))

    resume = Path(order.resume) if order.resume else None
    try:
        file = Path(order.file)
        sys.exit(run_told(file, order.overrides, resume, display_of, tell_directory))
    except GcoreError as error:
        events.send(order.events, events.Failed.of(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
