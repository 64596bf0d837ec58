"""Makes machines out of the kernel's namespaces, so that one Linux is several nodes of a run.

Each has a network of its own with one address, shared memory, a host name and processes of its own;
the file system is shared. They hang on one bridge, in a namespace of its own. One link leads from
there to this machine, on which the run itself is.

    this machine  .254 ---+
    node1           .1 ---+--- bridge
    node2           .2 ---+

Nothing is left behind, also where the run is killed. Each namespace is held by one process, which
ends when the pipe from the run ends; with it go the processes in it and its links, and a link that
has lost one end is gone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from gcore_core.contract.errors import ConfigError

#: Debian: iproute2 and util-linux.
_TOOLS = ("ip", "unshare", "nsenter")
#: Networks of 254 addresses, of which a run takes the first that is free here.
_NETWORKS = ipaddress.ip_network("10.213.0.0/16")
_OURS = 254  # number of this machine's address in the network
#: Most nodes of a run.
MOST_NODES = 64
_START_S = 20.0
_HOLDER = """
mount -t tmpfs -o size={shm_mib}m,mode=1777 tmpfs /dev/shm
hostname {name}
ip link set lo up
echo ready
exec cat
"""


@dataclass(frozen=True, kw_only=True)
class NodeSpace:
    """One node out of namespaces.

    name: its host name.
    address: by which the others reach it.
    pid: of its first process, as this machine sees it.
    """

    name: str
    address: str
    pid: int

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command that runs another one on this node."""
        spaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--wd=.")
        return ["nsenter", "--target", str(self.pid), *spaces, "--", *words]


def problem() -> str:
    """Returns why no namespaces can be made here; "" where they can, as far as it shows."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is missing (Debian: iproute2, util-linux)"
    return "" if os.geteuid() == 0 else "only root may make them"


def free_network() -> str:
    """Returns a network of 254 addresses in which this machine has none, such as 10.213.0.0/24.

    Raises ConfigError where every one is taken.
    """
    taken = {
        ipaddress.ip_address(address.address)
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family.name == "AF_INET"
    }
    for network in _NETWORKS.subnets(new_prefix=24):
        if not any(address in network for address in taken):
            return str(network)
    raise ConfigError("no network is free for its nodes", where=f"launcher: {_NETWORKS}")


@contextlib.contextmanager
def node_spaces(number: int, network: str, *, shm_mib: int = 512) -> Iterator[list[NodeSpace]]:
    """Makes that many nodes in a network, and removes them after the block.

    network: of 254 addresses; this machine gets the last one.
    shm_mib: size of each one's shared memory.

    Raises ConfigError where they cannot be made, which says what the kernel said.
    """
    if why := problem():
        raise ConfigError("there can be no nodes of namespaces here.", where="launcher", why=why)
    addresses = ipaddress.ip_network(network)
    with contextlib.ExitStack() as stack:
        _, switch = hold(stack, "switch", 1)
        inside = ("nsenter", "--target", str(switch), "--net", "--", "ip")
        run_command(*inside, "link", "add", "bridge0", "type", "bridge")
        run_command(*inside, "link", "set", "bridge0", "up")
        here = f"gcore{switch}"
        plug(inside, "home", here, os.getpid())
        run_command("ip", "addr", "add", f"{addresses[_OURS]}/24", "dev", here)
        run_command("ip", "link", "set", here, "up")
        nodes = []
        for index in range(1, number + 1):
            _, pid = hold(stack, f"node{index}", shm_mib)
            plug(inside, f"port{index}", "eth0", pid)
            there = ("nsenter", "--target", str(pid), "--net", "--", "ip")
            run_command(*there, "addr", "add", f"{addresses[index]}/24", "dev", "eth0")
            run_command(*there, "link", "set", "eth0", "up")
            nodes.append(NodeSpace(name=f"node{index}", address=str(addresses[index]), pid=pid))
        yield nodes


def plug(inside: Sequence[str], port: str, name: str, pid: int) -> None:
    """Puts a link between the bridge and the network of a process, in which it has a name."""
    peer = ("peer", "name", name, "netns", str(pid))
    run_command(*inside, "link", "add", port, "type", "veth", *peer)
    run_command(*inside, "link", "set", port, "master", "bridge0")
    run_command(*inside, "link", "set", port, "up")


def hold(
    stack: contextlib.ExitStack, name: str, shm_mib: int
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts the process that holds a node's namespaces. It ends with the stack.

    name: the node's host name.
    shm_mib: size of its shared memory.
    Returns what started it, and its pid as this machine sees it: the node ends with the standard
    input of the first. Raises ConfigError where the kernel allows no namespaces.
    """
    holder = subprocess.Popen(
        [
            *("unshare", "--net", "--mount", "--uts", "--ipc", "--pid"),
            *("--fork", "--kill-child", "--mount-proc"),
            *("sh", "-ec", _HOLDER.format(name=name, shm_mib=shm_mib)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a key that interrupts the run must not cut its nodes first
    )
    stack.callback(_end, holder)
    assert holder.stdout is not None
    readable, _, _ = select.select([holder.stdout], [], [], _START_S)
    if not readable or holder.stdout.readline() != b"ready\n":
        raise ConfigError(
            f"{name} did not start",
            where="launcher",
            why="the kernel, or the container that this runs in, allows no namespaces",
            todo="shrink the job without --nodes",
        )
    (child,) = psutil.Process(holder.pid).children()
    return holder, int(child.pid)


def _end(holder: subprocess.Popen[bytes]) -> None:
    """Ends what holds namespaces, and with it all processes in them."""
    for stream in (holder.stdin, holder.stdout):
        if stream is not None:
            stream.close()
    try:
        holder.wait(_START_S)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()


def run_command(*words: str) -> None:
    """Runs a tool that makes or joins nodes. Raises ConfigError with what it wrote."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=_START_S)
    if done.returncode:
        raise ConfigError(
            "its nodes cannot be joined",
            where="launcher",
            why=f"{shlex.join(words)}: {done.stderr.strip()}",
            todo="shrink the job without --nodes",
        )
