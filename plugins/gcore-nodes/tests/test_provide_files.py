"""Before a worker starts every node has the files of its job, or the run is refused with a list."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gcore_nodes import provide_files

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.launching import NodeFacts
from gcore_core.contract.site_files import Show
from gcore_core.run.initial_placement import Placed
from gcore_core.run.jobs import job_files
from tests.support.disks import DiskSite, disks

NODES = {"agent.0": "home", "agent.1": "one", "agent.2": "two"}
WHERE = {"policy.0": "agent.0", "rollout.0": "agent.1", "scorer.0": "agent.2"}


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


async def provide(job: Any, site: DiskSite, show: Show) -> None:
    """Has the nodes of a site have the files of a job, as the supervisor does."""
    await site.files.provide(job_files(job, site.where), show)


def quiet(text: str, share: float | None) -> None:
    pass


async def refused(site: DiskSite, job: Any) -> list[str]:
    """Returns the list with which a job is refused."""
    with pytest.raises(ConfigError) as error:
        await provide(job, site, quiet)
    assert error.value.where == "launcher.files"
    faults: list[str] = error.value.facts["faults"]
    return [fault.replace(f"{site.root}/", "") for fault in faults]


async def test_what_a_node_does_not_have_is_copied_there(tmp_path: Path) -> None:
    with disks(tmp_path, NODES, WHERE) as site:
        data = write(site.root / "data.jsonl", "rows")
        model = write(site.root / "model" / "deep" / "weights", "weights").parent.parent
        config = {
            "data": {"config": {"path": str(data)}},
            "rewards": {"own": {"config": {"files": [str(write(site.root / "f.py", "code"))]}}},
            "roles": {"rollout": {"config": {"reference_path": str(model)}}},
        }
        told: list[str] = []
        job = job_of(config, site.root / "run")
        await provide(job, site, lambda text, share: told.append(text))
        for node in ("agent.1", "agent.2"):
            assert (site.roots[node] / "data.jsonl").read_text() == "rows"
            assert (site.roots[node] / "f.py").read_text() == "code"
        assert (site.roots["agent.1"] / "model" / "deep" / "weights").read_text() == "weights"
        assert not (site.roots["agent.2"] / "model").exists(), "no worker of the role is there"
        assert "copying 5 files to node1, node2, 23 B" in told


async def test_with_check_what_is_missing_refuses_the_run(tmp_path: Path) -> None:
    with disks(tmp_path, NODES, WHERE) as site:
        data = write(site.root / "data.jsonl", "rows")
        job = job_of({"data": {"path": str(data)}}, site.root / "run", files="check")
        faults = await refused(site, job)
        assert faults == ["node1: data.jsonl: is missing", "node2: data.jsonl: is missing"]
        assert not (site.roots["agent.1"] / "data.jsonl").exists()


async def test_a_file_that_differs_refuses_the_run_before_anything_is_copied(
    tmp_path: Path,
) -> None:
    with disks(tmp_path, NODES, WHERE) as site:
        paths = [write(site.root / name, "of home") for name in ("a", "b", "c")]
        write(site.roots["agent.1"] / "a", "of node1 itself")
        write(site.roots["agent.2"] / "b", "no home")
        faults = await refused(site, job_of({"data": [str(p) for p in paths]}, site.root / "run"))
        assert faults[0] == "node1: a: differs: 15 bytes, at home 7"
        assert faults[1].startswith("node2: b: differs: SHA-256 ")
        assert len(faults) == 2
        assert (site.roots["agent.1"] / "a").read_text() == "of node1 itself"
        assert not (site.roots["agent.1"] / "c").exists()


async def test_the_same_content_under_another_time_is_the_same_file(tmp_path: Path) -> None:
    with disks(tmp_path, NODES, WHERE) as site:
        data = write(site.root / "data", "rows")
        for node in ("agent.1", "agent.2"):
            write(site.roots[node] / "data", "rows", age_s=7)
        await provide(job_of({"data": str(data)}, site.root / "run"), site, quiet)


async def test_a_file_on_a_disk_that_is_shared_is_not_read(tmp_path: Path) -> None:
    with disks(tmp_path, NODES, WHERE) as site:
        data = write(site.root / "data", "rows")
        for node in ("agent.1", "agent.2"):
            os.link(data, site.roots[node] / "data")
        await provide(job_of({"data": str(data)}, site.root / "run"), site, quiet)
        asked = {name for peer in site.peers.values() for name in peer.asked}
        assert "list_files" in asked
        hashes = [peer.asked.count("hash_files") for peer in site.peers.values()]
        assert hashes == [1, 0, 0]  # home was asked for none


async def test_a_copy_of_an_earlier_run_follows_what_is_changed_at_home(tmp_path: Path) -> None:
    with disks(tmp_path, NODES, WHERE) as site:
        code = write(site.root / "reward.py", "first")
        job = job_of({"data": str(code)}, site.root / "run")
        await provide(job, site, quiet)
        write(code, "second, which is longer")
        await provide(job, site, quiet)
        assert (site.roots["agent.1"] / "reward.py").read_text() == "second, which is longer"
        write(site.roots["agent.1"] / "reward.py", "changed by somebody on node1")
        assert await refused(site, job) == ["node1: reward.py: differs: 28 bytes, at home 23"]


async def test_with_check_a_copy_of_an_earlier_run_is_not_replaced(tmp_path: Path) -> None:
    with disks(tmp_path, NODES, WHERE) as site:
        code = write(site.root / "reward.py", "first")
        await provide(job_of({"data": str(code)}, site.root / "run"), site, quiet)
        write(code, "second")
        faults = await refused(site, job_of({"data": str(code)}, site.root / "run", files="check"))
        assert faults[0] == "node1: reward.py: differs: 5 bytes, at home 6"


async def test_a_file_that_only_a_node_has_refuses_the_run(tmp_path: Path) -> None:
    """A loader that takes whatever is in a directory would read another model there."""
    with disks(tmp_path, NODES, WHERE) as site:
        write(site.root / "model" / "a.safetensors", "a")
        write(site.roots["agent.1"] / "model" / "b.safetensors", "b")
        job = job_of({"data": {"path": str(site.root / "model")}}, site.root / "run")
        assert await refused(site, job) == ["node1: model/b.safetensors: is there and not at home"]


async def test_a_place_that_cannot_be_written_is_in_the_list(tmp_path: Path) -> None:
    with disks(tmp_path, NODES, WHERE) as site:
        data = write(site.root / "data" / "rows", "rows")
        (site.roots["agent.2"] / "data").symlink_to("nowhere")
        faults = await refused(site, job_of({"data": str(data)}, site.root / "run"))
        assert faults == ["node2: data/rows: it cannot be written: File exists"]


async def test_an_interpreter_is_looked_for_and_never_copied(tmp_path: Path) -> None:
    with disks(tmp_path, NODES, WHERE) as site:
        python = write(site.root / "venv" / "python", "#!")
        job = job_of({"roles": {"rollout": {"python": str(python)}}}, site.root / "run")
        faults = await refused(site, job)
        assert faults == ["node1: venv/python: the interpreter is missing; it is not copied"]
        write(site.roots["agent.1"] / "venv" / "python", "another build")
        await provide(job, site, quiet)


async def test_code_that_is_installed_is_compared_and_never_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not that of observers, which run at home alone."""
    with disks(tmp_path, NODES, WHERE) as site:
        digests = {"agent.1": {"some_plugin": "2"}, "agent.2": {"some_plugin": ""}}

        async def hash_packages(self: Any, request: Any, call: Any) -> dict[str, str]:
            same = dict.fromkeys(request.packages, "1")
            return same | digests.get(self._name, {})

        monkeypatch.setattr("gcore_nodes.node_files.NodeFiles.hash_packages", hash_packages)
        digests["agent.1"]["some_tracker"] = "2"
        factories = {"data": "some_plugin.data:Rows", "observers.one": "some_tracker:Tracker"}
        job = job_of({}, site.root / "run", factories=factories)
        assert await refused(site, job) == [
            "node1: some_plugin: its code is not the same as at home; install the same one there",
            "node2: some_plugin: is missing; install the same one there",
        ]


async def test_a_long_list_is_in_the_log_and_begins_in_the_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disks(tmp_path, NODES, WHERE) as site:
        for number in range(5):
            write(site.root / "data" / f"{number}", "rows")
        job = job_of({"data": str(site.root / "data")}, site.root / "run", files="check")
        with pytest.raises(ConfigError) as error:
            await provide(job, site, quiet)
        lines = str(error.value).splitlines()
        assert lines[0] == "launcher.files: 10 files on other machines cannot be used as they are"
        assert lines[1] == f"  node1: {site.root}/data/0: is missing"
        assert lines[4] == f"  and 7 more, all in {site.root}/run/logs/supervisor.log"
        assert caplog.text.count("is missing") == 10


async def test_a_directory_with_too_many_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provide_files, "_MOST_FILES", 2)
    with disks(tmp_path, NODES, WHERE) as site:
        for number in range(3):
            write(site.root / "big" / f"{number}", "")
        small = write(site.root / "small", "")
        config = {"data": [str(site.root / "big"), str(small)]}
        with pytest.raises(ConfigError, match="directories with 4 files") as error:
            await provide(job_of(config, site.root / "run"), site, quiet)
        assert error.value.where == str(site.root / "big")
