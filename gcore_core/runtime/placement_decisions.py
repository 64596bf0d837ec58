"""Asks a placement policy for a decision and checks it against the devices that there are.

A policy is a plugin's code. Every decision of it is checked before anybody acts on it. An error
names the policy's provider and the contract that it breaks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, get_args

import msgspec

from gcore_core.contract.errors import ContractError, PlacementError
from gcore_core.contract.measurements import Account
from gcore_core.contract.placement import (
    Cell,
    Decision,
    Mode,
    Partition,
    PlacementPolicy,
    Prepares,
    Window,
)
from gcore_core.contract.plugin_code import line_of

#: Role -> indexes of the devices on which it has an engine.
Engines = Mapping[str, Collection[int]]


def ask_policy(
    policy: PlacementPolicy,
    provider: str,
    partition: Partition | None,
    window: Window,
    engines: Engines | None = None,
) -> Decision:
    """Asks the policy and returns its decision, checked.

    provider: as in ``placement.use``, for the error.
    partition: that of the latest decision; None before the first.
    engines: the engines that exist, by role; None before the first decision, which places them.

    Lets a PlacementError of the policy pass: a role does not fit. Raises ContractError for anything
    else that the policy raises, and for a decision that cannot be carried out.
    """
    try:
        decision = policy.revise(partition, window)
    except PlacementError:
        raise
    except Exception as error:  # isolation point: a plugin's code
        what = f"raised {type(error).__name__}: {error}"
        raise _broken(provider, what, f"at {line_of(error, policy)}") from error
    check_decision(decision, provider, window, engines)
    # ``run.initial_placement.place`` refuses such a first decision, with advice for the person who
    # chose the policy.
    unable = unable_to_sleep(decision, window)
    if engines is not None and unable:
        problem = f"has generators take turns in mode colocated, but {unable!r} cannot sleep"
        raise _broken(provider, problem, f"its decision: {decision.reason or decision.mode}")
    return decision


def prepare_policy(policy: PlacementPolicy, provider: str, window: Window) -> None:
    """Prepares a policy that ``Prepares``. Raises ContractError for what it raises."""
    if not isinstance(policy, Prepares):
        return
    try:
        policy.prepare(window)
    except Exception as error:  # isolation point: a plugin's code
        what = f"raised {type(error).__name__}: {error}"
        raise _broken(provider, what, f"at {line_of(error, policy)}") from error


def check_decision(
    decision: Any, provider: str, window: Window, engines: Engines | None = None
) -> None:
    """Raises ContractError, naming the provider, for a decision that cannot be carried out."""
    if not isinstance(decision, Decision):
        raise _broken(provider, f"gave a {type(decision).__name__}, not a Decision")
    try:
        # Lazily: a later check may rely on what an earlier one has found right.
        problem = next(
            chain(
                _of_words(decision),
                _of_turns(decision, window),
                _of_cells(decision, window, engines),
            ),
            "",
        )
    except (AttributeError, TypeError) as error:  # a field holds something else than its type
        problem = f"gave a malformed Decision: {error}"
    if problem:
        raise _broken(provider, problem, f"its decision: {decision.reason or decision.mode}")


def unable_to_sleep(decision: Decision, window: Window) -> str:
    """Returns a generator that the decision puts to sleep in turn but that cannot sleep.

    It is "" if there is none.
    """
    if decision.mode != "colocated":
        return ""
    needs = window.needs
    return next(
        (role for role, need in needs.items() if need.kind == "generator" and not need.sleeps), ""
    )


def _of_words(decision: Decision) -> Iterator[str]:
    """Yields what is wrong with a decision's mode, predictions, plain values and account."""
    if decision.mode not in get_args(Mode):
        yield f"mode {decision.mode!r} is none of {', '.join(get_args(Mode))}"
    for name, seconds in decision.predicted_s.items():
        if not (math.isfinite(seconds) and seconds >= 0):
            yield f"predicts {seconds} s for {name!r}"
    account = decision.account
    if not isinstance(account, Account):
        yield f"its account is a {type(account).__name__}, not an Account"
    try:
        msgspec.json.encode((decision.seen, decision.state, account), enc_hook=float)
    except (TypeError, ValueError) as error:
        yield f"seen, state or account is no plain value: {error}"


def _of_turns(decision: Decision, window: Window) -> Iterator[str]:
    """Yields a problem where roles are to take turns in a run in which no turn would end."""
    if window.overlaps and decision.mode == "colocated":
        yield (
            "has generators take turns in mode colocated, but in this run they draw while trainers "
            "work (Window.overlaps), so no turn ends"
        )


def _of_cells(
    decision: Decision,
    window: Window,
    engines: Engines | None,
) -> Iterator[str]:
    """Yields what is wrong with the cells of a decision; the first decision also places engines."""
    parts = {"partition": decision.partition.cells}
    if decision.engines is not None:
        parts["engines"] = decision.engines.cells
    roles = window.slots.keys() if engines is None else engines.keys()
    for what, cells in parts.items():
        for role in sorted(roles - cells.keys()):
            yield f"{what} leaves out role {role!r}"
        for role in sorted(cells.keys() - window.slots.keys()):
            yield f"{what} names a role that is not there: {role!r}"
        yield from _of_devices(what, cells, window)
    if engines is None:
        made = decision.engines or decision.partition
        yield from _of_engines(made.cells, window)
        engines = {role: _device_indexes(cells) for role, cells in made.cells.items()}
    for role in sorted(engines):
        yield from _of_role(
            role, _device_indexes(decision.partition.cells[role]), set(engines[role]), window
        )
    if decision.engines is not None and decision.mode == "split":
        yield from _of_a_split(decision.partition.cells, window)


def _device_indexes(cells: Iterable[Cell]) -> set[int]:
    return {device.index for cell in cells for device in cell.devices}


def _of_devices(
    what: str,
    cells: Mapping[str, tuple[Cell, ...]],
    window: Window,
) -> Iterator[str]:
    """Yields cells without devices, devices that do not exist, and those that a role has twice."""
    there = {device.index: device for device in window.devices}
    for role, role_cells in cells.items():
        devices = [device for cell in role_cells for device in cell.devices]
        if any(not cell.devices for cell in role_cells):
            yield f"{what}: a cell of {role!r} has no device"
        for device in devices:
            if there.get(device.index) != device:
                yield f"{what}: {role!r} has device {device.index}, which is not there"
        twice = [index for index, n in Counter(device.index for device in devices).items() if n > 1]
        if twice:
            yield f"{what}: {role!r} has device {twice[0]} twice"


def _of_engines(cells: Mapping[str, tuple[Cell, ...]], window: Window) -> Iterator[str]:
    """Yields roles with engines on more or fewer devices than slots, and cells that split a
    replica.
    """
    for role, role_cells in cells.items():
        slots = window.slots[role]
        need = window.needs.get(role)
        n_devices = len(_device_indexes(role_cells))
        if n_devices != slots:
            yield f"{role!r} has engines on {n_devices} devices, its slots are {slots}"
        size = need.size if need is not None and need.kind == "generator" else 1
        if any(len(cell.devices) % size for cell in role_cells):
            yield f"a cell of {role!r} does not hold whole replicas of {size} devices"


def _of_role(
    role: str,
    awake: set[int],
    engines: set[int],
    window: Window,
) -> Iterator[str]:
    """Yields what is wrong with the devices on which a role is awake.

    engines: the devices on which it has an engine.
    """
    need = window.needs.get(role)
    if not awake <= engines:
        yield f"{role!r} is awake on device {min(awake - engines)}, where it has no engine"
    if need is not None and need.kind == "generator" and len(awake) < need.least * need.size:
        replicas = len(awake) // need.size
        yield f"{role!r} has {replicas} replicas awake, it must keep {need.least}"


def _of_a_split(awake: Mapping[str, tuple[Cell, ...]], window: Window) -> Iterator[str]:
    """Yields a problem of a split in which two generators are awake on one device.

    It is for placements in which devices move between generators.
    """
    role_of: dict[int, str] = {}
    for role, need in window.needs.items():
        if need.kind != "generator":
            continue
        for index in sorted({device.index for cell in awake[role] for device in cell.devices}):
            if index in role_of:
                other = role_of[index]
                yield f"in mode split, both {other!r} and {role!r} are awake on device {index}"
            role_of[index] = role


def _broken(provider: str, problem: str, why: str = "") -> ContractError:
    return ContractError(
        f"placement policy {provider}: {problem}.",
        where="placement.use",
        why=why,
        todo="ask its author; its contract is gcore_testing.PlacementPolicyContract",
        provider=provider,
    )
