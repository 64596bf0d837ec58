"""Code that comes with a model runs only when it was asked for and cannot change meanwhile."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gcore_testing.installed import InstalledPlugins

from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PLUGIN = """
from dataclasses import dataclass
from gcore_core import hookimpl
from gcore_core.contract import providers as p

@dataclass(frozen=True)
class Remote:
    trust_remote_code: bool = False
    path: str = ""

@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(summary="-", factory="gcore_remote:Remote", config=Remote)

@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(summary="-", factory="gcore_remote:Remote", config=Remote)

@hookimpl
def gcore_rewards():
    yield p.RewardProvider(summary="-", factory="gcore_remote:Remote", config=Remote)
"""


@pytest.fixture
def problems(
    installed: InstalledPlugins, job: Callable[..., Path], tmp_path: Path
) -> Callable[..., str]:
    installed.add("remote", PLUGIN)
    (tmp_path / "local").mkdir()

    def load(model: dict[str, str], *overrides: str, role: str = "policy") -> str:
        roles = (
            "roles:\n  policy: {use: remote, model: " + str(model) + "}\n  rollout: {use: remote}\n"
        )
        file = job(roles + "rewards:\n  scalar: {use: remote}\n")
        try:
            load_plan(file, [f"roles.{role}.config.trust_remote_code=true", *overrides])
        except ConfigError as error:
            return str(error)
        return ""

    return load


@pytest.mark.parametrize(
    "revision", [None, "main", "v1.0", COMMIT[:7], COMMIT.upper(), COMMIT + "0"]
)
@pytest.mark.parametrize("role", ["policy", "rollout"])
def test_remote_code_of_a_revision_that_can_change_is_refused(
    problems: Callable[..., str], revision: Any, role: str
) -> None:
    model = {"path": "org/name"} | ({} if revision is None else {"revision": revision})
    said = problems(model, role=role)
    assert f"roles.{role}.config.trust_remote_code: the code of this model could change" in said
    assert "set model.revision to the commit (40 hex digits)" in said


@pytest.mark.parametrize("model", [{"path": "org/name", "revision": COMMIT}, {"path": "local"}])
def test_remote_code_of_a_commit_or_a_directory_is_allowed(
    problems: Callable[..., str], model: dict[str, str]
) -> None:
    assert problems(model) == ""


def test_remote_code_of_a_reward_s_model_needs_a_directory(problems: Callable[..., str]) -> None:
    pinned = {"path": "org/name", "revision": COMMIT}
    told = ["rewards.scalar.config.trust_remote_code=true"]
    assert "rewards.scalar.config.trust_remote_code" in problems(
        pinned, *told, "rewards.scalar.config.path=org/name"
    )
    assert problems(pinned, *told, "rewards.scalar.config.path=local") == ""


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Keeps the garbage collector away from ``ast.parse``.

    CPython 3.11 raises a SystemError where a collection that runs code falls into it.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_remote_code_is_off_unless_a_user_turns_it_on() -> None:
    """Every default, and every value that is written in code rather than passed on."""
    found = []
    for path in [
        *(ROOT / "plugins").rglob("*.py"),
        *(ROOT / "gcore_core").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.AnnAssign(
                    target=ast.Name(id="trust_remote_code"), value=ast.Constant(value=True)
                ):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
                case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_the_pinned_revision_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of it, in one snapshot: weights, tokenizer, code."""
    hub = pytest.importorskip("huggingface_hub")
    from gcore_language.model_files import open_model_files

    from gcore_core.contract.context import WorkerContext
    from gcore_core.contract.errors import DataError

    asked = []

    def snapshot_download(name: str, **more: Any) -> str:
        asked.append((name, more["revision"]))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    context = WorkerContext(role="policy", model={"path": "org/name", "revision": COMMIT})
    with pytest.raises(DataError, match=r"config\.json"):
        open_model_files(context)
    assert asked == [("org/name", COMMIT)]
