"""Runs a program that nobody trusts: ``python confine.py SETTINGS``, where SETTINGS is JSON.

The program's standard input and output are those of this process. The program gets name spaces of
its own: it sees no network but a loopback interface of its own, which is up only where SETTINGS has
``loopback``, no files but the interpreter (read only) and a directory in memory, and no process but
its own. Its CPU and wall-clock time,
memory, file size and number of processes are limited; of time and memory, null in SETTINGS is no
limit. This needs root, or a kernel that lets users make user name spaces.

Exit codes:
    0: the program ended.
    TIMED_OUT: it was killed when its time was over.
    FORBIDDEN: the system permits no name spaces, or no mounts in them; it was not started.
    NOT_STARTED: it could not be started for another reason.
Of the last two, standard error has the reason.

Uses the standard library only, and imports nothing of the project: it runs with ``-I``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from typing import Any

TIMED_OUT = 124
FORBIDDEN = 125
NOT_STARTED = 126
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
WORK = "/.work"  # a name that no path of the system has
_NOBODY = 65534

# Flags of unshare, from linux/sched.h.
_NEWNS = 1 << 17
_NEWUTS = 1 << 26
_NEWIPC = 1 << 27
_NEWUSER = 1 << 28
_NEWPID = 1 << 29
_NEWNET = 1 << 30
# Flags of mount, from sys/mount.h.
_RDONLY = 1
_NOSUID = 2
_NODEV = 4
_REMOUNT = 32
_BIND = 4096
_REC = 16384
_PRIVATE = 1 << 18
_RELATIME = 1 << 21
#: Flags of a mount that a user name space may not clear; statvfs reports them by the same bits.
_KEPT = 2 | 4 | 8 | 1024 | 2048
# The flag of umount2, from sys/mount.h, and options of prctl, from sys/prctl.h.
_DETACH = 2
_DEATH_SIGNAL = 1
_DUMPABLE = 4
_NO_NEW_PRIVILEGES = 38
# A request of ioctl that sets an interface's flags, from linux/sockios.h; flags, from linux/if.h.
_SET_FLAGS = 0x8914
_UP = 1
_RUNNING = 64
_LIBC = ctypes.CDLL(None, use_errno=True)
#: As many links as a path may lead through, as in the kernel.
_MOST_LINKS = 40


class Forbidden(Exception):
    """The system does not let this process confine another."""


def _check(result: int, what: str) -> None:
    """Raises Forbidden, with the C library's error, unless a call returned 0."""
    if result != 0:
        raise Forbidden(f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    _check(_LIBC.mount(*words, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def _name_spaces() -> None:
    """Gives the processes that this one starts name spaces of their own.

    A user who is not root needs a user name space for that, in which the user is mapped to itself.
    """
    uid = os.geteuid()
    gid = os.getegid()
    flags = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | (0 if uid == 0 else _NEWUSER)
    _check(_LIBC.unshare(flags), "unshare")
    if uid == 0:
        return
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError as error:
            raise Forbidden(f"{name}: {error.strerror}") from error


def _raise_loopback() -> None:
    """Brings up the loopback interface of this name space. Nothing of the machine listens there."""
    wanted = struct.pack("16sh14x", b"lo", _UP | _RUNNING)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SET_FLAGS, wanted)
    except OSError as error:
        raise Forbidden(f"loopback: {error.strerror}") from error


def _file_system(base: str, readable: list[str], mebibytes: int, driver: str) -> None:
    """Replaces the root by a file system in memory that shows what is readable and nothing else.

    base: the directory over which it is mounted.
    readable: absolute paths that are shown, read only, beside SYSTEM and DEVICES. Links on the way
        to them are there, too.
    mebibytes: how much may be written.
    driver: source text of the driver, which becomes /.driver.py.
    """
    os.umask(0o022)  # another user enters the folders that are made here
    # Private: what is mounted from here on is not passed on to the machine's other name spaces.
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", base, "tmpfs", _NOSUID | _NODEV, f"size={mebibytes}m,mode=755")
    ways = [_way(path) for path in (*SYSTEM, *DEVICES, *readable)]
    # What contains others comes before them, or its place would be taken by a folder for those.
    for path in sorted({real for _, real in ways}, key=len):
        _show(path, base)
    if os.geteuid() == 0:
        for path in readable:
            _require_open(_way(path)[1], base)
    for link, target in dict(link for links, _ in ways for link in links).items():
        place = base + link
        if not os.path.lexists(place):
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.symlink(target, place)
    for name in (WORK, "/.old"):
        os.mkdir(base + name, 0o700)
    if os.geteuid() == 0:
        with _of_nobody():
            os.chown(base + WORK, _NOBODY, _NOBODY)
    with open(base + "/.driver.py", "w") as file:
        file.write(driver)
    # The new root takes the place of the old one, which is then detached from under /.old.
    _check(_LIBC.pivot_root(os.fsencode(base), os.fsencode(base + "/.old")), "pivot_root")
    os.chdir("/")
    _check(_LIBC.umount2(b"/.old", _DETACH), "umount")


def _way(path: str) -> tuple[list[tuple[str, str]], str]:
    """Returns the links on the way to an absolute path, as (link, target), and the path behind
    them.
    """
    links: list[tuple[str, str]] = []
    left = path.split("/")[::-1]
    reached = ""
    while left:
        name = left.pop()
        if name == "..":
            reached = os.path.dirname(reached).rstrip("/")
        elif name not in ("", "."):
            place = f"{reached}/{name}"
            if os.path.islink(place) and len(links) < _MOST_LINKS:
                target = os.readlink(place)
                links.append((place, target))
                left += target.split("/")[::-1]
                reached = "" if target.startswith("/") else reached
            else:
                reached = place
    return links, reached


def _show(path: str, base: str) -> None:
    """Shows a file or a folder below the new root, read only, where it is there and not yet seen.

    path: absolute, and without links.
    """
    place = base + path
    if not os.path.exists(path) or os.path.lexists(place):
        return
    os.makedirs(place if os.path.isdir(path) else os.path.dirname(place), exist_ok=True)
    if not os.path.isdir(path):
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, place, None, _BIND | _REC)
    # A bind mount becomes read only by a second mount, which must repeat the flags that a user
    # name space may not clear. Bit 4096 of statvfs is ST_RELATIME.
    flags = os.statvfs(place).f_flag
    kept = (flags & _KEPT) | (_RELATIME if flags & 4096 else 0)
    extra = 0 if path in DEVICES else _NODEV
    _mount("none", place, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | extra | kept)


def _require_open(path: str, base: str) -> None:
    """Raises PermissionError where the user nobody may not enter a folder on the way to a path.

    A folder that is shown keeps its own mode, and what lies in it is seen through it alone.
    path: absolute, and without links.
    """
    parts = path.split("/")[1:]
    for number in range(1, len(parts) + 1):
        place = "/" + "/".join(parts[:number])
        if os.path.isdir(base + place) and not os.stat(base + place).st_mode & stat.S_IXOTH:
            raise PermissionError(f"Permission denied: nobody may not enter {place}")


def _limit(settings: dict[str, Any]) -> None:
    memory_mib = settings["memory_mib"]
    limits = {
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_AS: None if memory_mib is None else memory_mib << 20,
        resource.RLIMIT_FSIZE: settings["files_mib"] << 20,
        resource.RLIMIT_NPROC: settings["processes"],
        resource.RLIMIT_NOFILE: settings["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    if not settings["confined"]:
        del limits[resource.RLIMIT_NPROC]  # it would count all processes of this user
    for which, limit in limits.items():
        if limit is not None:
            resource.setrlimit(which, (limit, limit))


@contextlib.contextmanager
def _of_nobody() -> Iterator[None]:
    """Raises Forbidden where there is no such user: root of a container may be the only one."""
    try:
        yield
    except OSError as error:
        raise Forbidden(f"there is no user {_NOBODY}: {error.strerror}") from error


def _drop_privileges() -> None:
    """Makes root the user ``nobody``, in a user name space of its own."""
    with _of_nobody():
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    # The kernel counts, and limits, processes by user name space.
    _check(_LIBC.unshare(_NEWUSER), "unshare")


def _program(settings: dict[str, Any]) -> None:
    """Turns this process into the program, with its limits and as an unprivileged user.

    What the program prints is dropped; only the driver knows where standard output was.
    """
    if settings["confined"]:
        if os.geteuid() == 0:
            _drop_privileges()
        os.chdir(WORK)
    _check(_LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    _limit(settings)
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": os.getcwd(),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        **settings["environment"],
    }
    if not settings["shows_errors"]:
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    driver = "/.driver.py" if settings["confined"] else settings["driver"]
    words = [settings["python"], *settings["options"], driver]
    os.execve(settings["python"], words, environment)


def _start(settings: dict[str, Any]) -> int:
    """Is the first process of the name spaces: prepares them, starts the program, ends with it.

    When the first process of a process name space ends, the kernel ends all others in it.
    Returns 0 when the program has ended, else why it was not started.
    """
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if settings["confined"]:
        if settings.get("loopback"):
            _raise_loopback()
        with open(settings["driver"]) as file:
            driver = file.read()
        _file_system(settings["base"], settings["readable"], settings["files_mib"], driver)
    ready, failed = os.pipe()
    program = os.fork()
    if program == 0:
        code = NOT_STARTED
        try:
            _program(settings)
        except BaseException as error:
            code = _reported(error, failed)
        os._exit(code)
    os.close(failed)
    # The program may have the same user, and must not look into this process.
    _LIBC.prctl(_DUMPABLE, 0, 0, 0, 0)
    # The pipe closes without a word when the copy of this process is replaced by the program;
    # what can be read says why it was not.
    why = os.read(ready, 1000)
    os.write(2, why)
    for number in (0, 1):
        os.close(number)
    while (ended := os.wait())[0] != program:
        pass
    return os.waitstatus_to_exitcode(ended[1]) if why else 0


def _reported(error: BaseException, output: int = 2) -> int:
    """Writes why the program was not started, and returns the exit code for it."""
    os.write(output, str(error).encode("utf-8", "replace")[:1000])
    return FORBIDDEN if isinstance(error, Forbidden) else NOT_STARTED


def main() -> int:
    settings = json.loads(sys.argv[1])
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    try:
        if settings["confined"]:
            _name_spaces()
        first = os.fork()
    except (Forbidden, OSError) as error:
        return _reported(error)
    if first == 0:
        code = NOT_STARTED
        try:
            code = _start(settings)
        except BaseException as error:
            code = _reported(error)
        os._exit(code)
    os.close(1)
    waiting = select.poll()
    waiting.register(os.pidfd_open(first), select.POLLIN)
    time_s = settings["time_s"]
    if not waiting.poll(None if time_s is None else 1000 * time_s):
        os.kill(first, signal.SIGKILL)  # the kernel ends all others of its name space
        os.waitpid(first, 0)
        return TIMED_OUT
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
