"""Plants faults that were reported in public into a run, and judges what the run says of them.

An ``Exhibit`` re-creates one fault. It is planted by wrapping functions at named seams while a job
runs in this process (``core/inline``), so it reaches trainers, generators, scorers and controllers
alike and leaves nothing behind. A ``Scene`` is what an exhibit plants with; it counts how often the
fault really acted, since a fault that never acted proves nothing.

What a run says is written down as it is. An exhibit never changes to suit its detector: what is
not found is told as not found.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gcore_core.contract.errors import ContractError, GcoreError
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.run_files import read_metrics

F = TypeVar("F", bound=Callable[..., Any])

#: Kinds of faults, by their letter.
KINDS = {
    "A": "weights that do not arrive",
    "B": "buffers, derived tensors and captured graphs",
    "C": "caches that outlive an update",
    "D": "what a log-prob means",
    "E": "same weights, another forward pass",
    "F": "tokens and masks",
    "G": "the wrong row or group",
    "H": "the loss",
    "I": "the reference",
    "J": "asynchrony and versions",
    "K": "resuming and the optimizer",
    "L": "seeds, ends and rewards",
}

#: Outcomes of an exhibit.
FOUND = "found"  # the run ended with an error that names the fault as expected
OTHERWISE = "found, named otherwise"  # the run ended with an error, but not the expected one
MISSED = "not found"  # the run ended well with the fault in it
QUIET = "quiet"  # a negative control ended well, as it must
FALSE_ALARM = "false alarm"  # a negative control was reported
IDLE = "did not act"  # the fault was never reached, so nothing is proved
CRASHED = "crashed"  # an exception that is no error of ours


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Says what should be said of a fault.

    detector: the check that should find it, in a few words.
    error: name of the error's class; "" for a negative control, which nothing should find.
    names: texts that the message has to contain, such as the tensor's name.
    """

    detector: str
    error: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """Re-creates one reported fault.

    id: a short name, unique in the museum.
    thread: the public thread, such as "trl#5312".
    kind: a letter of ``KINDS``.
    fault: what is wrong, in a sentence.
    shown: what its framework showed at the time.
    plant: wraps the seams, given a scene.
    expected: what should be said of it.
    overrides: of the job, such as "roles.rollout.slots=2".
    control: a mutant that changes nothing, or a practice that is right: nothing may be reported.
    resumed: overrides of a second run, which resumes the first. Only the second has the fault.
        None: there is one run.
    """

    id: str
    thread: str
    kind: str
    fault: str
    shown: str
    plant: Callable[[Scene], None]
    expected: Expected
    overrides: tuple[str, ...] = ()
    control: bool = False
    resumed: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            kinds = ", ".join(KINDS)
            raise ContractError(f"exhibit {self.id}: kind {self.kind!r} is none of {kinds}.")
        if self.control == bool(self.expected.error):
            raise ContractError(
                f"exhibit {self.id}: a control expects no error, and only a control does."
            )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Says what a run did with a fault in it.

    id, kind, thread: of the exhibit.
    outcome: a constant of this module.
    acted: how often the fault acted.
    acted_after_steps: steps that had ended when it acted first; None where it did not act.
    ended_after_steps: steps that had ended when the run did.
    error: name of the error's class; "" without one.
    said: the whole message; "" without one.
    lacking: texts that were expected in the message and are not there.
    """

    id: str
    kind: str
    thread: str
    outcome: str
    acted: int
    acted_after_steps: int | None
    ended_after_steps: int
    error: str = ""
    said: str = ""
    lacking: list[str] = field(default_factory=list)

    @property
    def delay_steps(self) -> int | None:
        """Steps that ended with the fault acting before it was reported; None without a report.

        0: it was reported within the step in which it acted first.
        """
        if not self.error or self.acted_after_steps is None:
            return None
        return self.ended_after_steps - self.acted_after_steps

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return asdict(self) | {"delay_steps": self.delay_steps}


class Scene:
    """Wraps functions at named seams until it is left.

    acted: how often a planted fault acted.
    acted_after_steps: steps that had ended when it acted first; None before.
    """

    def __init__(self, ended_steps: Callable[[], int] = lambda: 0) -> None:
        self._undo = contextlib.ExitStack()
        self._ended_steps = ended_steps
        self.acted = 0
        self.acted_after_steps: int | None = None

    def act(self) -> None:
        """Notes that the fault acts now."""
        if not self.acted:
            self.acted_after_steps = self._ended_steps()
        self.acted += 1

    def wrap(self, seam: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces a function or method by ``make(original)``.

        seam: "module:Class.method" or "module:function". Raises PluginBroken where there is none.
        """
        owner_reference, _, name = seam.rpartition("." if "." in seam.partition(":")[2] else ":")
        if ":" in owner_reference:
            owner = import_attribute(owner_reference)
        else:
            import importlib

            owner = importlib.import_module(owner_reference)
        import_attribute(seam)  # refuses a seam that is gone
        own = vars(owner).get(name, _INHERITED)
        setattr(owner, name, make(getattr(owner, name)))
        restore = delattr if own is _INHERITED else setattr
        arguments = (owner, name) if own is _INHERITED else (owner, name, own)
        self._undo.callback(restore, *arguments)

    def close(self) -> None:
        """Takes all wrappers off again."""
        self._undo.close()


_INHERITED = object()


def show(exhibit: Exhibit, job: Path, directory: Path, run_file: Callable[..., int]) -> Finding:
    """Runs a job with the fault in it, in this process, and says what came of it.

    job: a YAML file whose launcher is ``core/inline``.
    directory: where its run goes; it must not exist.
    run_file: ``gcore_core.kits.commands.run_file``.
    """
    steps: Callable[[], int] = lambda: _ended_steps(directory)  # noqa: E731
    overrides = [f"run.dir={directory}", *exhibit.overrides]
    if exhibit.resumed is not None:
        with _quiet():
            run_file(job, overrides)
    scene = Scene(steps)
    error: BaseException | None = None
    try:
        exhibit.plant(scene)
        with _quiet():
            if exhibit.resumed is None:
                run_file(job, overrides)
            else:
                run_file(directory / "config.yaml", list(exhibit.resumed), directory)
    except Exception as raised:  # isolation point: it becomes the finding
        error = raised
    finally:
        scene.close()
    return _judged(exhibit, scene, error, steps())


def _judged(
    exhibit: Exhibit, scene: Scene, error: BaseException | None, ended_steps: int
) -> Finding:
    name = "" if error is None else type(error).__name__
    said = "" if error is None else str(error)
    expected = exhibit.expected
    lacking = [text for text in expected.names if text not in said]
    outcome = _outcome(exhibit, scene, error)
    if outcome == FOUND and (name != expected.error or lacking):
        outcome = OTHERWISE
    return Finding(
        id=exhibit.id,
        kind=exhibit.kind,
        thread=exhibit.thread,
        outcome=outcome,
        acted=scene.acted,
        acted_after_steps=scene.acted_after_steps,
        ended_after_steps=ended_steps,
        error=name,
        said=said,
        lacking=lacking if error is not None else [],
    )


def _outcome(exhibit: Exhibit, scene: Scene, error: BaseException | None) -> str:
    if error is not None and not isinstance(error, GcoreError):
        return CRASHED
    if not scene.acted:
        return IDLE
    if exhibit.control:
        return QUIET if error is None else FALSE_ALARM
    return MISSED if error is None else FOUND


def _ended_steps(directory: Path) -> int:
    """Returns how many steps a run has ended, as its metrics say."""
    try:
        rows: Sequence[Mapping[str, Any]] = read_metrics(directory)
    except (OSError, GcoreError):
        return 0
    return max((int(row["step"]) for row in rows), default=0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what a run prints and logs to itself."""
    nowhere = io.StringIO()
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        logging.disable(disabled)


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    """Returns how many findings there are of each outcome."""
    totals: dict[str, int] = {}
    for finding in findings:
        totals[finding.outcome] = totals.get(finding.outcome, 0) + 1
    return totals
