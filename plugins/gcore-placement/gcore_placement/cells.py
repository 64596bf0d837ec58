"""The cells that the policy's generator and the judges share, and partitions of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gcore_core.contract.errors import PlacementError
from gcore_core.contract.placement import (
    Cell,
    Decision,
    Device,
    Mode,
    Need,
    Partition,
    Window,
    every_slot,
)


@dataclass(frozen=True)
class Split:
    """A candidate for how the pool's cells are used.

    mode: in "split" each cell serves either the policy or a judge; in other modes all serve both.
    judge: number of cells that judge; used only in mode "split".
    """

    mode: Mode
    judge: int = 0

    @property
    def name(self) -> str:
        """The name by which journals and ``named`` know it, such as "split 12" or "colocated"."""
        return f"split {self.judge}" if self.mode == "split" else self.mode

    @classmethod
    def named(cls, name: str) -> Split:
        """Returns the split that has this ``name``."""
        mode, _, count = name.partition(" ")
        return cls("split", int(count)) if mode == "split" else cls(mode)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pool:
    """The cells that the policy and the judges share. A cell holds whole replicas of any role.

    The policy has engines on the first cells and the judges on the last ones. So a new split moves
    only the cells between the old border and the new one.

    policy: the role that is trained.
    judges: the other generators' roles.
    cells: all of the pool's, in order.
    per_cell: for each role, its replicas in one cell.
    least: for each role, the fewest cells that it must keep.
    most_policy: the policy has engines on this many cells.
    most_judge: the judges have engines on this many cells.
    takes_turns: whether roles can take turns in a cell: replicas of every role can sleep, and
        generators do not draw while trainers work.
    """

    policy: str
    judges: tuple[str, ...]
    cells: tuple[Cell, ...]
    per_cell: Mapping[str, int]
    least: Mapping[str, int]
    most_policy: int
    most_judge: int
    takes_turns: bool

    @property
    def fewest(self) -> int:
        """The fewest cells that judges can have in a split."""
        return max(
            sum(self.least[judge] for judge in self.judges), len(self.cells) - self.most_policy
        )

    @property
    def most(self) -> int:
        """The most cells that judges can have in a split."""
        return min(self.most_judge, len(self.cells) - self.least[self.policy])

    def limited(self, judge: float) -> Split:
        """Returns the possible split whose number of judging cells is nearest to ``judge``."""
        return Split("split", min(max(round(judge), self.fewest), self.most))

    def shared(self) -> bool:
        """Returns whether every cell has engines of both, so that modes besides a split work."""
        return self.most_policy == self.most_judge == len(self.cells)

    def may_run(self, split: Split) -> bool:
        """Returns whether the mode of a split is possible, and the cells have its engines."""
        if split.mode == "colocated" and not self.takes_turns:
            return False
        return split.mode == "split" or self.shared()

    def awake(self, split: Split, weights: Mapping[str, float]) -> dict[str, tuple[Cell, ...]]:
        """Returns the cells at which each role is awake under a split.

        weights: with several judges, the proportions in which they share the judges' cells; each
            gets at least what it must keep.
        """
        if split.mode != "split":
            return dict.fromkeys((self.policy, *self.judges), self.cells)
        # The policy has the cells before the border; the judges share those from it on.
        border = len(self.cells) - split.judge
        cells_of_role = {self.policy: self.cells[:border]}
        at = border
        for judge, count in zip(self.judges, _shares(split.judge, self, weights), strict=True):
            cells_of_role[judge] = self.cells[at : at + count]
            at += count
        return cells_of_role

    def engines(self) -> dict[str, tuple[Cell, ...]]:
        """Returns the cells at which each role has engines, so that it can be awake there."""
        judged = self.cells[len(self.cells) - self.most_judge :]
        return {self.policy: self.cells[: self.most_policy], **dict.fromkeys(self.judges, judged)}


def find_pool(window: Window) -> Pool | None:
    """Returns the pool of a window; None unless one policy and at least one judge can share it.

    Raises PlacementError, which names the role that does not fit.
    """
    generators = {role: need for role, need in window.needs.items() if need.kind == "generator"}
    policies = [role for role, need in generators.items() if need.follows]
    judges = tuple(role for role, need in generators.items() if not need.follows)
    if len(policies) != 1 or not judges:
        return None
    devices = _devices_of_generators(window, generators)
    for role in (*policies, *judges):
        if window.slots[role] > len(devices):
            _refuse(
                role,
                "slots",
                f"wants {window.slots[role]} slots, but the number of devices is {len(devices)}",
            )
    # A cell holds whole replicas of every role, so its size is a multiple of each replica's.
    size = math.lcm(*(need.size for need in generators.values()))
    pool_devices = window.slots[policies[0]] + max(window.slots[judge] for judge in judges)
    cells = _cells(devices[:pool_devices], size)
    per_cell = {role: size // need.size for role, need in generators.items()}
    least = {role: math.ceil(need.least / per_cell[role]) for role, need in generators.items()}
    most = {role: min(window.slots[role] // size, len(cells)) for role in generators}
    for role in generators:
        if most[role] < least[role]:
            what = (
                f"{window.slots[role]} slots make {most[role]} whole cells of {size} devices, "
                "and it needs"
            )
            _refuse(role, "slots", f"{what} at least {least[role]}")
        if window.slots[role] % size:
            what = f"{window.slots[role]} slots are no whole cells of {size} devices"
            _refuse(role, "slots", what)
    if sum(least.values()) > len(cells):
        cells_by_role = ", ".join(f"{role} {count}" for role, count in least.items())
        what = (
            f"generators need at least {sum(least.values())} cells of {size} devices "
            f"({cells_by_role}), there are"
        )
        _refuse(max(least, key=least.__getitem__), "slots", f"{what} {len(cells)}")
    most_judge = min(most[judge] for judge in judges)
    if sum(least[judge] for judge in judges) > most_judge:
        role = min(judges, key=most.__getitem__)
        _refuse(
            role,
            "slots",
            f"the {most_judge} cells of this one are too few for {len(judges)} judges",
        )
    by_slots = sorted(judges, key=lambda judge: window.slots[judge])
    if window.slots[by_slots[0]] != window.slots[by_slots[-1]]:
        listed = ", ".join(f"{judge} {window.slots[judge]}" for judge in judges)
        _refuse(
            by_slots[-1],
            "slots",
            f"judges share their cells, so each has the slots of the others ({listed})",
        )
    takes_turns = not window.overlaps and all(need.sleeps for need in generators.values())
    return Pool(
        policies[0], judges, cells, per_cell, least, most[policies[0]], most_judge, takes_turns
    )


def decide(
    window: Window, pool: Pool, split: Split, weights: Mapping[str, float] | None = None
) -> Decision:
    """Returns the decision that carries out a split.

    The generators of the pool are on their cells; every other role is on its slots.

    weights: see ``Pool.awake``; None: all judges have equal weights.
    """
    generators = (pool.policy, *pool.judges)
    others = {role: slots for role, slots in window.slots.items() if role not in generators}
    other_cells = every_slot(Window(devices=window.devices, slots=others)).cells
    awake = pool.awake(split, weights or {})
    engines = pool.engines()
    order = list(window.slots)
    return Decision(
        partition=Partition({role: {**other_cells, **awake}[role] for role in order}),
        engines=Partition({role: {**other_cells, **engines}[role] for role in order}),
        mode=split.mode,
        chosen=split.name,
    )


class Rescue:
    """What the policies of this plugin do for a judge of which no replica answers: see
    ``Rescues``.
    """

    def rescue(self, partition: Partition, window: Window) -> Decision | None:
        """Gives a judge that no longer answers some of the policy's cells; see the contract's
        ``Rescues``.

        It takes as many cells as the policy can spare, from those at which an engine of the judge
        answers. Where the policy can spare none, both use those cells, one after the other. Returns
        None where the judge has no such cell, or is not in the pool.
        """
        pool = find_pool(window)
        judge = window.starving
        if pool is None or judge not in pool.judges:
            return None
        lost_devices = {role: set(window.lost.get(role, ())) for role in (pool.policy, judge)}

        def answers(role: str, cell: Cell) -> bool:
            """Returns whether a role has an engine at a cell, on devices that are not lost."""
            return cell in pool.engines()[role] and not lost_devices[role] & {
                device.index for device in cell.devices
            }

        policy_cells = partition.cells[pool.policy]
        usable_cells = [cell for cell in policy_cells if answers(judge, cell)]
        spare_count = (
            sum(answers(pool.policy, cell) for cell in policy_cells) - pool.least[pool.policy]
        )
        moved_cells = tuple(usable_cells[-spare_count:]) if spare_count > 0 else ()
        cells = dict(partition.cells)
        reason = f"no replica of {judge} answers"
        if moved_cells:
            remaining_cells = tuple(cell for cell in policy_cells if cell not in moved_cells)
            cells |= {pool.policy: remaining_cells, judge: moved_cells}
            return Decision(
                partition=Partition(cells),
                reason=f"{reason}: {len(moved_cells)} cells of {pool.policy} judge",
            )
        if not usable_cells or not pool.takes_turns:
            return None
        cells |= {pool.policy: tuple(usable_cells), judge: tuple(usable_cells)}
        return Decision(
            partition=Partition(cells), mode="colocated", reason=f"{reason}: it takes turns"
        )


def split_of(partition: Partition, pool: Pool) -> Split | None:
    """Returns the split that a partition has in this pool.

    Returns None where the partition uses cells outside of the pool, or another number of them than
    the pool has.
    """
    cells_of_role = {role: partition.cells.get(role, ()) for role in (pool.policy, *pool.judges)}
    if any(not set(cells) <= set(pool.cells) for cells in cells_of_role.values()):
        return None
    counts = [len(cells_of_role[judge]) for judge in pool.judges]
    return (
        Split("split", sum(counts))
        if len(cells_of_role[pool.policy]) + sum(counts) == len(pool.cells)
        else None
    )


def _devices_of_generators(window: Window, generators: Mapping[str, Need]) -> tuple[Device, ...]:
    """Returns the devices among which the pool's are: all, or those behind the other roles'.

    Where generators draw while trainers work, they share no device with these, if there are enough.
    ``decide`` gives the other roles the first devices.

    generators: the roles of the pool, and what each needs.
    """
    if not window.overlaps:
        return window.devices
    others = sum(slots for role, slots in window.slots.items() if role not in generators)
    rest = window.devices[others:]
    least = sum(need.least * need.size for need in generators.values())
    most = max(window.slots[role] for role in generators)
    return rest if len(rest) >= max(least, most) else window.devices


def _cells(devices: Sequence[Device], size: int) -> tuple[Cell, ...]:
    """Returns cells of ``size`` neighbouring devices, each on one node.

    Devices of a node that are too few for another cell belong to none.
    """
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    return tuple(
        Cell(tuple(node_devices[i : i + size]))
        for node_devices in nodes.values()
        for i in range(0, len(node_devices) - size + 1, size)
    )


def _shares(cells: int, pool: Pool, weights: Mapping[str, float]) -> list[int]:
    """Returns the number of cells that each judge gets; they add up to ``cells``.

    Each judge gets what it must keep. The rest is dealt one by one to the judge that is furthest
    below its exact share, which is proportional to its weight.
    """
    least = [pool.least[judge] for judge in pool.judges]
    proportions = [max(weights.get(judge, 1.0), 0.0) for judge in pool.judges]
    exact_shares = [cells * weight / (sum(proportions) or 1.0) for weight in proportions]
    counts = list(least)
    while sum(counts) < cells:
        counts[max(range(len(counts)), key=lambda i: exact_shares[i] - counts[i])] += 1
    return counts


def _refuse(role: str, key: str, what: str) -> None:
    """Raises PlacementError for a setting of a role that does not fit into cells."""
    raise PlacementError(
        what,
        where=f"roles.{role}.{key}",
        why=(
            "devices move between the policy's generator and the judges in cells that hold whole "
            "replicas of either"
        ),
        todo=(
            "change the roles' slots or least, or set cluster.devices to the number that may be "
            "used"
        ),
        role=role,
    )
