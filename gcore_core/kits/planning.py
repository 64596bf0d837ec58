"""Plans a job before anything starts: where its workers go, and what is wrong with it.

find_nodes: the machines that the job's launcher finds.
place, Placed: where the job's placement policy puts workers on machines; raises PlacementError.
check_parts: makes the light parts of a job and looks for the others.
see_files: what is wrong with the files that a job names, and what looks counted in them.
exits_told: raises for a SystemExit of a plugin's or a user's code within its block.
"""

from __future__ import annotations

from gcore_core.run.initial_placement import Placed, find_nodes, place
from gcore_core.run.preflight import check_parts, see_files
from gcore_core.runtime.main_thread import exits_told

__all__ = ["Placed", "check_parts", "exits_told", "find_nodes", "place", "see_files"]
