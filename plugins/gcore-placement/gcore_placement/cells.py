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
    Partition,
    Window,
    every_slot,
)


@dataclass(frozen=True)
class Split:
    """A candidate for how the pool's cells are used.

    mode: in "split" each cell serves either the policy or a judge; in other modes all serve both.
    judge: cells that judge, in a split.
    """

    mode: Mode
    judge: int = 0

    @property
    def name(self) -> str:
        return f"split {self.judge}" if self.mode == "split" else self.mode

    @classmethod
    def named(cls, name: str) -> Split:
        word, _, count = name.partition(" ")
        return cls("split", int(count)) if word == "split" else cls(word)  # type: ignore[arg-type]


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
    """

    policy: str
    judges: tuple[str, ...]
    cells: tuple[Cell, ...]
    per_cell: Mapping[str, int]
    least: Mapping[str, int]
    most_policy: int
    most_judge: int

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

    def awake(self, split: Split, weights: Mapping[str, float]) -> dict[str, tuple[Cell, ...]]:
        """Returns the cells at which each role is awake under a split.

        weights: with several judges, the proportions in which they share the judges' cells; each
            gets at least what it must keep.
        """
        if split.mode != "split":
            return dict.fromkeys((self.policy, *self.judges), self.cells)
        border = len(self.cells) - split.judge
        found, at = {self.policy: self.cells[:border]}, border
        for judge, count in zip(self.judges, _shares(split.judge, self, weights), strict=True):
            found[judge] = self.cells[at : at + count]
            at += count
        return found

    def engines(self) -> dict[str, tuple[Cell, ...]]:
        """Returns, for each role, all cells at which it has engines and so can be awake."""
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
    for role in (*policies, *judges):
        if window.slots[role] > len(window.devices):
            _refuse(
                role,
                "slots",
                f"wants {window.slots[role]} slots, but the number of devices is "
                f"{len(window.devices)}",
            )
    size = math.lcm(*(need.size for need in generators.values()))
    asked = window.slots[policies[0]] + max(window.slots[judge] for judge in judges)
    cells = _cells(window.devices[:asked], size)
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
    if sum(least.values()) > len(cells):
        needed = ", ".join(f"{role} {count}" for role, count in least.items())
        what = (
            f"generators need at least {sum(least.values())} cells of {size} devices "
            f"({needed}), there are"
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
    return Pool(policies[0], judges, cells, per_cell, least, most[policies[0]], most_judge)


def decide(
    window: Window, pool: Pool, split: Split, weights: Mapping[str, float] | None = None
) -> Decision:
    """The split carried out: generators on their cells, every other role on its slots."""
    generators = (pool.policy, *pool.judges)
    others = {role: slots for role, slots in window.slots.items() if role not in generators}
    rest = every_slot(Window(devices=window.devices, slots=others)).cells
    awake, engines = pool.awake(split, weights or {}), pool.engines()
    order = list(window.slots)
    return Decision(
        partition=Partition({role: {**rest, **awake}[role] for role in order}),
        engines=Partition({role: {**rest, **engines}[role] for role in order}),
        mode=split.mode,
        chosen=split.name,
    )


class Rescue:
    """What the policies of this plugin do for a judge of which nobody answers: see ``Rescues``."""

    def rescue(self, partition: Partition, window: Window) -> Decision | None:
        """The policy's cells, but for those it must keep, as far as the judge has an engine there
        that answers; where that leaves none, the policy and the judge take turns on what there is.
        """
        pool, judge = find_pool(window), window.starving
        if pool is None or judge not in pool.judges:
            return None
        lost = {role: set(window.lost.get(role, ())) for role in (pool.policy, judge)}

        def answers(role: str, cell: Cell) -> bool:
            return cell in pool.engines()[role] and not lost[role] & {
                device.index for device in cell.devices
            }

        held = partition.cells[pool.policy]
        able = [cell for cell in held if answers(judge, cell)]
        spare = sum(answers(pool.policy, cell) for cell in held) - pool.least[pool.policy]
        given = tuple(able[-spare:]) if spare > 0 else ()
        cells, reason = dict(partition.cells), f"no replica of {judge} answers"
        if given:
            kept = tuple(cell for cell in held if cell not in given)
            cells |= {pool.policy: kept, judge: given}
            return Decision(
                partition=Partition(cells),
                reason=f"{reason}: {len(given)} cells of {pool.policy} judge",
            )
        if not able:
            return None
        cells |= {pool.policy: tuple(able), judge: tuple(able)}
        return Decision(
            partition=Partition(cells), mode="colocated", reason=f"{reason}: it takes turns"
        )


def split_of(partition: Partition, pool: Pool) -> Split | None:
    """The split that a partition is; None where it is another pool's."""
    taken = {role: partition.cells.get(role, ()) for role in (pool.policy, *pool.judges)}
    if any(not set(cells) <= set(pool.cells) for cells in taken.values()):
        return None
    counts = [len(taken[judge]) for judge in pool.judges]
    return (
        Split("split", sum(counts))
        if len(taken[pool.policy]) + sum(counts) == len(pool.cells)
        else None
    )


def _cells(devices: Sequence[Device], size: int) -> tuple[Cell, ...]:
    """Neighbours of one node; what is left of a node makes no cell."""
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    return tuple(
        Cell(tuple(own[i : i + size]))
        for own in nodes.values()
        for i in range(0, len(own) - size + 1, size)
    )


def _shares(cells: int, pool: Pool, weights: Mapping[str, float]) -> list[int]:
    """Whole numbers that add up to ``cells``: what each judge must keep, the rest by the largest
    remainders.
    """
    least = [pool.least[judge] for judge in pool.judges]
    told = [max(weights.get(judge, 1.0), 0.0) for judge in pool.judges]
    wanted = [cells * weight / (sum(told) or 1.0) for weight in told]
    counts = list(least)
    while sum(counts) < cells:
        counts[max(range(len(counts)), key=lambda i: wanted[i] - counts[i])] += 1
    return counts


def _refuse(role: str, key: str, what: str) -> None:
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
