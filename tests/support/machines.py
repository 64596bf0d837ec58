"""Makes machines for tests of runs on several: on one Linux, out of the kernel's namespaces.

Each machine has a network of its own with one address, shared memory, a host name and processes of
its own. All hang on one bridge, which no machine of the outside can reach. The file system is
shared, as on a cluster with a shared one, but for directories that get a disk of their own.

    with machines(2) as (first, second):
        second.run(["hostname"])                # waits for a command there
        second.link_down()                      # pulls its cable
        second.own_disk(directory)              # what is written there, no other machine sees
        command = f"{SHELL} {{host}}"           # by the network, as ssh

Needs root, and `ip`, `tc`, `unshare` and `nsenter` (Debian: iproute2 and util-linux). It *fails*
where these are missing: a test that is skipped proves nothing.

They are those of ``g-core shrink --nodes`` (``gcore_tools.shrink.namespaces``), which leave nothing
behind, also where a test is killed. What tests do to them is here: cables, disks, a shell.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from gcore_tools.shrink.namespaces import hold, plug, run_command

#: A command that runs another one on the machine of an address: ``SHELL ADDRESS COMMAND...``.
SHELL = shlex.join([sys.executable, str(Path(__file__).with_name("remote_shell.py"))])
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_START_S = 20.0
_CLONE_NEWNET = 0x40000000


@dataclass
class Machine:
    """One machine of a test.

    address: its IPv4 address on the bridge, by which the others reach it.
    name: its host name.
    """

    address: str
    name: str
    _holder: subprocess.Popen[bytes] = field(repr=False)
    _pid: int = 0  # of the first process of the machine, as the outside sees it
    _port: str = ""  # of the bridge
    _switch: int = 0  # the process that holds the bridge

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command that runs another one on this machine, without its network."""
        spaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--wd=.")
        return ["nsenter", "--target", str(self._pid), *spaces, "--", *words]

    def network_command(self, words: Sequence[str]) -> list[str]:
        """Returns the command that runs another one in this machine's network, else outside."""
        return ["nsenter", "--target", str(self._pid), "--net", "--", *words]

    def run(self, words: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on this machine, and waits for it. Raises CalledProcessError."""
        settings = {"check": True, "capture_output": True, "text": True, "timeout": 120} | settings
        return subprocess.run(self.command(words), **settings)

    def start(self, words: Sequence[str], **settings: Any) -> subprocess.Popen[Any]:
        """Starts a command on this machine."""
        return subprocess.Popen(self.command(words), **settings)

    def own_disk(self, directory: Path) -> None:
        """Puts an empty disk of this machine's own into the place of a directory."""
        self.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(directory)])

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Puts the calling thread, and what it starts, into the network of this machine."""
        own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
        other = os.open(f"/proc/{self._pid}/ns/net", os.O_RDONLY)
        try:
            _set_network(other)
            yield
        finally:
            _set_network(own)
            os.close(other)
            os.close(own)

    def link_down(self) -> None:
        """Pulls the cable: nothing arrives and nobody is told."""
        self._at_switch("ip", "link", "set", self._port, "nomaster")

    def link_up(self) -> None:
        """Plugs the cable in again."""
        self._at_switch("ip", "link", "set", self._port, "master", "bridge0")

    def deafen(self) -> None:
        """Cuts one way: what this machine sends arrives, what is sent to it is lost."""
        # No packet fits into so small a bucket, so the kernel drops them all.
        self._tbf("rate", "1kbit", "burst", "1b", "limit", "1b")

    def slow(self, mbit_per_s: float) -> None:
        """Bounds what this machine receives, in 10^6 bits a second."""
        self._tbf("rate", f"{mbit_per_s:g}mbit", "burst", "64kb", "latency", "50ms")

    def mend(self) -> None:
        """Ends what ``deafen`` or ``slow`` did."""
        self._at_switch("tc", "qdisc", "del", "dev", self._port, "root")

    @contextlib.contextmanager
    def far(self, delay_s: float) -> Iterator[None]:
        """Has whatever goes to this machine or comes from it take so much longer, each way."""
        near, there = f"{self._port}n", f"{self._port}f"
        words = [sys.executable, str(Path(__file__).with_name("far_link.py"))]
        self.run([*words, "without-offload", "eth0"])
        self._at_switch("ip", "link", "add", near, "type", "veth", "peer", "name", there)
        self._at_switch(*words, "without-offload", near)
        at_switch = ("nsenter", "--target", str(self._switch), "--net", "--")
        for name in (near, there):
            self._at_switch("ip", "link", "set", name, "up")
        self.link_down()
        with subprocess.Popen(
            [*at_switch, *words, self._port, there, str(delay_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as relay:
            try:
                assert relay.stdout is not None and relay.stdin is not None
                if relay.stdout.readline() != b"ready\n":
                    raise RuntimeError("nobody passes frames; see what it wrote above")
                self._at_switch("ip", "link", "set", near, "master", "bridge0")
                yield
            finally:
                assert relay.stdin is not None
                relay.stdin.close()
        self._at_switch("ip", "link", "del", near)
        self.link_up()

    def _tbf(self, *settings: str) -> None:
        """Sends what goes to this machine through a token bucket."""
        self._at_switch("tc", "qdisc", "replace", "dev", self._port, "root", "tbf", *settings)

    def power_off(self) -> None:
        """Ends all processes of the machine at once, and its network with them."""
        if self._holder.stdin is not None:
            self._holder.stdin.close()
        self._holder.wait(_START_S)

    def namespace(self) -> int:
        """Returns the inode of ``/proc/PID/ns/pid`` of this machine's processes."""
        return os.stat(f"/proc/{self._pid}/ns/pid").st_ino

    def processes(self) -> list[str]:
        """Returns the command lines of the machine's processes, without those that are its own."""
        namespace = self.namespace()
        lines = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                same = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == namespace
                if same and process.pid != self._pid and process.status() != "zombie":
                    lines.append(shlex.join(process.cmdline()))
        return [line for line in lines if line != f"{SHELL} serve"]

    def _at_switch(self, *words: str) -> None:
        run_command("nsenter", "--target", str(self._switch), "--net", "--", *words)


@contextlib.contextmanager
def machines(number: int, *, shm_mib: int = 512) -> Iterator[list[Machine]]:
    """Makes that many machines, 10.77.0.1 and so on, and removes them after the block.

    shm_mib: the size of each one's shared memory.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid():
        raise RuntimeError(
            f"machines of namespaces need root and {', '.join(_TOOLS)}; "
            f"user {os.geteuid()}, missing: {', '.join(missing) or 'none'}"
        )
    with contextlib.ExitStack() as stack:
        _, switch = hold(stack, "switch", 1)
        at_switch = ("nsenter", "--target", str(switch), "--net", "--")
        run_command(*at_switch, "ip", "link", "add", "bridge0", "type", "bridge")
        run_command(*at_switch, "ip", "link", "set", "bridge0", "up")
        made = []
        for index in range(1, number + 1):
            holder, pid = hold(stack, f"node{index}", shm_mib)
            machine = Machine(
                address=f"10.77.0.{index}",
                name=f"node{index}",
                _holder=holder,
                _pid=pid,
                _port=f"port{index}",
                _switch=switch,
            )
            plug((*at_switch, "ip"), f"port{index}", "eth0", pid)
            inside = ("nsenter", "--target", str(pid), "--net", "--", "ip")
            run_command(*inside, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            run_command(*inside, "link", "set", "eth0", "up")
            made.append(machine)
        for machine in made:
            _serve(stack, machine)
        yield made


def _serve(stack: contextlib.ExitStack, machine: Machine) -> None:
    """Starts what answers ``SHELL`` on a machine."""
    words = [*shlex.split(SHELL), "serve"]
    server = machine.start(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    # It ends with its machine, which is on the stack before it, so it is not waited for here.
    assert server.stdout is not None
    stack.callback(server.stdout.close)
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"nobody answers the shell on {machine.name}; see what it wrote above")


def _set_network(descriptor: int) -> None:
    """Puts the calling thread into a network namespace: ``os.setns`` comes with Python 3.12."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def assert_in_no_process(secrets: Sequence[bytes], *marks: bytes) -> int:
    """Looks at the arguments and the environment of every process; none may hold a secret.

    Returns how many of them hold one of the marks: so many were surely looked at.
    """
    n_marked = 0
    for process in [path for path in Path("/proc").iterdir() if path.name.isdigit()]:
        for name in ("cmdline", "environ"):
            try:
                content = (process / name).read_bytes()
            except OSError:  # it has ended
                continue
            n_marked += sum(mark in content for mark in marks)
            for secret in secrets:
                assert secret not in content, f"{name} of {process}"
    return n_marked
