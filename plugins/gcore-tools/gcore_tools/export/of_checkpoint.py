"""Writes the weights of a checkpoint in Hugging Face layout, for ``g-core export RUN --step N``.

The trainer itself loads its saved state and writes the weights, so every backend keeps a format of
its own. It runs in the interpreter of the role: one process for each slot of one replica
(``python -m gcore_core.run.checkpoint_export``), which reads its specification as JSON from stdin.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.config import yaml_source
from gcore_core.config.interpreters import open_interpreter
from gcore_core.config.plan import Plan, load_plan, trained_roles
from gcore_core.contract.abilities import replica_slots
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GcoreError,
    did_you_mean,
)
from gcore_core.contract.factories import FactorySpec, build
from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.run_files import CONFIG
from gcore_core.contract.trainer import Trainer
from gcore_core.run.checkpoint_service import saved_config
from gcore_core.run.checkpoints import Checkpoints
from gcore_core.run.export import write_whole
from gcore_core.run.make_model import make_model, models_cache
from gcore_core.workers import final_weights

_SHOWN_LINES = 3
#: Exit code of a rank that could not write.
_UNWRITTEN = 73
_POLL_S = 0.1


class _Spec(msgspec.Struct, frozen=True, kw_only=True):
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


def export_step(run_dir: Path, step: int, to: Path, role: str = POLICY) -> int:
    """Writes the weights that the checkpoint of ``step`` holds to the new directory ``to``.

    role: whose weights; a role that is trained.
    Returns their size in bytes. Raises CheckpointError unless the checkpoint is whole, DataError
    when the trainer cannot load it, ConfigError when ``to`` exists or the configuration that the
    checkpoint was saved with no longer resolves.
    """
    checkpoint = Checkpoints(run_dir).open(step).path
    plan = _saved_plan(checkpoint)
    _check_role(role, trained_roles(plan))
    state = checkpoint / role
    node = plan.settings.roles[role]
    backend = plan.factory(f"roles.{role}")
    own = f"roles.{role}.objective"
    objective = plan.factory(own if own in plan.provided else "objective")
    python = open_interpreter(node.python, where=f"roles.{role}.python").python
    ranks = replica_slots(plan.objects[f"roles.{role}"])

    def write(fresh: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="g-core-") as folder:
            specs = [
                _Spec(
                    role=role,
                    backend=backend,
                    objective=objective,
                    rank=rank,
                    ranks=ranks,
                    model=_model(node.model),
                    engine=node.engine,
                    rendezvous=folder,
                    state=str(state.absolute()),
                    to=str(fresh.absolute()),
                )
                for rank in range(ranks)
            ]
            _run(python, specs, Path(folder))

    return write_whole(to, write)


def _saved_plan(checkpoint: Path) -> Plan:
    """Returns the plan of the run as it was when it saved a checkpoint.

    The run may have gone on with other settings since, and with them the trainer would write other
    weights than were saved.
    """
    with tempfile.TemporaryDirectory(prefix="g-core-") as folder:
        file = Path(folder) / CONFIG
        file.write_text(yaml_source.written(saved_config(checkpoint)), encoding="utf-8")
        return load_plan(file)


def _check_role(role: str, trained: list[str]) -> None:
    """Raises ConfigError for a role that this run does not train."""
    if role not in trained:
        raise ConfigError(
            f"no role {role!r} is trained in this run{did_you_mean(role, trained)}.",
            where="g-core export --role",
            why=f"there are: {', '.join(trained)}",
        )


def _model(model: dict[str, Any]) -> dict[str, Any]:
    """Returns the model's settings with a ``path``, where a backend finds shapes and tokenizer.

    A model that the job makes (``model.make``) is made again, or taken from the cache.
    """
    if "make" not in model:
        return model
    return {
        **model,
        "path": str(make_model(model["make"], models_cache(), lambda share, text: None)),
    }


def _run(python: str, specs: list[_Spec], folder: Path) -> None:
    """Starts all ranks and returns when they have ended.

    When one fails the others are killed, since they would wait for it. Raises DataError, and
    ConfigError for a rank that could not write.
    """
    children: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"rank{spec.rank}.log" for spec in specs]
    try:
        for spec, log in zip(specs, logs, strict=True):
            child = _start(python, log)
            children.append(child)
            _hand_over(spec, child)
        running = dict(enumerate(children))  # by rank
        while running:
            for rank, child in list(running.items()):
                try:
                    code = child.wait(timeout=_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
                del running[rank]
                if code != 0:
                    raise _failure(specs[rank], code, logs[rank])
    finally:
        for child in children:
            child.kill()
            child.wait()


def _start(python: str, log: Path) -> subprocess.Popen[bytes]:
    command = [python, "-m", "gcore_core.run.checkpoint_export"]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)


def _hand_over(spec: _Spec, child: subprocess.Popen[bytes]) -> None:
    if child.stdin is None:
        raise RuntimeError("the child has no pipe")
    # Where its end of the pipe is closed, it ended at once: its exit code and log say why.
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        pipe.write(msgspec.json.encode(spec))


def _failure(spec: _Spec, code: int, log: Path) -> GcoreError:
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    if code == _UNWRITTEN:
        return ConfigError(
            f"the weights could not be written to {spec.to}.",
            where="g-core export",
            why="\n".join(lines[-_SHOWN_LINES:]),
            todo="free some space, or name another directory",
        )
    return DataError(
        f"the trainer could not export this state (rank {spec.rank}, exit code {code}).",
        where=spec.state,
        why="\n".join(lines[-_SHOWN_LINES:]),
        todo=(
            "it is loaded with the configuration that it was saved with: are its model and plugins "
            "still there?"
        ),
    )


def main() -> None:
    """Runs one rank of the trainer: loads the state, writes the weights and ends."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=_Spec)
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
        with final_weights.writing(Path(spec.to)):
            trainer.save_pretrained(Path(spec.to))
        trainer.close()
    except CheckpointError as error:
        print(error, file=sys.stderr)
        sys.exit(_UNWRITTEN)
    except GcoreError as error:  # the message alone; a traceback of ours would not help
        sys.exit(str(error))


if __name__ == "__main__":
    main()
