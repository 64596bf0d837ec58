"""Lets tests hold SGLang, which goes on by itself, between the calls of its generator.

Else the speed of the machine decides how far samples are when a test pushes weights or aborts.

``python -m gcore_sglang.stepwise`` runs the server with a gate in front of each batch. It is open
unless ``held`` closes it. A test that holds a generator puts this module's name in the place of
``gcore_sglang.server.CHILD`` before it makes the generator.
"""

from __future__ import annotations

import importlib
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore_sglang.client import Event
    from gcore_sglang.engine import SglangGenerator

#: A FIFO in the server's private directory, there while the gate is closed. A byte is one batch.
_GATE = "gate"
#: How soon SGLang looks for other calls while it waits for a byte.
_POLL_S = 0.001
#: How long a held step waits for the first action: until there is one, on any machine.
_FIRST_S = 120.0


@contextmanager
def held(generator: SglangGenerator) -> Iterator[None]:
    """Has SGLang run one batch at most for each time that the generator waits for it.

    So a step is one batch, and none runs between calls. The first step with samples lasts until one
    of them has an action.
    """
    gate = generator._server.private / _GATE
    fresh = gate.with_suffix(".new")
    os.mkfifo(fresh, 0o600)
    turns = os.open(fresh, os.O_RDWR)
    fresh.rename(gate)
    client = generator._client
    wait = client.wait

    def one_batch(timeout_s: float) -> list[Event]:
        os.write(turns, b".")
        return wait(timeout_s if generator._begun or not generator._running else _FIRST_S)

    client.wait = one_batch  # type: ignore[method-assign]
    try:
        yield
    finally:
        client.wait = wait  # type: ignore[method-assign]
        gate.unlink(missing_ok=True)
        os.close(turns)


def _put_gate() -> None:
    """Changes SGLang in this process, which must be the only one that runs the model."""
    from sglang.srt.managers.scheduler import Scheduler

    gate = Path(os.environ["TMPDIR"], _GATE)
    ingest, run_batch = Scheduler.ingest_requests, Scheduler.run_batch

    def ingesting(self: Any, *arguments: Any, **named: Any) -> list[Any]:
        requests: list[Any] = ingest(self, *arguments, **named)
        # Meanwhile it takes all other calls: new samples, aborts, pushes.
        while gate.exists() and not self._engine_paused and not self.is_fully_idle():
            # A turn lasts until there was a batch: SGLang also comes by here to clear up.
            self.has_turn = getattr(self, "has_turn", False) or _took_turn(gate)
            if self.has_turn:
                break
            requests += ingest(self, *arguments, **named)
        return requests

    def running(self: Any, *arguments: Any, **named: Any) -> Any:
        self.has_turn = False
        return run_batch(self, *arguments, **named)

    Scheduler.ingest_requests = ingesting
    Scheduler.run_batch = running


def _took_turn(gate: Path) -> bool:
    """Takes a byte, and returns whether there was one within a moment."""
    try:
        turns = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:  # it is open again
        return False
    try:
        ready, _, _ = select.select([turns], [], [], _POLL_S)
        return bool(ready and os.read(turns, 1))
    finally:
        os.close(turns)


if __name__ == "__main__":
    from gcore_sglang.child import main

    main()
elif __name__ == "__mp_main__":  # one of SGLang's processes: see ``gcore_sglang.child``
    importlib.import_module("gcore_sglang.child")
    _put_gate()
