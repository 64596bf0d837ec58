"""Which files and packages a job names, so that every machine has the same."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcore_core.contract.launching import NodeFacts
from gcore_core.run.initial_placement import Placed
from gcore_core.run.jobs import code_packages, job_files, named_paths


def write(path: Path, content: str, age_s: float = 100.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    written_ns = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(written_ns, written_ns))
    return path


def job_of(
    config: dict[str, Any],
    directory: Path,
    *,
    files: str = "copy",
    models: dict[str, Any] | None = None,
    factories: dict[str, str] | None = None,
) -> Any:
    """What is read of a job, with the nodes node1 and node2 beside home."""
    roles = config.get("roles", {})
    hosts = {"agent.0": "", "agent.1": "node1", "agent.2": "node2"}
    return SimpleNamespace(
        plan=SimpleNamespace(
            config=config,
            provided={
                path: SimpleNamespace(spec=SimpleNamespace(factory=factory))
                for path, factory in (factories or {}).items()
            },
            settings=SimpleNamespace(
                launcher=SimpleNamespace(files=files),
                roles={
                    role: SimpleNamespace(python=node.get("python")) for role, node in roles.items()
                },
            ),
        ),
        models=models or {},
        directory=directory,
        placed=Placed(
            nodes=[NodeFacts(name=name, devices=(), host=host) for name, host in hosts.items()]
        ),
    )


def test_the_files_of_a_job_are_found_by_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is left out, as are the run's directory and what is above it. With a file of
    Python come those beside it that it imports.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("data", "made", "own.py", "known", "relative", "dumps", "sockets"):
        write(tmp_path / name, "")
    write(tmp_path / "own.py", "import beside\nfrom known import what_is_no_python")
    write(tmp_path / "beside.py", "from lying_beside.inner import x")
    write(tmp_path / "lying_beside/inner.py", "")
    write(tmp_path / "lying_beside/unused.py", "")
    run = tmp_path / "runs" / "001"
    run.mkdir(parents=True)
    config = {
        "launcher": {"config": {"socket": f"{tmp_path}/sockets"}},
        "data": {"use": f"{tmp_path}/data", "config": {"path": f"{tmp_path}/data", "n": 1}},
        "local": [f"{tmp_path}/own.py"],
        "rewards": {"exact": {"known": "./known", "config": {"above": str(tmp_path)}}},
        "roles": {
            "policy": {
                "model": {"make": {"path": f"{tmp_path}/relative"}},
                "config": {"dump_dir": f"{tmp_path}/dumps", "name": "org/model"},
                "template": f"{'word ' * 100} Is it right/wrong?",
                "scale": "~half/whole",
            }
        },
    }
    job = job_of(config, run, models={"policy": {"path": f"{tmp_path}/made", "make": {}}})
    found = {(role, Path(path).name) for role, path in named_paths(job)}
    files = {("", "data"), ("", "own.py"), ("", "known"), ("policy", "made")}
    assert found == files | {("", "beside.py"), ("", "inner.py")}


def test_packages_are_those_of_chosen_providers_in_this_interpreter() -> None:
    factories = {
        "data": "rows.deep.module:Make",
        "roles.rollout": "engine:Make",
        "rewards.own": "/some/file.py:reward",
    }
    config = {"roles": {"rollout": {"python": "/venv/bin/python"}}}
    job = job_of(config, Path("run"), factories=factories)
    assert code_packages(job) == ["gcore_core", "rows"]


def test_what_stands_below_a_role_is_for_the_nodes_of_its_workers(tmp_path: Path) -> None:
    data = str(write(tmp_path / "data", "rows"))
    model = str(write(tmp_path / "model", "weights"))
    python = str(write(tmp_path / "python", "#!"))
    config = {"data": data, "roles": {"rollout": {"config": {"path": model}, "python": python}}}
    where = {"policy.0": "agent.0", "rollout.0": "agent.1", "scorer.0": "agent.2"}
    found = job_files(job_of(config, tmp_path / "run", files="check"), where)
    assert found.paths == {
        "agent.0": {data},
        "agent.1": {data, model},
        "agent.2": {data},
    }
    assert found.interpreters == {"agent.0": set(), "agent.1": {python}, "agent.2": set()}
    assert not found.may_copy and found.host("agent.1") == "node1"
    assert found.log == tmp_path / "run" / "logs" / "supervisor.log"
