"""The museum's commands: ``python -m tests.museum run`` and ``python -m tests.museum list``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gcore_core.contract.errors import GcoreError
from tests.museum.commands import list_exhibits, run

COMMANDS = {"run": run, "list": list_exhibits}


def main(words: Sequence[str]) -> int:
    """Runs one command; returns the exit code. An error of G-Core is printed as it is."""
    if not words or words[0] not in COMMANDS:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return COMMANDS[words[0]](words[1:])
    except GcoreError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
