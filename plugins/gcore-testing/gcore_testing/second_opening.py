"""Opens a dataset in a process of its own and writes digests of some rows, for its contract."""

from __future__ import annotations

import sys

import msgspec

from gcore_core.contract.factories import FactorySpec, build
from gcore_core.workers.row_digest import prompt_digest


def main() -> None:
    """Reads ``[factory, rows]`` from stdin; the last line on stdout has the rows' digests."""
    spec, rows = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[FactorySpec, list[int]])
    dataset = build(spec)
    print(msgspec.json.encode([prompt_digest(dataset[row]) for row in rows]).decode())


if __name__ == "__main__":
    main()
