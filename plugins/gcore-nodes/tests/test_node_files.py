"""Files of a node: what another node fetches is there whole or not at all, and nothing that
somebody put there is lost.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import Any

import pytest
from gcore_nodes import node_files
from gcore_nodes.messages import (
    FileFacts,
    HashedFile,
    HashFiles,
    ListFiles,
    ReadGrown,
    ReceiveFile,
    RemoveFiles,
)
from gcore_nodes.node_files import NodeFiles, package_digest

from gcore_core.contract.errors import DataError
from gcore_core.wire.service import Call
from tests.support.disks import DiskSite, disks

NODES = {"agent.0": "home", "agent.1": "other"}
SIZE = 3 << 20


async def hashed(files: NodeFiles, path: Path) -> HashedFile:
    items = [item async for item in files.hash_files(HashFiles([str(path)]), Call(lambda: None))]
    return items[-1]


async def listed(files: NodeFiles, *paths: Path, everything: bool = False) -> list[FileFacts]:
    request = ListFiles([str(path) for path in paths], everything)
    return await files.list_files(request, Call(lambda: None))


async def receive(files: NodeFiles, request: ReceiveFile) -> None:
    async for _ in files.receive_file(request, Call(lambda: None)):
        pass


def write(path: Path, content: bytes, age_s: float = 100.0) -> Path:
    """Writes a file that has not changed for a while."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    set_age(path, age_s)
    return path


def set_age(path: Path, age_s: float) -> None:
    written_ns = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(written_ns, written_ns))


async def request_for(site: DiskSite, source: Path, target: Path, **settings: Any) -> ReceiveFile:
    """Returns what asks a node for a file of home's."""
    home = site.peers["agent.0"].files
    item = await hashed(home, source)
    (facts,) = await listed(home, source)
    return ReceiveFile(
        path=str(target),
        node="agent.0",
        sha256=item.sha256,
        nbytes=facts.nbytes,
        mode=facts.mode,
        mtime_ns=facts.mtime_ns,
        **settings,
    )


@pytest.mark.parametrize("size", [0, 1, SIZE])
async def test_a_file_arrives_as_it_is_with_its_mode_and_time(tmp_path: Path, size: int) -> None:
    content = secrets.token_bytes(size)
    with disks(tmp_path, NODES) as site:
        source = write(site.roots["agent.0"] / "file", content)
        source.chmod(0o640)
        target = site.roots["agent.1"] / "deep" / "down" / "file"
        await receive(site.peers["agent.1"].files, await request_for(site, source, target))
        assert target.read_bytes() == content
        assert target.stat().st_mode & 0o777 == 0o640
        assert target.stat().st_mtime_ns == source.stat().st_mtime_ns
        assert os.listdir(target.parent) == ["file"]


async def test_a_copy_that_broke_off_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_files, "_PIECE_BYTES", 1 << 20)
    content = secrets.token_bytes(SIZE)
    with disks(tmp_path, NODES) as site:
        source = write(site.roots["agent.0"] / "file", content)
        target = site.roots["agent.1"] / "file"
        files = site.peers["agent.1"].files
        request = await request_for(site, source, target)
        receiving = files.receive_file(request, Call(lambda: None))
        await anext(receiving)
        await receiving.aclose()
        assert not target.exists()
        sent_before = site.servers["agent.0"].sent_bytes
        await receive(files, request)
        assert target.read_bytes() == content
        assert site.servers["agent.0"].sent_bytes - sent_before == SIZE - (1 << 20)


async def test_a_damaged_part_is_found_and_the_next_try_begins_anew(tmp_path: Path) -> None:
    with disks(tmp_path, NODES) as site:
        source = write(site.roots["agent.0"] / "file", b"good")
        target = site.roots["agent.1"] / "file"
        files = site.peers["agent.1"].files
        request = await request_for(site, source, target)
        (target.parent / f".{request.sha256[:32]}.part").write_bytes(b"ba")
        with pytest.raises(DataError, match="not what was hashed"):
            await receive(files, request)
        assert not target.exists()
        await receive(files, request)
        assert target.read_bytes() == b"good"


async def test_a_file_that_changes_while_it_is_copied_is_not_put_in_place(tmp_path: Path) -> None:
    with disks(tmp_path, NODES) as site:
        source = write(site.roots["agent.0"] / "file", b"before")
        target = site.roots["agent.1"] / "file"
        request = await request_for(site, source, target)
        source.write_bytes(b"behind")
        with pytest.raises(DataError) as error:
            await receive(site.peers["agent.1"].files, request)
        assert error.value.why == "the file was changed in between"
        assert not target.exists()


async def test_nothing_is_written_over(tmp_path: Path) -> None:
    with disks(tmp_path, NODES) as site:
        source = write(site.roots["agent.0"] / "file", b"of home")
        target = write(site.roots["agent.1"] / "file", b"of others")
        files = site.peers["agent.1"].files
        with pytest.raises(DataError, match="something else is there"):
            await receive(files, await request_for(site, source, target))
        assert target.read_bytes() == b"of others"
        await receive(files, await request_for(site, source, target, replaces=True))
        assert target.read_bytes() == b"of home"


async def test_what_appears_while_a_copy_comes_stays(tmp_path: Path) -> None:
    with disks(tmp_path, NODES) as site:
        source = write(site.roots["agent.0"] / "file", b"of home")
        target = site.roots["agent.1"] / "file"
        request = await request_for(site, source, target)
        receiving = site.peers["agent.1"].files.receive_file(request, Call(lambda: None))
        await anext(receiving)
        target.write_bytes(b"of others")
        with pytest.raises(DataError, match="something else is there"):
            await anext(receiving)
        assert target.read_bytes() == b"of others"
        assert os.listdir(target.parent) == ["file"]


async def test_two_who_fetch_the_same_do_not_write_into_one_part(tmp_path: Path) -> None:
    with disks(tmp_path, NODES) as site:
        source = write(site.roots["agent.0"] / "file", b"content")
        target = site.roots["agent.1"] / "file"
        files = site.peers["agent.1"].files
        request = await request_for(site, source, target)
        first = files.receive_file(request, Call(lambda: None))
        await anext(first)
        await receive(files, await request_for(site, source, target))
        assert target.read_bytes() == b"content"
        with pytest.raises(DataError, match="something else is there"):
            await anext(first)


async def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with disks(tmp_path, NODES) as site:
        source = write(site.roots["agent.0"] / "file", b"content")
        in_the_way = write(site.roots["agent.1"] / "file", b"no directory")
        request = await request_for(site, source, in_the_way / "file")
        with pytest.raises(DataError, match="it cannot be written") as error:
            await receive(site.peers["agent.1"].files, request)
        assert error.value.where == str(in_the_way / "file")


async def test_only_what_was_hashed_is_given_to_other_nodes(tmp_path: Path) -> None:
    with disks(tmp_path, NODES) as site:
        write(site.roots["agent.0"] / "secret", b"secret")
        sha256 = hashlib.sha256(b"secret").hexdigest()
        target = site.roots["agent.1"] / "file"
        request = ReceiveFile(str(target), "agent.0", sha256, 6, 0o600, 0)
        with pytest.raises(DataError, match="no such file"):
            await receive(site.peers["agent.1"].files, request)


async def test_a_file_that_has_not_changed_is_hashed_once(tmp_path: Path) -> None:
    """By size, time of change and inode: a file that was put in its place is hashed again."""
    with disks(tmp_path, NODES) as site:
        files = site.peers["agent.0"].files
        path = write(tmp_path / "model", b"1" * SIZE)
        first = await hashed(files, path)
        assert first.sha256 == hashlib.sha256(b"1" * SIZE).hexdigest()
        written_ns = path.stat().st_mtime_ns
        with path.open("r+b") as file:  # as nobody does: only so it shows that it is not read
            file.write(b"2")
        os.utime(path, ns=(written_ns, written_ns))
        assert (await hashed(files, path)).sha256 == first.sha256
        set_age(path, 50)
        changed = hashlib.sha256(b"2" + b"1" * (SIZE - 1)).hexdigest()
        assert (await hashed(files, path)).sha256 == changed


async def test_a_file_that_may_still_change_is_hashed_again(tmp_path: Path) -> None:
    with disks(tmp_path, NODES) as site:
        files = site.peers["agent.0"].files
        path = write(tmp_path / "model", b"1" * SIZE, age_s=0)
        written_ns = path.stat().st_mtime_ns
        await hashed(files, path)
        path.write_bytes(b"2" * SIZE)
        os.utime(path, ns=(written_ns, written_ns))
        assert (await hashed(files, path)).sha256 == hashlib.sha256(b"2" * SIZE).hexdigest()


async def test_a_copy_is_known_as_one_until_somebody_changes_it(tmp_path: Path) -> None:
    with disks(tmp_path, NODES) as site:
        source = write(site.roots["agent.0"] / "file", b"content")
        target = site.roots["agent.1"] / "file"
        files = site.peers["agent.1"].files
        await receive(files, await request_for(site, source, target, is_input=True))
        assert (await hashed(files, target)).is_copy
        set_age(target, 10)  # touched, and the same
        assert (await hashed(files, target)).is_copy
        write(target, b"changed")
        assert not (await hashed(files, target)).is_copy


async def test_a_directory_is_listed_with_all_that_is_read_of_it(tmp_path: Path) -> None:
    with disks(tmp_path, NODES) as site:
        files = site.peers["agent.0"].files
        write(tmp_path / "data" / "b" / "rows", b"12")
        write(tmp_path / "data" / "a", b"1")
        write(tmp_path / "data" / ".cache" / "x", b"")
        write(tmp_path / "data" / "__pycache__" / "x.pyc", b"")
        write(tmp_path / "elsewhere", b"123")
        (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
        found = await listed(files, tmp_path / "data", tmp_path / "missing")
        names = [(Path(facts.path).name, facts.nbytes) for facts in found]
        assert names == [("a", 1), ("link", 3), ("rows", 2)]
        assert len(await listed(files, tmp_path / "data", everything=True)) == 5


async def test_nothing_is_removed_where_the_marker_of_home_is_seen(tmp_path: Path) -> None:
    with disks(tmp_path, NODES) as site:
        files = site.peers["agent.1"].files
        marker = write(tmp_path / "marker", b"")
        parts = write(tmp_path / "parts" / "file", b"1").parent
        await files.remove_files(RemoveFiles([str(parts)], str(marker)), Call(lambda: None))
        assert parts.exists()
        marker.unlink()
        await files.remove_files(RemoveFiles([str(parts)], str(marker)), Call(lambda: None))
        assert not parts.exists()


async def test_what_was_appended_is_read_once_and_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_files, "_GROWN_BYTES", 5)
    with disks(tmp_path, NODES) as site:
        files = site.peers["agent.1"].files
        write(tmp_path / "logs" / "a.log", b"0123456789")
        write(tmp_path / "logs" / "other.txt", b"not this")
        positions = {"logs/a.log": 2}
        pieces = []
        while news := await files.read_grown(
            ReadGrown(str(tmp_path), ["logs/*.log"], positions), Call(lambda: None)
        ):
            for grown in news:
                assert grown.start == positions[grown.path]
                positions[grown.path] += len(grown.content)
                pieces.append(grown.content)
        assert pieces == [b"23456", b"789"]


def test_the_digest_of_a_package_is_that_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = write(tmp_path / "some_package" / "__init__.py", b"1/0  # it is not imported").parent
    monkeypatch.syspath_prepend(tmp_path)
    first = package_digest("some_package")
    write(package / "__pycache__" / "x.pyc", b"")
    assert package_digest("some_package") == first != ""
    write(package / "more.py", b"")
    assert package_digest("some_package") != first
    assert package_digest("no_such_package") == ""
