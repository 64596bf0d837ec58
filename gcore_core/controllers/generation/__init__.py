"""Produces the groups that steps train on.

``Producer`` has groups drawn and scored, gives each its verdict, and hands a step program the
groups of a step. The schedule *issues* ordinals, which begins their groups; the ledger *leases*
those of this shard: what is to be drawn of which row. ``draw`` then asks replicas for the leases.
The parts:

    schedule  which groups are begun when, and which a step takes; what all schedules share
    in_step   the groups of one step, and a margin where some will be dropped
    ahead     also the groups of later steps, so that none gets too old
    ledger    which groups are this shard's, what of them is drawn, scored and settled
    split_requests  which records go to which replica, in which parts
    dispatch  requests to replicas, until everything that was leased is sampled and scored
    scoring   requests to scorers
    verdicts  what becomes of a group that is sampled and scored
    producer  the loop that joins them
"""

from gcore_core.controllers.generation.ahead import Ahead
from gcore_core.controllers.generation.dispatch import Round, draw
from gcore_core.controllers.generation.in_step import InStep
from gcore_core.controllers.generation.producer import Producer, StepBatch
from gcore_core.controllers.generation.schedule import Schedule

__all__ = ["Ahead", "InStep", "Producer", "Round", "Schedule", "StepBatch", "draw"]
