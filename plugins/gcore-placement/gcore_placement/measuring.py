"""Measures a rollout from the requests that a run tells its placement policy of.

``Measuring`` is what this plugin's policies are made of. Another policy may call ``measure``
itself, and give its decision the account that comes with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from gcore_core.contract.engine_profiles import EngineFit, Profile
from gcore_core.contract.errors import DataError
from gcore_core.contract.measurements import Account, Requests, Rollout
from gcore_core.contract.placement import Decision, Partition, Window
from gcore_core.contract.run_files import PLACEMENT, read_placement
from gcore_placement.fitting import fit_engine

_MOST_AT_ONCE = "most_at_once"  # in ``Account.state``


@dataclass(frozen=True, kw_only=True)
class MeasuredWindow(Window):
    """Is a window with what was measured. A role of which something was not is not in its mapping.

    Its ``account`` is that of the latest rollout, no more that of the decision before.

    profiles: role -> how long its engines take.
    busy: role -> share of its replica-seconds, in the latest rollout, in which anything ran.
    filled: role -> share of its places, in the latest rollout, that were taken. A replica has as
        many places as the most requests that one of the role's replicas was ever seen to have at
        once, but no more than its profile's ``max_running``.
    used: role -> share of the time of its devices, in the latest rollout, in which they were in use
        as a meter reads it, from 0 to 1. It is empty unless the policy's config names meters.
    """

    profiles: Mapping[str, Profile] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)
    filled: Mapping[str, float] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)


class Measuring(ABC):
    """Is a placement policy that measures each rollout before it chooses what comes next."""

    #: role -> the profile that an earlier run has fitted; see ``prepare``.
    _priors: Mapping[str, Profile] = {}

    def prepare(self, window: Window) -> None:
        """Reads how fast engines were in the run before: see the contract's ``Prepares``.

        That is a better guess than the roofline of another model.
        """
        self._priors = profiles_of_earlier_run(Path(window.directory)) if window.directory else {}

    def revise(self, partition: Partition | None, window: Window) -> Decision:
        """Measures and chooses; see the contract's placement policy.

        A window that is measured already, as in a simulation, is taken as it is.
        """
        measured = window if isinstance(window, MeasuredWindow) else measure(window, self._priors)
        return replace(self.choose(partition, measured), account=measured.account)

    @abstractmethod
    def choose(self, partition: Partition | None, window: MeasuredWindow) -> Decision:
        """Returns the decision for the next step, without the account. It must be pure.

        partition: that of the latest decision; None before the first.
        """


def measure(window: Window, priors: Mapping[str, Profile] | None = None) -> MeasuredWindow:
    """Measures the latest rollout, going on from the account of the rollouts before.

    priors: role -> the profile that its engines are taken to have until they are measured.
    """
    priors = priors or {}
    rollout = window.rollout
    fits = dict(window.account.engines)
    most = dict(window.account.state.get(_MOST_AT_ONCE, {}))
    for role, requests in window.requests.items():
        fits[role] = fit_engine(requests, priors.get(role, Profile()), fits.get(role))
        at_once = most_at_once(requests, rollout.serving[role])
        most[role] = max(at_once, most.get(role, 1))
    profiles = {**priors, **{role: fit.profile for role, fit in fits.items()}}
    busy = {}
    filled = {}
    for role, requests in window.requests.items():
        replicas = rollout.serving[role]
        busy[role] = 1 - idle_share(requests, replicas, rollout.seconds)
        places = min(most[role], profiles[role].max_running)
        filled[role] = filled_share(requests, replicas, rollout.seconds, places)
    facts = {one.name: getattr(window, one.name) for one in fields(Window)}
    return MeasuredWindow(
        **{**facts, "account": _account(window, fits, most)},
        profiles=profiles,
        busy=busy,
        filled=filled,
        used=_used(rollout),
    )


def _account(
    window: Window, fits: Mapping[str, EngineFit], most_of_role: Mapping[str, int]
) -> Account:
    """Returns the account of the latest rollout; that of the decision before where none was."""
    if not window.requests:
        return window.account
    rollout = window.rollout
    ran, waited = _devices(window.requests, rollout)
    idle_s = sum(waited.values()) / max(len(waited), 1) + rollout.turns_s
    errors = [abs(fit.expected_s / fit.measured_s - 1) for fit in fits.values() if fit.requests]
    return Account(
        engines=fits,
        ran=ran,
        waited=waited,
        metrics={
            "idle_share": idle_s / max(rollout.seconds, 1e-9),
            "profile_error": max(errors, default=0.0),
        },
        state={_MOST_AT_ONCE: dict(most_of_role)},
    )


def _devices(
    requests: Mapping[str, Requests], rollout: Rollout
) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """Returns what ran and what waited in the rollout that is over, at each device.

    A replica is counted at its first device. Changes of roles are left out: they are
    ``Rollout.turns_s``, and count as idle for all devices alike.

    First: device -> role -> seconds in which the role ran anything there. Second: device -> seconds
    in which nothing ran there.
    """
    # Roles may share a device, so several replicas may have served there.
    served: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for role, replicas in rollout.served.items():
        for replica in replicas:
            served[rollout.engines[role][replica][0]].append((role, replica))
    ran = {}
    waited = {}
    rollout_s = rollout.seconds - rollout.turns_s
    for device, residents in sorted(served.items()):
        ran[device] = {role: running_s([(requests[role], replica)]) for role, replica in residents}
        ran_any_s = running_s([(requests[role], replica) for role, replica in residents])
        waited[device] = max(rollout_s - ran_any_s, 0.0)
    return ran, waited


def _used(rollout: Rollout) -> dict[str, float]:
    """Returns role -> share in which its devices were in use; see ``MeasuredWindow.used``."""
    shares = {}
    for role, replicas in rollout.serving.items():
        indexes = {index for replica in replicas for index in rollout.engines[role][replica]}
        used = [rollout.used[index] for index in sorted(indexes) if index in rollout.used]
        if used:
            shares[role] = sum(used) / len(used)
    return shares


def profiles_of_earlier_run(directory: Path) -> dict[str, Profile]:
    """Returns role -> the last profile that an earlier run of the same name has fitted.

    It is the latest run before this one, in ``runs/<name>/<NNN>``, that has fitted any.
    Returns {} where there is none, and for a directory that is not numbered: what lies beside that
    are not runs of this name.

    directory: that of this run.
    """
    if not directory.name.isdecimal():
        return {}
    numbers = {
        int(path.parent.name): path.parent
        for path in directory.parent.glob(f"[0-9]*/{PLACEMENT}")
        if path.parent.name.isdecimal()
    }
    for number in sorted(numbers, reverse=True):
        if number >= int(directory.name):
            continue
        try:
            outcomes = read_placement(numbers[number])[1]
        except DataError:  # of another version, or damaged: a prior is not worth an error
            continue
        for step in sorted(outcomes, reverse=True):
            if fits := outcomes[step].engines:
                return {role: fit.profile for role, fit in fits.items() if fit.requests}
    return {}


def running_s(served: Sequence[tuple[Requests, int]]) -> float:
    """Returns the seconds in which at least one of these replicas ran a request.

    served: for each replica, all requests of its role and its number.
    """
    masks = [requests.replica == replica for requests, replica in served]
    starts = np.concatenate(
        [requests.start_s[mask] for (requests, _), mask in zip(served, masks, strict=True)]
    )
    ends = np.concatenate(
        [requests.end_s[mask] for (requests, _), mask in zip(served, masks, strict=True)]
    )
    # This is the length of a union of intervals. In the order of their starts, each interval adds
    # the part of it that lies after the latest end so far (``reached``).
    order = np.argsort(starts)
    starts, ends = starts[order], ends[order]
    reached = np.maximum.accumulate(np.concatenate([[0.0], ends]))[:-1]
    return float(np.clip(ends - np.maximum(starts, reached), 0, None).sum())


def most_at_once(requests: Requests, replicas: Sequence[int]) -> int:
    """Returns the most requests that any one of the replicas had at once; 0 without requests."""
    return max(
        (int(_running_over_time(requests, i)[1].max(initial=0)) for i in replicas), default=0
    )


def filled_share(requests: Requests, replicas: Sequence[int], seconds: float, places: int) -> float:
    """Returns the share of the replicas' places that were taken, 0 to 1.

    Requests that wait for a place do not count.

    seconds: length of the rollout.
    places: places of one replica.
    """
    occupied_s = 0.0
    for replica in replicas:
        lasted_s, running = _running_over_time(requests, replica)
        occupied_s += float((lasted_s * np.minimum(running, places)).sum())
    return occupied_s / max(seconds * len(replicas) * places, 1e-9)


def _running_over_time(requests: Requests, replica: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many requests a replica had over time, as N spans in order of time.

    The first array, float64[N], holds the seconds of each span; the second, int64[N], the requests
    that the replica had in it. Each start and each end of a request begins another span.
    """
    of_replica = requests.take(requests.replica == replica)
    times_s = np.concatenate([of_replica.start_s, of_replica.end_s])
    changes = np.repeat([1, -1], len(of_replica))
    order = np.lexsort((changes, times_s))  # one that ends makes room for one that starts then
    running = np.cumsum(changes[order])[:-1]
    return np.diff(times_s[order]), running


def idle_share(requests: Requests, replicas: Sequence[int], seconds: float) -> float:
    """Returns the share of the replicas' time in which they ran nothing, 0 to 1.

    seconds: length of the rollout.
    """
    busy = sum(running_s([(requests, replica)]) for replica in replicas)
    return 1 - busy / max(seconds * len(replicas), 1e-9)
