"""Runs inside the confinement: executes the code, then the tests with the code's names.

When both have come to their end it prints a word that is none of the code's names. So code that
merely ends the process early has not passed. Code that looks for the word in this process can find
it: docs/explanation/security.md says so.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    task = json.load(sys.stdin)
    # Standard output is kept under another number, and the code gets /dev/null in its place.
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    names: dict[str, object] = {}
    for number, source in enumerate([task["code"], *task["tests"]]):
        file = Path(f"part{number}.py")
        file.write_text(source, encoding="utf-8", errors="replace")
        names = runpy.run_path(str(file), init_globals=names, run_name="solution")
    os.write(out, task["word"].encode())


main()
