"""Defines what may become of a lent engine's samples in a simulation.

When a loan pays, ``gcore_core.controllers.placement.lending`` says, for simulations and runs alike.
"""

from __future__ import annotations

from typing import Literal

#: What becomes of samples that lent engines have not ended when the trainer goes on. "redraw":
#: others draw them from the start. "keep": they stay where they are until the next loan, and are
#: read again. "continue": others read what they have and go on, as in a run that lends.
GiveBack = Literal["redraw", "keep", "continue"]
