"""Says who answers for a process whose starter may be out of reach: a lease with a term.

A node agent on another machine than its supervisor's lives on one. The supervisor *holds* the lease
for as long as its connection stands; a supervisor that is stopped, or busy, holds it all the same.
When the connection is gone the lease *lapses*: the term begins, in which the supervisor may come
back over another one. When the term is over and it has not, the lease has *expired* for good, and
its owner ends itself with all that it has started.

    no holder --take--> held --holder is gone--> lapsed --take--> held again
        |                                           |
        +--------------- term is over --------------+--> expired

A connection that another one has displaced cannot give the lease back: it is the later one's.

Rejected: a lease that is renewed by messages. A supervisor that is stopped for a moment, or whose
event loop an observer blocks, would lose its run. Over sockets of other machines the kernel tells
of a machine that is gone, by keepalive; that ends the connection, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from gcore_core.contract.errors import WorkerDied

log = logging.getLogger(__name__)


class Timer(Protocol):
    """A call that is to come."""

    def cancel(self) -> None: ...


#: Calls a function after so many seconds, unless the timer is cancelled.
CallLater = Callable[[float, Callable[[], None]], Timer]


class Lease:
    """Is held by one holder at a time. Its first term begins at once.

    Make it inside a running event loop.

    term_s: seconds from the loss of the holder to the end of the lease.
    expired: called once, at the end of a term in which nobody has taken the lease.
    first_term_s: seconds from the start within which the first holder has to take it; 0:
        ``term_s``.
    call_later: the clock; by default that of the event loop, which stands still while the machine
        is suspended.
    """

    def __init__(
        self,
        term_s: float,
        *,
        expired: Callable[[], None],
        first_term_s: float = 0.0,
        call_later: CallLater | None = None,
    ) -> None:
        self._term_s = term_s
        self._expired = expired
        self._call_later = call_later or asyncio.get_running_loop().call_later
        self._n_holders = 0  # the latest holder's number, counted from 1
        self._is_over = False
        self._term: Timer | None = self._call_later(first_term_s or term_s, self._expire)

    @contextlib.contextmanager
    def held(self, holder: str) -> Iterator[None]:
        """Holds the lease inside the block, in place of the holder before.

        holder: its name, for the log.
        Raises WorkerDied when the lease has expired.
        """
        if self._is_over:
            raise WorkerDied(
                "the lease has expired",
                where="lease",
                why="nobody has held it for its term, so this process is ending",
            )
        self._n_holders += 1
        number = self._n_holders
        self._stop_term()
        log.info("the lease is held by %s", holder)
        try:
            yield
        finally:
            if number == self._n_holders and not self._is_over:
                log.info("%s is gone; its lease ends in %g s", holder, self._term_s)
                self._term = self._call_later(self._term_s, self._expire)

    def close(self) -> None:
        """Ends the lease without a call of ``expired``: its owner ends anyway."""
        self._is_over = True
        self._stop_term()

    def _stop_term(self) -> None:
        if self._term is not None:
            self._term.cancel()
            self._term = None

    def _expire(self) -> None:
        log.info("nobody has held the lease for its term: it has expired")
        self.close()
        self._expired()
