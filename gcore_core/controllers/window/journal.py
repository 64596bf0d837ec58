"""Writes and reads ``memberships.jsonl``: which groups each step took, and when they were begun.

Where generation runs ahead, the clock decides both. Where pushes come while samples run, it also
decides where these are cut, and the journal says that, too. A later run that takes all of it from
the journal of an earlier one repeats it, with the same weights (``ReplayedDeadlines``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from gcore_core.contract.errors import DataError
from gcore_core.contract.run_files import MEMBERSHIPS
from gcore_core.controllers.window.cuts import Cut, Pieces


class Begun(msgspec.Struct, array_like=True, frozen=True):
    """Says that groups were begun, in one round, while generators held this version."""

    version: int
    ordinals: list[int]


class StepMembership(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Holds a line of the journal: what one step took.

    step: counted from 0.
    begun: the groups that were begun between the step before and this one took theirs, in order.
    trained: the groups that it trained on, by ordinal.
    consumed: these and those that it passed over for good, sorted.
    digests: of the records of each consumed group, in the order of ``consumed``: 16 hexadecimal
        digits.
    cuts: where pushes have cut records of the consumed groups; None where pushes cut none, and in
        journals of before this was written down.
    """

    step: int
    begun: list[Begun]
    trained: list[int]
    consumed: list[int]
    digests: list[str]
    cuts: list[Cut] | None = None


class MembershipJournal:
    """Writes the journal of a run, a line when a step takes its groups; it is the lead's.

    A line that cannot be written ends the run with OSError: a journal with a hole is worth nothing.

    directory: the run's; None: nothing is written.
    begun: groups that are begun already when a run goes on, each with the version that began it.
    cuts: whether pushes cut samples, so that the journal says where.
    """

    def __init__(
        self,
        directory: Path | None,
        begun: Iterable[tuple[int, int]] = (),
        *,
        cuts: bool = False,
    ) -> None:
        self._directory = directory
        self._cuts = cuts
        self._begun = [
            Begun(version, [ordinal])
            for ordinal, version in sorted(begun, key=lambda one: (one[1], one[0]))
        ]

    def begins(self, version: int, ordinals: Sequence[int]) -> None:
        """Notes that groups are begun now."""
        if self._directory is not None:
            self._begun.append(Begun(version, list(ordinals)))

    def takes(
        self,
        step: int,
        trained: Sequence[int],
        consumed: Sequence[int],
        digests: Sequence[int],
        cuts: Sequence[Cut] = (),
    ) -> None:
        """Writes the line of a step."""
        if self._directory is None:
            return
        line = StepMembership(
            step=step,
            begun=self._begun,
            trained=list(trained),
            consumed=list(consumed),
            digests=[f"{digest:016x}" for digest in digests],
            cuts=list(cuts) if self._cuts else None,
        )
        self._begun = []
        with (self._directory / MEMBERSHIPS).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def read_memberships(run_dir: Path) -> list[StepMembership]:
    """Returns the lines of a run's journal, one for each step from the first on.

    Of a group that was begun again after a crash, the last time counts. Half a line at the end, as
    a killed run may leave it, is left out.

    Raises DataError for a run without a journal, for a line that is none, and where a step is
    missing.
    """
    path = run_dir / MEMBERSHIPS
    if not path.is_file():
        raise DataError(
            "the run has no journal of which groups its steps took.",
            where=str(path),
            why="it is written by step programs whose generation runs ahead, such as async",
            todo="give the directory of such a run",
        )
    decode = msgspec.json.Decoder(StepMembership).decode
    lines = list[StepMembership]()
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            line = decode(text)
        except msgspec.MsgspecError as error:
            raise DataError(
                "a line cannot be read.", where=f"{path}:{number}", why=str(error)
            ) from None
        if line.step != len(lines):
            raise DataError(
                f"the line of step {len(lines)} is missing: step {line.step} stands there.",
                where=f"{path}:{number}",
                why="the journal was cut, or lines of it were lost",
                todo="a run can only be repeated from its whole journal",
            )
        lines.append(line)
    return _begun_once(lines)


def pieces_of(lines: Sequence[StepMembership], source: str) -> Pieces:
    """Returns by which pieces a run drew the records that its steps took.

    lines: of its journal.
    source: the run, for messages.
    """
    taken = {ordinal for line in lines for ordinal in line.consumed}
    began = {
        ordinal: begun.version
        for line in lines
        for begun in line.begun
        for ordinal in begun.ordinals
        if ordinal in taken
    }
    return Pieces(began, [cut for line in lines for cut in line.cuts or ()], source)


def _begun_once(lines: Sequence[StepMembership]) -> list[StepMembership]:
    """Returns the lines with each group in one round only.

    A run that goes on from a checkpoint writes groups a second time:

    - a group that was finished before, with the same version: its first round is kept;
    - a group that is drawn anew, with another version: its last round is kept.
    """
    kept = dict[int, tuple[int, int]]()  # ordinal -> (number of its line, version of its round)
    for number, line in enumerate(lines):
        for begun in line.begun:
            for ordinal in begun.ordinals:
                is_known = ordinal in kept
                if not is_known or kept[ordinal][1] != begun.version:
                    kept[ordinal] = (number, begun.version)
    shortened = []
    for number, line in enumerate(lines):
        rounds = []
        for begun in line.begun:
            here = (number, begun.version)
            ordinals = [ordinal for ordinal in begun.ordinals if kept[ordinal] == here]
            if ordinals:
                rounds.append(Begun(begun.version, ordinals))
        shortened.append(msgspec.structs.replace(line, begun=rounds))
    return shortened
