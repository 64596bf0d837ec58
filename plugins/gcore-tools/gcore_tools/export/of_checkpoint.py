"""Writes the weights of a checkpoint in Hugging Face layout, for ``g-core export RUN --step N``.

The trainer itself loads its saved state and writes the weights, so every backend keeps a format of
its own. It runs in the interpreter of the role: one process for each slot of one replica, see
``gcore_tools.export.ranks``.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract.errors import ConfigError, DataError, GcoreError, did_you_mean
from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.traits import traits_of
from gcore_core.kits.commands import open_interpreter, trained_roles
from gcore_core.kits.models import make_model, models_cache
from gcore_core.kits.runs import open_checkpoint, saved_plan
from gcore_tools.export import ranks as of_ranks
from gcore_tools.export.of_run import write_whole
from gcore_tools.export.ranks import UNWRITTEN, Spec

_SHOWN_LINES = 3
_POLL_S = 0.1


def export_step(run_dir: Path, step: int, to: Path, role: str = POLICY) -> int:
    """Writes the weights that the checkpoint of ``step`` holds to the new directory ``to``.

    role: whose weights; a role that is trained.
    Returns their size in bytes. Raises CheckpointError unless the checkpoint is whole, DataError
    when the trainer cannot load it, ConfigError when ``to`` exists or the configuration that the
    checkpoint was saved with no longer resolves.
    """
    checkpoint = open_checkpoint(run_dir, step)
    plan = saved_plan(checkpoint)
    _check_role(role, trained_roles(plan))
    state = checkpoint / role
    node = plan.settings.roles[role]
    backend = plan.factory(f"roles.{role}")
    own = f"roles.{role}.objective"
    objective = plan.factory(own if own in plan.provided else "objective")
    python = open_interpreter(node.python, where=f"roles.{role}.python").python
    ranks = traits_of(plan.objects[f"roles.{role}"]).replica_slots

    def write(fresh: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="g-core-") as folder:
            specs = [
                Spec(
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


def _run(python: str, specs: list[Spec], folder: Path) -> None:
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
    # As text: the interpreter of an engine has the core and its plugin, and not this distribution.
    command = [python, "-c", Path(of_ranks.__file__).read_text(encoding="utf-8")]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)


def _hand_over(spec: Spec, child: subprocess.Popen[bytes]) -> None:
    if child.stdin is None:
        raise RuntimeError("the child has no pipe")
    # Where its end of the pipe is closed, it ended at once: its exit code and log say why.
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        pipe.write(msgspec.json.encode(spec))


def _failure(spec: Spec, code: int, log: Path) -> GcoreError:
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    if code == UNWRITTEN:
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
