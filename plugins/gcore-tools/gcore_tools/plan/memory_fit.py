"""Decides whether a job fits into memory, and which settings would make it fit.

A job is refused when what its workers hold in any case is more than there is. One that is too large
only in a step as full as the settings allow is begun, with a note: how full steps get, nobody knows
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gcore_core.contract.errors import GcoreError, PlacementError
from gcore_core.contract.launching import NodeFacts
from gcore_core.contract.preflight import PlacedJob, ResolvedJob
from gcore_core.kits.commands import load_plan
from gcore_core.kits.planning import place
from gcore_tools.plan.memory_needs import GIB, Held, MemoryNeeds, Pool, memory_needs

#: So often the settings are changed, one more each time, to find what makes a job fit.
_ROUNDS = 8
_SHOWN_ROWS = 3


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that differ from the job's, and what is needed with them.

    overrides: ``key=value``, as they follow the file on the command line.
    nbytes: needed in the pool that was too full.
    there: bytes of that pool.
    """

    overrides: tuple[str, ...]
    nbytes: int
    there: int

    @property
    def fits(self) -> bool:
        """Whether this is enough."""
        return self.nbytes <= self.there

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "is not enough"
        return (
            f"{' '.join(self.overrides)} {verdict}: {self.nbytes / GIB:.1f} of "
            f"{self.there / GIB:.1f} GiB"
        )


def check_memory(
    plan: ResolvedJob,
    placed: PlacedJob,
    nodes: Sequence[NodeFacts],
    overrides: Sequence[str] = (),
    facts: Mapping[str, int] | None = None,
) -> list[str]:
    """Returns a note for each pool of memory that a full step may be too large for.

    Raises PlacementError for a job that cannot fit.

    overrides: those that the plan was made with; what would make it fit is tried beside them.
    facts: what looks counted, see ``WorkerShape.facts``.
    """
    needs = memory_needs(plan, placed, facts or {})
    if impossible := needs.too_full(full=False):
        pool = impossible[0]
        changes = changes_for(plan.source, overrides, nodes, needs, pool, full=False)
        raise _refusal(needs, pool, changes)
    return list(_notes(needs))


def _notes(needs: MemoryNeeds) -> Iterator[str]:
    for pool in needs.too_full():
        phase = needs.fullest_phase(pool)
        yield (
            f"{needs.name(pool)} may be too small: full steps need "
            f"{needs.total(pool, phase) / GIB:.1f} GiB in {phase}, and it has "
            f"{needs.there[pool] / GIB:.1f}; see g-core plan"
        )


def _refusal(needs: MemoryNeeds, pool: Pool, changes: Sequence[Change]) -> PlacementError:
    phase = needs.fullest_phase(pool, full=False)
    rows = [row for row in needs.held[pool][phase] if not row.need.at_most]
    role = _largest_role(rows)
    nbytes = needs.total(pool, phase, full=False)
    enough = [str(change) for change in changes if change.fits]
    return PlacementError(
        f"needs {nbytes / GIB:.1f} GiB in {phase} on {needs.name(pool)}, which has "
        f"{needs.there[pool] / GIB:.1f}.",
        where=f"roles.{role}",
        why=", ".join(
            f"{row.role} {row.need.what} {row.nbytes / GIB:.1f} GiB" for row in rows[:_SHOWN_ROWS]
        ),
        todo="\n".join(enough[:2]) or "take more devices, larger ones, or a smaller model",
        role=role,
        device=pool.device,
        node=pool.node,
        phase=phase,
        needed=nbytes,
        there=needs.there[pool],
        changes=[list(change.overrides) for change in changes if change.fits],
    )


def _largest_role(rows: Sequence[Held]) -> str:
    """Returns the role that holds most of these rows."""
    by_role: dict[str, int] = {}
    for row in rows:
        by_role[row.role] = by_role.get(row.role, 0) + row.nbytes
    return max(by_role, key=lambda role: by_role[role])


def changes_for(
    file: Path,
    overrides: Sequence[str],
    nodes: Sequence[NodeFacts],
    needs: MemoryNeeds,
    pool: Pool,
    *,
    full: bool = True,
) -> list[Change]:
    """Returns changes of settings that help a pool.

    They are made of the settings that backends name beside their needs (``MemoryNeed.setting``).
    Each was tried, which means that the job was placed and its memory added up again. Where one
    setting alone is enough, only such changes are returned. Else all single ones come first, and
    then several together, if that is enough.
    """
    single = [
        change
        for setting in _settings(needs, pool, full=full)
        if (change := _tried(file, overrides, (setting,), nodes, needs.facts, pool, full=full))
    ]
    if any(change.fits for change, _ in single):
        return [change for change, _ in single if change.fits]
    return [change for change, _ in single] + _together(
        file, overrides, nodes, needs, pool, full=full
    )


def _together(
    file: Path,
    overrides: Sequence[str],
    nodes: Sequence[NodeFacts],
    needs: MemoryNeeds,
    pool: Pool,
    *,
    full: bool,
) -> list[Change]:
    """Returns a change of several settings that is enough; no change where none was found.

    The search is greedy: the setting that saves most is taken first, then the next beside it. A
    setting that was changed may be changed again.
    """
    chosen: dict[str, str] = {}  # key -> override
    for _ in range(_ROUNDS):
        best: tuple[Change, MemoryNeeds] | None = None
        for setting in _settings(needs, pool, full=full):
            tried = {**chosen, setting.partition("=")[0]: setting}
            found = _tried(
                file, overrides, tuple(tried.values()), nodes, needs.facts, pool, full=full
            )
            if found and (best is None or found[0].nbytes < best[0].nbytes):
                best = found
        if best is None:
            return []
        change, needs = best
        chosen = {setting.partition("=")[0]: setting for setting in change.overrides}
        if change.fits:
            return [change]
    return []


def _settings(needs: MemoryNeeds, pool: Pool, *, full: bool) -> list[str]:
    """Returns the overrides that backends name for what a pool holds in its fullest phase."""
    phase = needs.fullest_phase(pool, full=full)
    rows = needs.held[pool][phase]
    named = (
        f"roles.{row.role}.{row.need.setting}"
        for row in rows
        if row.need.setting and (full or not row.need.at_most)
    )
    return list(dict.fromkeys(named))


def _tried(
    file: Path,
    overrides: Sequence[str],
    more: tuple[str, ...],
    nodes: Sequence[NodeFacts],
    facts: Mapping[str, int],
    pool: Pool,
    *,
    full: bool,
) -> tuple[Change, MemoryNeeds] | None:
    """Returns what a job needs with other settings; None where they do not go with the job."""
    try:
        plan = load_plan(file, [*overrides, *more])
        needs = memory_needs(plan, place(plan, nodes), facts)
    except GcoreError:
        return None
    nbytes = max(needs.total(pool, needs.fullest_phase(pool, full=full), full=full), 0)
    return Change(overrides=more, nbytes=nbytes, there=needs.there[pool]), needs
