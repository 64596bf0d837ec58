"""What a worker frees goes back to the system: see gcore_language.host_memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
import torch
from pathlib import Path
from gcore_language.host_memory import return_free_pages, return_large_blocks

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

def layers():
    # as a rank's passes do in a thread: large blocks come and go, and a small one lives on
    for size in (24 << 20, 16 << 20, 8 << 20):
        blocks = [torch.ones(size, dtype=torch.uint8) for _ in range(8)]
        kept.append(torch.ones(1 << 16, dtype=torch.uint8))
        del blocks

kept = []
if sys.argv[1] == "set":
    return_large_blocks()
torch.ones(31 << 20, dtype=torch.uint8)
before = anonymous()
thread = threading.Thread(target=layers)
thread.start()
thread.join()
print(anonymous() - before)
return_free_pages()
print(anonymous() - before)
"""


def left(word: str) -> list[int]:
    """Returns what a process holds more than before, in bytes, after its blocks were freed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, word], capture_output=True, text=True, check=True
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.slow
def test_large_blocks_that_were_freed_are_the_systems_again() -> None:
    by_default, trimmed = left("unset")
    freed, _ = left("set")
    assert by_default > 32 << 20, "the C library gives them back by itself"
    assert freed < 8 << 20
    assert trimmed < 8 << 20
