"""Broken ways to join the disks and the stores of machines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from gcore_testing.contracts.remote_store import JoinedNodes, RemoteStoreContract
from gcore_testing.contracts.site_files import Disks, SiteFilesContract

from gcore_core.contract.records import Ref
from gcore_core.contract.remote_store import MirrorRequest
from gcore_core.contract.site_files import OneDisk
from tests.support.joined_nodes import joined_disks, joined_nodes


class CleanDisks(SiteFilesContract):
    caught_by: ClassVar[tuple[str, ...]] = ()

    @contextlib.contextmanager
    def disks(self, directory: Path) -> Iterator[Disks]:
        with joined_disks(directory) as disks:
            self.spoil(disks.files)
            yield disks

    def spoil(self, files: Any) -> None:
        """Breaks what is tested."""


class GivesTheJobsFilesToNobody(CleanDisks):
    caught_by = ("test_every_machine_gets_what_the_job_names",)

    def spoil(self, files: Any) -> None:
        files.provide = OneDisk().provide


class LeavesNewFilesWhereTheyAre(CleanDisks):
    caught_by = ("test_all_that_machines_write_comes_home",)

    def spoil(self, files: Any) -> None:
        files.collect_all = OneDisk().collect_all


class LosesTheLastLines(CleanDisks):
    caught_by = ("test_all_that_machines_write_comes_home",)

    def spoil(self, files: Any) -> None:
        async def nothing() -> bool:
            return True

        files.drain = nothing


class LeavesPartsOfCheckpointsOut(CleanDisks):
    caught_by = ("test_the_parts_of_a_checkpoint_come_home",)

    def spoil(self, files: Any) -> None:
        files.collect = OneDisk().collect


class SendsNoPartOfACheckpoint(CleanDisks):
    caught_by = ("test_who_loads_a_part_of_a_checkpoint_has_it",)

    def spoil(self, files: Any) -> None:
        files.send = OneDisk().send


class CleanStores(RemoteStoreContract):
    caught_by: ClassVar[tuple[str, ...]] = ()

    @contextlib.contextmanager
    def nodes(self, directory: Path) -> Iterator[JoinedNodes]:
        with joined_nodes(directory) as nodes:
            self.spoil(nodes)
            yield nodes

    def spoil(self, nodes: Any) -> None:
        """Breaks what is tested."""


class BringsNothing(CleanStores):
    caught_by = ("test_what_the_run_did_not_sign_is_not_given",)

    def spoil(self, nodes: Any) -> None:
        nodes.near.file_of = lambda ref: nodes.near.directory / ref.slab


class SkipsTheLastByte(CleanStores):
    caught_by = ("test_a_content_of_another_node_comes_whole",)

    def spoil(self, nodes: Any) -> None:
        fetch = nodes.remote.fetch

        async def short(ref: Ref, memory: memoryview, *args: Any, **settings: Any) -> None:
            await fetch(ref, memory, *args, **settings)
            memory[-1] ^= 1

        nodes.remote.fetch = short


class AnswersForEverybody(CleanStores):
    caught_by = ("test_a_node_that_nobody_knows_is_refused",)

    def spoil(self, nodes: Any) -> None:
        addresses = nodes.remote.client._addresses
        nodes.remote.client._addresses = {**addresses, "nobody": addresses["near"]}


class MirrorsAtTheFront(CleanStores):
    caught_by = ("test_a_bucket_of_a_push_lies_where_it_lay",)

    def spoil(self, nodes: Any) -> None:
        mirror = nodes.remote.mirror

        async def moved(bucket: MirrorRequest, progress: Callable[[], None]) -> str:
            path = Path(await mirror(bucket, progress))
            path.write_bytes(path.read_bytes()[bucket.offset :])
            return str(path)

        nodes.remote.mirror = moved
