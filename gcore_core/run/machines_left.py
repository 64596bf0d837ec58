"""Places a run on the machines that it can use now; one that goes on does with fewer.

A run that begins needs all machines that it names, unless its launcher's settings say that fewer
will do. One that begins again from a checkpoint takes what is left, as long as its job fits there:

    all named machines --one is lost--> those that are left --it answers again--> all, at a
                                          |                           checkpoint (cluster.grow)
                                          +-- the job does not fit: it waits, at most cluster.wait_s

Only a launcher that can leave machines out does so (``ElasticLauncher``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gcore_core.config.plan import Plan
from gcore_core.contract.errors import ConfigError, PlacementError
from gcore_core.contract.launching import ElasticLauncher, FoundNodes, Launcher, NodeFacts
from gcore_core.run.initial_placement import Placed, place, place_on_fewer

log = logging.getLogger(__name__)
_ASK_S = 5.0  # between two questions to all machines
_SAY_S = 30.0  # so often a run that waits says so


@dataclass(frozen=True, kw_only=True)
class PlacedOn:
    """Says where a run is placed, and which machines it does without.

    missing: host -> why it cannot be used.
    """

    placed: Placed
    missing: Mapping[str, str] = field(default_factory=dict)


async def place_first(plan: Plan, launcher: Launcher) -> PlacedOn:
    """Places a run that begins. Raises what the launcher raises, and PlacementError."""
    devices = plan.settings.cluster.devices
    if not isinstance(launcher, ElasticLauncher):
        return PlacedOn(placed=place(plan, await launcher.nodes(devices)))
    found = await launcher.find_nodes(devices, again=False)
    fit = place_on_fewer if found.missing or found.may_grow else place
    return PlacedOn(placed=fit(plan, found.nodes), missing=found.missing)


async def place_again(
    plan: Plan,
    launcher: ElasticLauncher,
    say: Callable[[str], None],
    fit: Callable[[Sequence[NodeFacts]], Placed],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> PlacedOn:
    """Places a run that goes on, on the machines that are left; waits for more where it must.

    say: is told why it waits, at once and then every half a minute.
    fit: places the workers on machines, see ``place_on_fewer``.
    pause: waits for so many seconds of ``clock``.
    Raises ConfigError when it has waited ``cluster.wait_s``.
    """
    wait_s = plan.settings.cluster.wait_s
    began_s = clock()
    said_s = -_SAY_S
    while True:
        found = await launcher.find_nodes(plan.settings.cluster.devices, again=True)
        reason = found.refusal
        if not reason:
            try:
                return PlacedOn(placed=fit(found.nodes), missing=found.missing)
            except PlacementError as error:
                reason = " ".join(str(error).splitlines()[:1])
        waited_s = clock() - began_s
        if waited_s >= wait_s:
            raise _not_enough(found, reason, wait_s)
        if waited_s - said_s >= _SAY_S:
            said_s = waited_s
            say(f"the run waits for {_listed(found)}, {wait_s - waited_s:.0f} s more: {reason}")
        log.info("%s; missing: %s", reason, dict(found.missing))
        await pause(min(_ASK_S, wait_s - waited_s))


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns a line for each machine that has been lost, and for each that is there again.

    before, now: host -> why it cannot be used.
    """
    lost = [
        f"{host} is missing, the run goes on without it: {_last_line(why)}"
        for host, why in now.items()
        if host not in before
    ]
    return [*lost, *(f"{host} is there again" for host in before if host not in now)]


def _listed(found: FoundNodes) -> str:
    return ", ".join(found.missing) or "machines"


def _last_line(text: str) -> str:
    """Returns what a command wrote last, where errors stand."""
    return (text.splitlines() or [""])[-1]


def _not_enough(found: FoundNodes, reason: str, wait_s: float) -> ConfigError:
    missing = [f"{host}: {_last_line(why)}" for host, why in found.missing.items()]
    return ConfigError(
        "the run does not fit on the machines that are left",
        where="cluster",
        why="\n".join([reason, *missing[:2]]),
        todo=f"it has waited {wait_s:g} s (cluster.wait_s): mend them and call g-core resume, or "
        "resume it with fewer slots",
        missing=list(found.missing),
    )
