"""Runs a program that nobody trusts: ``python confine.py SETTINGS`` (JSON), its input and output
those of this process.

The program gets name spaces of its own: no network but a loopback interface that is down, a file
system of nothing but the interpreter (read only) and a directory in memory, no process but its own;
and limits of CPU and wall-clock time, memory, file size and processes. This needs root, or a kernel
that lets users make user name spaces. Exit codes: 0 the program ended, TIMED_OUT, NOT_CONFINED with
the reason on standard error; then it was not started.

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

TIMED_OUT, NOT_CONFINED = 124, 125
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
WORK = "/.work"  # a name that no path of the system has
_NOBODY = 65534

# of linux/sched.h, sys/mount.h and sys/prctl.h
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    1 << 17,
    1 << 26,
    1 << 27,
    1 << 28,
    1 << 29,
    1 << 30,
)
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE, _RELATIME = (
    1,
    2,
    4,
    32,
    4096,
    16384,
    1 << 18,
    1 << 21,
)
_KEPT = (
    2 | 4 | 8 | 1024 | 2048
)  # flags of a mount that a user name space may not clear, the same in statvfs
_DETACH, _DEATH_SIGNAL, _DUMPABLE, _NO_NEW_PRIVILEGES = 2, 1, 4, 38
_LIBC = ctypes.CDLL(None, use_errno=True)


def _sure(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    _sure(_LIBC.mount(*words, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def _name_spaces() -> None:
    uid, gid = os.geteuid(), os.getegid()
    flags = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | (0 if uid == 0 else _NEWUSER)
    _sure(_LIBC.unshare(flags), "unshare")
    if uid != 0:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _file_system(base: str, readable: list[str], mebibytes: int, driver: str) -> None:
    """The root is now a file system in memory, over ``base``, that shows what is readable and
    nothing else.
    """
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
        found = os.statvfs(place).f_flag
        kept = (found & _KEPT) | (_RELATIME if found & 4096 else 0)
        extra = 0 if path in DEVICES else _NODEV
        _mount("none", place, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | extra | kept)
    for name in (WORK, "/.old"):
        os.mkdir(base + name, 0o700)
    if os.geteuid() == 0:
        os.chown(base + WORK, _NOBODY, _NOBODY)
    with open(base + "/.driver.py", "w") as file:
        file.write(driver)
    _sure(_LIBC.pivot_root(base.encode(), (base + "/.old").encode()), "pivot_root")
    os.chdir("/")
    _sure(_LIBC.umount2(b"/.old", _DETACH), "umount")


def _limit(told: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CPU: told["cpu_s"],
        resource.RLIMIT_AS: told["memory_mib"] << 20,
        resource.RLIMIT_FSIZE: told["files_mib"] << 20,
        resource.RLIMIT_NPROC: told["processes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if not told["confined"]:
        del limits[resource.RLIMIT_NPROC]  # it would count all processes of this user
    for which, limit in limits.items():
        resource.setrlimit(which, (limit, limit))


def _program(told: dict[str, Any]) -> None:
    """Becomes the program. What it prints is dropped; only the driver knows where standard output
    was.
    """
    if told["confined"]:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            _sure(
                _LIBC.unshare(_NEWUSER), "unshare"
            )  # processes are counted, and limited, by user name space
        os.chdir(WORK)
    _sure(_LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    _limit(told)
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": os.getcwd(),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    driver = "/.driver.py" if told["confined"] else told["driver"]
    os.execve(told["python"], [told["python"], "-I", "-B", driver], environment)


def _start(told: dict[str, Any]) -> None:
    """The first process of the name spaces: prepares them, starts the program, ends when it does,
    and all with it.
    """
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if told["confined"]:
        with open(told["driver"]) as file:
            driver = file.read()
        _file_system(told["base"], told["readable"], told["files_mib"], driver)
    ready, failed = os.pipe()
    program = os.fork()
    if program == 0:
        try:
            _program(told)
        except BaseException as error:
            os.write(failed, str(error).encode()[:1000])
        os._exit(NOT_CONFINED)
    os.close(failed)
    _LIBC.prctl(
        _DUMPABLE, 0, 0, 0, 0
    )  # so that the program, which may have the same user, cannot look into it
    if why := os.read(ready, 1000):  # nothing, once the program has replaced the copy of this one
        raise OSError(why.decode("utf-8", "replace"))
    for number in (0, 1):
        os.close(number)
    while os.wait()[0] != program:
        pass


def main() -> int:
    told = json.loads(sys.argv[1])
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    try:
        if told["confined"]:
            _name_spaces()
        first = os.fork()
    except OSError as error:
        print(error, file=sys.stderr)
        return NOT_CONFINED
    if first == 0:
        try:
            _start(told)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(NOT_CONFINED)
        os._exit(0)
    os.close(1)
    waiting = select.poll()
    waiting.register(os.pidfd_open(first), select.POLLIN)
    if not waiting.poll(1000 * told["time_s"]):
        os.kill(first, signal.SIGKILL)  # the kernel ends all others of its name space
        os.waitpid(first, 0)
        return TIMED_OUT
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
