"""The contract of ``SiteFiles``: every machine gets what it must have, and all comes home."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from gcore_core.contract import run_files
from gcore_core.contract.site_files import JobFiles, SiteFiles
from gcore_testing.contracts.base import Contract, in_loop

STEP = "step-000001"


@dataclass(frozen=True, kw_only=True)
class Disks:
    """Holds what is tested, and where its disks are.

    files: what joins them.
    home: a directory at home. The job's files and the run are below it.
    others: node -> that directory on the node's disk, as this process reaches it; those of nodes
        besides home.
    where: process -> its node, one process a node.
    """

    files: SiteFiles
    home: Path
    others: Mapping[str, Path] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)


class SiteFilesContract(Contract):
    """To test what joins the disks of a site, override ``disks``."""

    kind: ClassVar[str] = "site files"

    def disks(self, directory: Path) -> AbstractContextManager[Disks]:
        """Makes what is tested, with disks below an empty directory."""
        raise NotImplementedError

    @in_loop
    async def test_every_machine_gets_what_the_job_names(self, tmp_path: Path) -> None:
        with self.disks(tmp_path) as disks:
            data = disks.home / "data.jsonl"
            data.write_text("rows\n")
            named = dict.fromkeys(disks.others, frozenset({str(data)}))
            await disks.files.provide(JobFiles(paths=named), lambda text, share: None)
            for place in (disks.home, *disks.others.values()):
                assert (place / data.name).read_text() == "rows\n"

    @in_loop
    async def test_all_that_machines_write_comes_home(self, tmp_path: Path) -> None:
        """Lines that are appended, and other files; what home has stays as it is."""
        with self.disks(tmp_path) as disks:
            run = disks.home / "run"
            run.mkdir()
            (run / run_files.METRICS).write_text("of home\n")
            async with disks.files.follow(run):
                for node, place in disks.others.items():
                    _write(place / "run" / "logs" / f"{node}.log", f"{node} ends\n")
                    _write(place / "run" / run_files.WEIGHTS / node, node)
                await disks.files.collect_all()
                for node in disks.others:
                    assert (run / run_files.WEIGHTS / node).read_text() == node
            for node in disks.others:
                assert (run / "logs" / f"{node}.log").read_text() == f"{node} ends\n"
            assert (run / run_files.METRICS).read_text() == "of home\n"

    @in_loop
    async def test_the_parts_of_a_checkpoint_come_home(self, tmp_path: Path) -> None:
        """They come from directories that are made on every disk. What was removed does not."""
        with self.disks(tmp_path) as disks:
            part = disks.home / "run" / run_files.CHECKPOINTS / STEP / "policy"
            part.mkdir(parents=True)
            async with disks.files.follow(disks.home / "run"):
                for place in disks.others.values():
                    _write(place / part.relative_to(disks.home) / "of-a-lost-attempt", "")
                await disks.files.remove(part)
                await disks.files.make(part)
                for node, place in disks.others.items():
                    there = place / part.relative_to(disks.home)
                    assert there.is_dir()
                    (there / node).write_text(node)
                await disks.files.collect(part.parent)
            assert {path.name for path in part.iterdir()} == set(disks.others)
            assert all((part / node).read_text() == node for node in disks.others)

    @in_loop
    async def test_who_loads_a_part_of_a_checkpoint_has_it(self, tmp_path: Path) -> None:
        with self.disks(tmp_path) as disks:
            part = disks.home / "run" / run_files.CHECKPOINTS / STEP / "policy"
            _write(part / "weights", "trained")
            async with disks.files.follow(disks.home / "run"):
                await disks.files.send({part: list(disks.where)})
                for node in {*disks.where.values()} & disks.others.keys():
                    there = disks.others[node] / part.relative_to(disks.home)
                    assert (there / "weights").read_text() == "trained"
            assert (part / "weights").read_text() == "trained"


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
