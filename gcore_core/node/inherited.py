"""Makes a process independent of what the process that started it has set.

Across an exec a process inherits which signals are ignored (``nohup``, ``trap '' TERM``), which are
blocked, and which standard streams are closed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection

#: Signals that end a command. A command that ignores one is to go on: under nohup after the
#: end of its terminal, in the background of a script after Ctrl-C.
OF_THE_USER = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
#: Python ignores these itself.
_OF_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})


def reset_signals(keep: Collection[int] = ()) -> None:
    """Gives every signal that is ignored or blocked its usual effect.

    Where SIGCHLD is ignored, exit codes of children are lost. Where SIGTERM is, a worker ends only
    when it is killed. Call it in the main thread, before anything is started.

    keep: signals that stay ignored if they are.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - _OF_PYTHON - set(keep):
        if signal.getsignal(number) == signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


def open_standard_streams() -> None:
    """Opens each standard stream that is closed, on /dev/null.

    Otherwise the next file or socket gets its number, and children take that for the stream.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
