"""Says what this machine has, before a run places anything there.

A launcher runs ``python -m gcore_nodes.facts`` on each machine. It prints one line
of JSON, a ``MachineFacts``, and ends. Neither torch nor a plugin is imported.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil

from gcore_core import __version__
from gcore_core.contract.placement import Device
from gcore_core.kits.launching import SHARED_MEMORY, find_devices

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what a machine says of itself.

    version: of gcore-core, in the interpreter that was asked.
    executable: path of that interpreter.
    host: the machine's name.
    machine: identifies this start of the machine, together with its network; two containers of one
        host that have networks of their own differ.
    addresses: IPv4 and IPv6 addresses by which others may reach it; those of its own loopback and
        link-local ones are not among them.
    devices: its devices, numbered as the machine numbers them.
    memory: directory of shared memory, or the one for temporary files where there is none.
    free_bytes: free there.
    temporary: directory for temporary files.
    """

    version: str
    executable: str
    host: str
    machine: str
    addresses: list[str]
    devices: list[Device]
    memory: str
    free_bytes: int
    temporary: str


def machine_facts() -> MachineFacts:
    """Looks at this machine."""
    devices = find_devices("auto")
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return MachineFacts(
        version=__version__,
        executable=sys.executable,
        host=socket.gethostname(),
        machine=machine_identity(),
        addresses=_addresses(),
        devices=list(devices),
        memory=str(memory),
        free_bytes=shutil.disk_usage(memory).free,
        temporary=tempfile.gettempdir(),
    )


def machine_identity() -> str:
    """Returns ``MachineFacts.machine`` of this machine."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = socket.gethostname()
    with contextlib.suppress(OSError):
        return f"{boot}/{_NETWORK.stat().st_ino}"
    return boot


def _addresses() -> list[str]:
    found = []
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if not address.address.startswith(("127.", "::1", "fe80:", "169.254.")):
                found.append(address.address)
    return found


def main() -> None:
    print(msgspec.json.encode(machine_facts()).decode())


if __name__ == "__main__":
    main()
