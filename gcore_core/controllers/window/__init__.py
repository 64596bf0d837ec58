"""Produces the groups that steps train on.

The window is the groups between the first that is being drawn and the last that was trained on.

``Window`` owns all of it: it leases ordinals from the ledger, has them drawn and scored, and gives
each group its verdict; a step program takes the groups of a step. The parts:

    ledger            which ordinals are this shard's, what of them is drawn, scored and settled
    dynamic_sampling  how many groups a step issues, and where it ends
    dealing           which records go to which replica, in which parts
    drawing           requests to replicas, until everything that was leased is drawn and scored
    waves             which earlier records the next ones of a group are made from
    scoring           requests to scorers
    verdicts          what becomes of a group that is drawn and scored
    window            the loop that joins them

``RunningWindow`` does the same without a break, for steps ahead of the one that is trained:

    deadlines         which groups are begun when, and which a step takes, so that none gets too old
    subsets           a ledger whose steps take any of its groups
    running           the loop
"""

from gcore_core.controllers.window.drawing import Drawing
from gcore_core.controllers.window.lanes import Round
from gcore_core.controllers.window.running import RunningWindow
from gcore_core.controllers.window.window import Taken, Window

__all__ = ["Drawing", "Round", "RunningWindow", "Taken", "Window"]
