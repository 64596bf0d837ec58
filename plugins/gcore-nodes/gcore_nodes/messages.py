"""Defines what the processes of a run on several machines ask the agent of a node.

Every agent of such a run is a ``MachineAgent``, which answers these and all that another agent
does.
"""

from __future__ import annotations

from gcore_core.contract.deadlines import Wait
from gcore_core.contract.launching import Endpoint, StreamEndpoint
from gcore_core.kits.launching import Message, Nothing


class HoldLease(Message):
    """Takes a node agent's lease for as long as the stream stands.

    pid: of the supervisor, for the log.
    """

    pid: int


END_WORKERS = Endpoint("end_workers", Nothing, Nothing)
HOLD_LEASE = StreamEndpoint("hold_lease", HoldLease, Nothing, Wait.EVER)
LEAVING = StreamEndpoint("leaving", Nothing, Nothing, Wait.EVER)


# -- files of nodes --------------------------------------------------------------------------------


class FileFacts(Message):
    """Says what the system knows of a file, without reading it.

    path: absolute, as it was asked for; below a directory that was asked for, with that in front.
    mtime_ns: when it was written last.
    inode: which file of its disk it is.
    mode: its permission bits.
    fault: why it cannot be read; "" for a file that can be.
    """

    path: str
    nbytes: int
    mtime_ns: int
    inode: int
    mode: int
    fault: str = ""


class ListFiles(Message):
    """Asks for files, and for all files below directories. What is not there is left out.

    everything: also files whose names, or those of their directories, begin with a dot, and caches
        of Python.
    """

    paths: list[str]
    everything: bool = False


class HashFiles(Message):
    """Asks for the SHA-256 of files. The node gives them to other nodes of the run from then on."""

    paths: list[str]


class HashedFile(Message):
    """Says how far the hash of a file is.

    hashed_bytes: how much was read so far.
    sha256: in hexadecimal; "" while it is not known yet.
    is_copy: the run or one before it has copied the file to this node, and nobody has changed it.
    fault: why the file cannot be read; it is its last item then.
    """

    path: str
    hashed_bytes: int
    sha256: str = ""
    is_copy: bool = False
    fault: str = ""


class HashPackages(Message):
    """Asks for a digest of the Python code of packages, by name, as this interpreter finds them."""

    packages: list[str]


class ReceiveFile(Message):
    """Asks a node to fetch a file from another one.

    path: where it goes.
    node: who has hashed it, and gives it.
    sha256, nbytes: of its content.
    mode: its permission bits.
    mtime_ns: when it was written last there.
    replaces: whether it may take the place of a file that is there.
    is_input: it is a file that the job names; the node remembers that it is a copy.
    """

    path: str
    node: str
    sha256: str
    nbytes: int
    mode: int
    mtime_ns: int
    replaces: bool = False
    is_input: bool = False


class ReceivedBytes(Message):
    nbytes: int  # of the file, so far


class MakeDirectory(Message):
    """Asks for a directory, with those above it.

    marker: name of an empty file to make in it; "" for none.
    """

    path: str
    marker: str = ""


class RemoveFiles(Message):
    """Asks to remove files, and directories with all in them. What is not there is no error.

    unless: path of a file. Where it is there, nothing is removed: the disk is then the one of
        somebody who has to keep what stands there.
    """

    paths: list[str]
    unless: str


class ReadGrown(Message):
    """Asks for what was appended to files.

    directory: where they are.
    patterns: what the files are called, relative to it, with ``*``.
    positions: path relative to it -> how many bytes of the file are known.
    """

    directory: str
    patterns: list[str]
    positions: dict[str, int]


class Grown(Message):
    """Carries bytes that were appended to a file.

    path: relative to the directory that was asked for.
    start: where in the file they begin.
    """

    path: str
    start: int
    content: bytes


LIST_FILES = Endpoint("list_files", ListFiles, list[FileFacts], Wait.WORK)
HASH_FILES = StreamEndpoint("hash_files", HashFiles, HashedFile, Wait.WORK)
HASH_PACKAGES = Endpoint("hash_packages", HashPackages, dict[str, str], Wait.WORK)
RECEIVE_FILE = StreamEndpoint("receive_file", ReceiveFile, ReceivedBytes, Wait.WORK)
MAKE_DIRECTORY = Endpoint("make_directory", MakeDirectory, Nothing, Wait.SOON)
REMOVE_FILES = Endpoint("remove_files", RemoveFiles, Nothing, Wait.WORK)
READ_GROWN = Endpoint("read_grown", ReadGrown, list[Grown], Wait.SOON)
