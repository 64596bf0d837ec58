"""Waits until a Ray cluster has so many nodes: ray_alive.py HOST:PORT NUMBER SECONDS.

It is a process of its own, so that whoever starts a cluster needs no Ray in its own interpreter.
"""

from __future__ import annotations

import contextlib
import sys
import time


def alive(address: str) -> int:
    """Returns how many nodes the head believes to be alive; 0 while it does not answer."""
    from ray._raylet import GcsClient

    with contextlib.suppress(Exception):  # many kinds, while the head comes up
        nodes = GcsClient(address=address).get_all_node_info(timeout=2)
        return sum(node.state == 0 for node in nodes.values())
    return 0


def main() -> int:
    address, number, within_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    ends_s = time.monotonic() + within_s
    while alive(address) != number:
        if time.monotonic() > ends_s:
            return 1
        time.sleep(0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
