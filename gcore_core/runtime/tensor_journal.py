"""Writes the digests of each push's tensors, ``tensors.jsonl`` of a run.

Rank 0 of the trainer writes it. ``gcore_core.contract.run_files`` has the types of the lines and
reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gcore_core.contract.records import WeightPlan
from gcore_core.contract.run_files import TENSORS, PushedTensors, TensorNames

log = logging.getLogger(__name__)


class TensorJournal:
    """Appends a line for each push that brings something else than the line before says.

    A file that cannot be written is logged once; the run goes on without it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path: Path | None = run_dir / TENSORS
        self._names: list[str] = []
        self._latest: PushedTensors | None = None

    def write(self, plan: WeightPlan, digests: Sequence[int], transport: str) -> None:
        """Appends the digests of a push, unless the last line has them already.

        digests: of the plan's tensors, in its order.
        transport: its name: each may have digests of its own kind.
        """
        # Some transports count a digest as a signed number; the bits are the same.
        joined = b"".join((digest % 2**64).to_bytes(8, "big") for digest in digests)
        pushed = PushedTensors(plan.version, transport, joined)
        if self._path is None or pushed == self._latest:
            return
        names = [spec.name for spec in plan.tensors]
        lines = [] if names == self._names else [TensorNames(names)]
        try:
            with self._path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in [*lines, pushed]))
        except OSError as error:
            log.error("%s cannot be written: %s", self._path, error.strerror)
            self._path = None
        self._names = names
        self._latest = pushed
