"""Runs a program that nobody trusts: ``python confine.py SETTINGS``, where SETTINGS is JSON.

The program's standard input and output are those of this process. The program gets name spaces of
its own: it sees no network but a loopback interface that is down, no files but the interpreter
(read only) and a directory in memory, and no process but its own. Its CPU and wall-clock time,
memory, file size and number of processes are limited. This needs root, or a kernel that lets users
make user name spaces.

Exit codes:
    0: the program ended.
    TIMED_OUT: it was killed when its time was over.
    NOT_CONFINED: it was not started; the reason is on standard error.

Uses the standard library only, and imports nothing of the project: it runs with ``-I``.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
from typing import Any

TIMED_OUT = 124
NOT_CONFINED = 125
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
_LIBC = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    """Raises OSError, with the C library's error, unless a call returned 0."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    _check(_LIBC.mount(*words, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def _name_spaces() -> None:
    """Gives the processes that this one starts name spaces of their own.

    A user who is not root needs a user name space for that, in which the user is mapped to itself.
    """
    uid = os.geteuid()
    gid = os.getegid()
    flags = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | (0 if uid == 0 else _NEWUSER)
    _check(_LIBC.unshare(flags), "unshare")
    if uid != 0:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _file_system(base: str, readable: list[str], mebibytes: int, driver: str) -> None:
    """Replaces the root by a file system in memory that shows what is readable and nothing else.

    base: the directory over which it is mounted.
    readable: absolute paths that are shown, read only, beside SYSTEM and DEVICES.
    mebibytes: how much may be written.
    driver: source text of the driver, which becomes /.driver.py.
    """
    # Private: what is mounted from here on is not passed on to the machine's other name spaces.
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", base, "tmpfs", _NOSUID | _NODEV, f"size={mebibytes}m,mode=755")
    for path in dict.fromkeys((*SYSTEM, *DEVICES, *readable)):
        place = base + path
        if os.path.islink(path) or not os.path.exists(path) or os.path.lexists(place):
            if os.path.islink(path) and not os.path.lexists(place):
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.symlink(os.readlink(path), place)
            continue
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
    for name in (WORK, "/.old"):
        os.mkdir(base + name, 0o700)
    if os.geteuid() == 0:
        os.chown(base + WORK, _NOBODY, _NOBODY)
    with open(base + "/.driver.py", "w") as file:
        file.write(driver)
    # The new root takes the place of the old one, which is then detached from under /.old.
    _check(_LIBC.pivot_root(base.encode(), (base + "/.old").encode()), "pivot_root")
    os.chdir("/")
    _check(_LIBC.umount2(b"/.old", _DETACH), "umount")


def _limit(settings: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_AS: settings["memory_mib"] << 20,
        resource.RLIMIT_FSIZE: settings["files_mib"] << 20,
        resource.RLIMIT_NPROC: settings["processes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if not settings["confined"]:
        del limits[resource.RLIMIT_NPROC]  # it would count all processes of this user
    for which, limit in limits.items():
        resource.setrlimit(which, (limit, limit))


def _program(settings: dict[str, Any]) -> None:
    """Turns this process into the program, with its limits and as an unprivileged user.

    What the program prints is dropped; only the driver knows where standard output was.
    """
    if settings["confined"]:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            # The kernel counts, and limits, processes by user name space.
            _check(_LIBC.unshare(_NEWUSER), "unshare")
        os.chdir(WORK)
    _check(_LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    _limit(settings)
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": os.getcwd(),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    driver = "/.driver.py" if settings["confined"] else settings["driver"]
    os.execve(settings["python"], [settings["python"], "-I", "-B", driver], environment)


def _start(settings: dict[str, Any]) -> None:
    """Is the first process of the name spaces: prepares them, starts the program, ends with it.

    When the first process of a process name space ends, the kernel ends all others in it.
    """
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if settings["confined"]:
        with open(settings["driver"]) as file:
            driver = file.read()
        _file_system(settings["base"], settings["readable"], settings["files_mib"], driver)
    ready, failed = os.pipe()
    program = os.fork()
    if program == 0:
        try:
            _program(settings)
        except BaseException as error:
            os.write(failed, str(error).encode()[:1000])
        os._exit(NOT_CONFINED)
    os.close(failed)
    # The program may have the same user, and must not look into this process.
    _LIBC.prctl(_DUMPABLE, 0, 0, 0, 0)
    # The pipe closes without a word when the copy of this process is replaced by the program;
    # what can be read says why it was not.
    if why := os.read(ready, 1000):
        raise OSError(why.decode("utf-8", "replace"))
    for number in (0, 1):
        os.close(number)
    while os.wait()[0] != program:
        pass


def main() -> int:
    settings = json.loads(sys.argv[1])
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    try:
        if settings["confined"]:
            _name_spaces()
        first = os.fork()
    except OSError as error:
        print(error, file=sys.stderr)
        return NOT_CONFINED
    if first == 0:
        try:
            _start(settings)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(NOT_CONFINED)
        os._exit(0)
    os.close(1)
    waiting = select.poll()
    waiting.register(os.pidfd_open(first), select.POLLIN)
    if not waiting.poll(1000 * settings["time_s"]):
        os.kill(first, signal.SIGKILL)  # the kernel ends all others of its name space
        os.waitpid(first, 0)
        return TIMED_OUT
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
