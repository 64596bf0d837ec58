"""Runs one rank of a trainer that loads a saved state and writes its weights.

It is run as text by the interpreter of the role, which need not have gcore-tools, and reads its
specification as JSON from stdin.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.factories import FactorySpec, build
from gcore_core.contract.trainer import Trainer

#: Exit code of a rank that could not write.
UNWRITTEN = 73


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Tells one process of the export what it needs.

    role: the trainer's.
    rank, ranks: which of the replica's processes it is, and of how many.
    rendezvous: a directory in which the ranks find each other.
    state: the checkpoint's directory that the trainer saved.
    to: the directory that the weights are written to.
    """

    role: str
    backend: FactorySpec
    objective: FactorySpec
    rank: int
    ranks: int
    model: dict[str, Any]
    engine: dict[str, Any]
    rendezvous: str
    state: str
    to: str


def main() -> None:
    """Loads the state, writes the weights and ends."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=Spec)
    try:
        context = WorkerContext(
            role=spec.role,
            rank=spec.rank,
            ranks=spec.ranks,
            model=spec.model,
            engine=spec.engine,
            rendezvous=spec.rendezvous,
            parts={"objective": build(spec.objective)},
            directory=spec.rendezvous,
        )
        trainer: Trainer = build(spec.backend, context)
        trainer.load(Path(spec.state))
        _save(trainer, Path(spec.to))
        trainer.close()
    except GcoreError as error:  # the message alone; a traceback of ours would not help
        sys.exit(str(error))


def _save(trainer: Trainer, to: Path) -> None:
    """Writes the weights; ends the process with ``UNWRITTEN`` where the system refuses."""
    try:
        trainer.save_pretrained(to)
    except (OSError, SafetensorError) as error:
        print(f"the system says: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        sys.exit(UNWRITTEN)


if __name__ == "__main__":
    main()
