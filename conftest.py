"""Tests interrupt what they start, which must not have inherited that interrupts are ignored (as in
a script's `&`).
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
