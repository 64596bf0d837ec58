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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from gcore_core.config.plan import Plan
from gcore_core.contract.errors import ConfigError, PlacementError
from gcore_core.contract.launching import ElasticLauncher, FoundNodes, Launcher
from gcore_core.run.host_memory import host_memory
from gcore_core.run.initial_placement import Placed, place, place_on_fewer

log = logging.getLogger(__name__)
_ASK_S = 5.0  # between two questions to all machines
_SAY_S = 30.0  # so often a run that waits says so


async def place_run(
    plan: Plan,
    launcher: Launcher,
    models: Mapping[str, Mapping[str, Any]],
    say: Callable[[str], None],
    *,
    again: bool,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Placed:
    """Places an attempt of a run on the machines that there are.

    models: role -> its ``model:`` mapping; sleeping generators keep these in a machine's memory.
    say: is told why the run waits, at once and then every half a minute.
    again: the run goes on by itself. It had its machines once, so it goes on with those that are
        left, and waits for more where these are too few.
    pause: waits for so many seconds of ``clock``.
    Raises what the launcher raises, PlacementError, and ConfigError when it has waited
    ``cluster.wait_s``.
    """
    devices = plan.settings.cluster.devices
    if not isinstance(launcher, ElasticLauncher):
        return place(plan, await launcher.nodes(devices))
    if not again:
        found = await launcher.find_nodes(devices, again=False)
        fit = place_on_fewer if found.missing or found.may_grow else place
        placed = fit(plan, found.nodes)
        return replace(placed, missing=found.missing)
    wait_s = plan.settings.cluster.wait_s
    began_s = clock()
    said_s = -_SAY_S
    while True:
        found = await launcher.find_nodes(devices, again=True)
        try:
            return _fitted(plan, models, found)
        except PlacementError as error:
            reason = str(error).partition("\n")[0]
        waited_s = clock() - began_s
        if waited_s >= wait_s:
            raise _not_enough(found, reason, wait_s)
        if waited_s - said_s >= _SAY_S:
            said_s = waited_s
            say(f"the run waits for {_listed(found)}, {wait_s - waited_s:.0f} s more: {reason}")
        log.info("%s; missing: %s", reason, dict(found.missing))
        await pause(min(_ASK_S, wait_s - waited_s))


def _fitted(
    plan: Plan,
    models: Mapping[str, Mapping[str, Any]],
    found: FoundNodes,
) -> Placed:
    """Places a run on machines. Raises PlacementError, also where the launcher refuses them, or one
    has too little memory for generators that sleep.
    """
    if found.refusal:
        raise PlacementError(found.refusal)
    placed = place_on_fewer(plan, found.nodes)
    host_memory(plan, placed, models)
    return replace(placed, missing=found.missing)


def say_changes(
    plan: Plan, missing_before: Mapping[str, str], placed: Placed, say: Callable[[str], None]
) -> None:
    """Says which machines have come and gone, and how many slots each role has then."""
    lines = changes(missing_before, placed.missing)
    for line in lines:
        say(line)
    slots = placed.window.slots
    roles = plan.settings.roles.items()
    if lines or any(slots.get(role, node.slots) < node.slots for role, node in roles):
        told = [f"{role} {slots[role]} of {node.slots}" for role, node in roles]
        say(f"slots: {', '.join(told)}")


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
