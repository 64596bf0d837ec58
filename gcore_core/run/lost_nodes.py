"""Says which machines a run can lose within a step, and what takes the place of their processes.

Such a machine, an *expendable* one, has nothing of the run but replicas of the policy's generator,
and scorers that others can stand in for. What happens when one is lost stands in
``gcore_core.controllers.lost_nodes``. A job whose placement policy moves devices has none: its
partition has the devices of every machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gcore_core.contract.job_settings import POLICY, ROLLOUT


def expendable_nodes(
    where: Mapping[str, str], home: str, scorers: Collection[str]
) -> dict[str, list[str]]:
    """Returns node -> the processes on it, for each machine that the run can lose.

    where: process -> its node.
    home: the supervisor's node, which it cannot lose.
    scorers: names of scorer workers.
    """
    processes: dict[str, list[str]] = {}
    for process, node in where.items():
        processes.setdefault(node, []).append(process)
    candidates = {
        node: names
        for node, names in processes.items()
        if node != home
        and {_role(name) for name in names} <= {ROLLOUT, *scorers}
        and ROLLOUT in map(_role, names)
    }
    lasting = {_role(process) for process, node in where.items() if node not in candidates}
    return {
        node: names
        for node, names in candidates.items()
        if {_role(name) for name in names} <= {ROLLOUT, *lasting}
    }


def keeping_nodes(
    where: Mapping[str, str], expendable: Mapping[str, list[str]], *, grows: bool = False
) -> list[str]:
    """Returns the nodes of the policy's trainer: they keep the records of expendable nodes.

    grows: such nodes may come later.
    """
    if not expendable and not grows:
        return []
    return list(dict.fromkeys(node for name, node in where.items() if _role(name) == POLICY))


def stand_ins(
    where: Mapping[str, str], expendable: Mapping[str, list[str]]
) -> dict[str, list[str]]:
    """Returns scorer on an expendable node -> those of the same worker that are on none."""
    at_risk = [name for names in expendable.values() for name in names if _role(name) != ROLLOUT]
    return {
        scorer: [
            name
            for name, node in where.items()
            if _role(name) == _role(scorer) and node not in expendable
        ]
        for scorer in at_risk
    }


def replicas_left(where: Mapping[str, str], lost: Collection[str]) -> int:
    """Returns how many replicas of the policy's generator are on machines that are not lost."""
    return sum(node not in lost for name, node in where.items() if _role(name) == ROLLOUT)


def _role(process: str) -> str:
    return process.rpartition(".")[0]
