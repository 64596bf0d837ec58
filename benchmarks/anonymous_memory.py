"""Reads how much anonymous memory a process holds, and the most that it held for a while.

Anonymous memory is what a process has allocated. Pages of mapped files are not: the system takes
them back when memory is short.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

_STATUS = Path("/proc/self/status")
#: Seconds between two readings.
_EVERY_S = 0.002


def anonymous_bytes() -> int:
    """Returns the anonymous memory of this process that is in use, in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("the system does not say how much memory is anonymous")


class Peak:
    """Reads the anonymous memory again and again within a ``with`` block.

    most: the largest reading, in bytes.
    """

    def __init__(self) -> None:
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while not self._ended.is_set():
            self.most = max(self.most, anonymous_bytes())
            self._ended.wait(_EVERY_S)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.most = max(self.most, anonymous_bytes())
