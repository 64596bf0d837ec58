"""What joins several machines holds the contracts of the core's seams."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from gcore_testing.contracts.remote_store import JoinedNodes, RemoteStoreContract
from gcore_testing.contracts.site_files import Disks, SiteFilesContract

from tests.support.joined_nodes import joined_disks, joined_nodes


class TestJoinedDisks(SiteFilesContract):
    def disks(self, directory: Path) -> AbstractContextManager[Disks]:
        return joined_disks(directory)


class TestJoinedStores(RemoteStoreContract):
    def nodes(self, directory: Path) -> AbstractContextManager[JoinedNodes]:
        return joined_nodes(directory)
