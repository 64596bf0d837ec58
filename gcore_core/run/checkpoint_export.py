"""``g-core export RUN --step N``: a trainer loads a saved state and writes its weights in Hugging
Face layout.

That works for every backend in its own format. It happens in the interpreter of the role: one
process for each slot of one replica (``python -m gcore_core.run.checkpoint_export``), which gets
its specification as JSON on stdin.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.config.interpreters import open_interpreter
from gcore_core.config.plan import load_plan
from gcore_core.contract.abilities import replica_slots
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import DataError, GcoreError
from gcore_core.contract.factories import FactorySpec, build
from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.run_files import CONFIG
from gcore_core.contract.trainer import Trainer
from gcore_core.run.checkpoints import Checkpoints
from gcore_core.run.export import write_whole
from gcore_core.run.make_model import make_model

_SHOWN_LINES = 3


class _Spec(msgspec.Struct, frozen=True, kw_only=True):
    backend: FactorySpec
    objective: FactorySpec
    rank: int
    ranks: int
    model: dict[str, Any]
    engine: dict[str, Any]
    rendezvous: str
    state: str
    to: str


def export_step(run_dir: Path, step: int, to: Path) -> int:
    """Writes the weights that the checkpoint of ``step`` holds to the new directory ``to``; returns
    their bytes.

    Raises CheckpointError unless the checkpoint is whole, DataError when the trainer cannot load
    it, ConfigError when ``to`` exists or the run's configuration no longer resolves.
    """
    state = Checkpoints(run_dir).open(step).path / POLICY
    plan = load_plan(run_dir / CONFIG)
    role = plan.settings.roles[POLICY]
    backend = plan.factory(f"roles.{POLICY}")
    python = open_interpreter(role.python, where=f"roles.{POLICY}.python").python
    ranks = replica_slots(plan.objects[f"roles.{POLICY}"])

    def write(fresh: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="g-core-") as folder:
            specs = [
                _Spec(
                    backend=backend,
                    objective=plan.factory("objective"),
                    rank=rank,
                    ranks=ranks,
                    model=_model(role.model),
                    engine=role.engine,
                    rendezvous=folder,
                    state=str(state.absolute()),
                    to=str(fresh.absolute()),
                )
                for rank in range(ranks)
            ]
            _run(python, specs, Path(folder))

    return write_whole(to, write)


def _model(model: dict[str, Any]) -> dict[str, Any]:
    """With its ``path``, by which a backend finds shapes and tokenizer."""
    if "make" not in model:
        return model
    cache = Path(os.environ.get("G_CORE_CACHE") or Path.home() / ".cache" / "g-core") / "models"
    return {**model, "path": str(make_model(model["make"], cache, lambda share, text: None))}


def _run(python: str, specs: list[_Spec], folder: Path) -> None:
    """Until all ranks have ended; when one fails the others are ended too, since they would wait
    for it.
    """
    children: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"rank{spec.rank}.log" for spec in specs]
    try:
        for spec, log in zip(specs, logs, strict=True):
            with log.open("wb") as errors:
                command = [python, "-m", "gcore_core.run.checkpoint_export"]
                child = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=errors, stderr=errors
                )
            children.append(child)
            if child.stdin is None:
                raise RuntimeError("the child has no pipe")
            with child.stdin as pipe:
                pipe.write(msgspec.json.encode(spec))
        left = dict(zip((child.pid for child in children), range(len(children)), strict=True))
        while left:
            for child in [child for child in children if child.pid in left]:
                try:
                    code = child.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
                rank = left.pop(child.pid)
                if code != 0:
                    raise _failure(specs[rank], code, logs[rank])
    finally:
        for child in children:
            child.kill()
            child.wait()


def _failure(spec: _Spec, code: int, log: Path) -> DataError:
    lines = [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    return DataError(
        f"the trainer could not export this state (rank {spec.rank}, exit code {code}).",
        where=spec.state,
        why="\n".join(lines[-_SHOWN_LINES:]),
        todo=(
            "it is loaded with the run's own configuration: are its model and plugins still there?"
        ),
    )


def main() -> None:
    """A rank of the trainer."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=_Spec)
    try:
        context = WorkerContext(
            role=POLICY,
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
        trainer.save_pretrained(Path(spec.to))
        trainer.close()
    except GcoreError as error:  # the message alone; a traceback of ours would not help
        sys.exit(str(error))


if __name__ == "__main__":
    main()
