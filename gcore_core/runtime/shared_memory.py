"""Says where shared memory lies on a machine, and how much of it is copied at once."""

from __future__ import annotations

from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
#: Copies of so many bytes or more go past the caches (glibc, x86), see ``spawn``.
STREAMED_BYTES = 256 << 10
