"""Writes the digests of each push's tensors, ``tensors.jsonl`` of a run.

Rank 0 of the trainer writes it. ``gcore_core.contract.run_files`` has the types of the lines and
reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gcore_core.contract.records import WeightPlan
from gcore_core.contract.run_files import TENSORS, PushedTensors, TensorNames
from gcore_core.runtime.journal import Journal


class TensorJournal:
    """Appends a row for each push that brings something else than the row before says."""

    def __init__(self, run_dir: Path) -> None:
        self._rows = Journal(run_dir / TENSORS)
        self._names: list[str] = []
        self._latest: PushedTensors | None = None

    def write(self, plan: WeightPlan, digests: Sequence[int], transport: str) -> None:
        """Appends the digests of a push, unless the last row has them already.

        digests: of the plan's tensors, in its order.
        transport: its name: each may have digests of its own kind.
        """
        # Some transports count a digest as a signed number; the bits are the same.
        joined = b"".join((digest % 2**64).to_bytes(8, "big") for digest in digests)
        pushed = PushedTensors(plan.version, transport, joined)
        if pushed == self._latest:
            return
        names = [spec.name for spec in plan.tensors]
        self._rows.append([pushed] if names == self._names else [TensorNames(names), pushed])
        self._names = names
        self._latest = pushed
