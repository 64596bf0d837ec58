"""Adds up what a job's workers will hold on each device in each phase, before any process starts.

Backends say what one worker needs (``gcore_core.contract.memory``); the placement says which
workers share a device and which of them sleep. What nobody says is kept apart as unknown, and
never counted as zero.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gcore_core.contract.errors import ConfigError, ContractError, GcoreError
from gcore_core.contract.factories import build, import_attribute
from gcore_core.contract.job_settings import POLICY, ROLLOUT, FilterSettings
from gcore_core.contract.launching import NodeFacts
from gcore_core.contract.memory import ASLEEP, PHASES, MemoryNeed, WorkerShape
from gcore_core.contract.placement import Device
from gcore_core.contract.preflight import PlacedJob, ResolvedJob
from gcore_core.contract.traits import traits_of
from gcore_core.kits.models import find_made, models_cache

GIB = 2**30


@dataclass(frozen=True, order=True)
class Pool:
    """Names memory that several workers may share.

    node: the machine.
    device: index of an accelerator; -1: the memory of the machine itself, where devices of kind
        "cpu" have theirs.
    """

    node: str
    device: int = -1


@dataclass(frozen=True, kw_only=True)
class Held:
    """Says what one role holds in one pool, in one phase, for one purpose.

    role: its name in the job.
    workers: how many of its workers hold so much here.
    need: what each of them needs.
    """

    role: str
    workers: int
    need: MemoryNeed

    @property
    def nbytes(self) -> int:
        """Of all workers together; 0 where nobody knows."""
        return (1 if self.need.shared else self.workers) * (self.need.nbytes or 0)


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """Holds what is needed and what there is.

    held: pool -> phase -> what is held there, the largest first.
    there: pool -> its bytes; a pool of unknown size is absent.
    silent: role -> why it is not known what it needs, or a part of that.
    placed: where the workers are.
    facts: what looks counted, as given.
    """

    held: Mapping[Pool, Mapping[str, tuple[Held, ...]]]
    there: Mapping[Pool, int]
    silent: Mapping[str, str]
    placed: PlacedJob
    facts: Mapping[str, int]

    def total(self, pool: Pool, phase: str, *, full: bool = True) -> int:
        """Returns the bytes that are needed, as far as anybody knows.

        full: with what a step needs only where it is as full as the settings allow.
        """
        rows = self.held.get(pool, {}).get(phase, ())
        return sum(row.nbytes for row in rows if full or not row.need.at_most)

    def fullest_phase(self, pool: Pool, *, full: bool = True) -> str:
        """Returns the phase in which a pool holds most."""
        return max(PHASES, key=lambda phase: self.total(pool, phase, full=full))

    def too_full(self, *, full: bool = True) -> list[Pool]:
        """Returns the pools that have less than is needed, the one that lacks most first."""
        lacking = {
            pool: self.total(pool, self.fullest_phase(pool, full=full), full=full) - nbytes
            for pool, nbytes in self.there.items()
        }
        return sorted((pool for pool, n in lacking.items() if n > 0), key=lambda p: -lacking[p])

    def name(self, pool: Pool) -> str:
        """Returns what a person calls a pool."""
        host = self.placed.host(pool.node)
        return f"memory of {host}" if pool.device < 0 else f"device {pool.device} of {host}"


def memory_needs(plan: ResolvedJob, placed: PlacedJob, facts: Mapping[str, int]) -> MemoryNeeds:
    """Asks every chosen backend what it needs, and adds it up.

    facts: what looks counted, see ``WorkerShape.facts``.
    Raises ContractError where a backend's function fails or returns what is not a valid need.
    """
    devices = {device.index: device for device in placed.window.devices}
    kind = next((device.kind for device in devices.values()), "cpu")
    rows: dict[Pool, dict[str, list[Held]]] = {}
    silent: dict[str, str] = {}
    answers: dict[str, Sequence[MemoryNeed]] = {}
    for role in plan.settings.roles:
        answer = _answer(plan, _shape(plan, role, kind, facts))
        silent |= {role: answer} if isinstance(answer, str) else _unknown(role, answer)
        answers[role] = () if isinstance(answer, str) else answer
    for role in answers:
        for worker in placed.workers.get(role, []):
            for device in (devices[i] for i in worker):
                for need in _needs_on(device, role, answers, placed):
                    _add(rows, device, role, need)
    held = {
        pool: {phase: _sorted(phases.get(phase, [])) for phase in PHASES}
        for pool, phases in sorted(rows.items())
    }
    return MemoryNeeds(
        held=held, there=_there(plan, placed), silent=silent, placed=placed, facts=facts
    )


def _sorted(rows: Sequence[Held]) -> tuple[Held, ...]:
    """Returns rows that say the same as one, the largest first."""
    counts: dict[tuple[str, MemoryNeed], int] = {}
    for row in rows:
        counts[row.role, row.need] = counts.get((row.role, row.need), 0) + row.workers
    joined = [Held(role=role, workers=n, need=need) for (role, need), n in counts.items()]
    return tuple(sorted(joined, key=lambda row: -row.nbytes))


def _add(
    rows: dict[Pool, dict[str, list[Held]]], device: Device, role: str, need: MemoryNeed
) -> None:
    on_host = need.on == "host" or device.kind == "cpu"
    pool = Pool(device.node) if on_host else Pool(device.node, device.index)
    row = Held(role=role, workers=1, need=need)
    rows.setdefault(pool, {}).setdefault(need.phase, []).append(row)


def _answer(plan: ResolvedJob, shape: WorkerShape) -> list[MemoryNeed] | str:
    """Returns what a role's backend says one worker needs, or why it says nothing."""
    role = shape.role
    item = plan.provided[f"roles.{role}"]
    if not item.spec.memory:
        return f"{item.reference} ({item.owner}) does not say"
    try:
        needs = list(import_attribute(item.spec.memory)(plan.objects[f"roles.{role}"], shape))
    except GcoreError:
        raise
    except Exception as error:  # isolation point: a plugin's code
        raise ContractError(
            f"{item.reference} ({item.owner}): {item.spec.memory} failed: "
            f"{type(error).__name__}: {error}",
            where=f"roles.{role}.use",
            todo="ask its author",
        ) from error
    for need in needs:
        problems = need.problems() if isinstance(need, MemoryNeed) else [f"{need!r} is no need"]
        if problems:
            raise ContractError(
                f"{item.reference} ({item.owner}): {item.spec.memory}: {problems[0]}.",
                where=f"roles.{role}.use",
                todo="ask its author",
            )
    return needs


def _shape(plan: ResolvedJob, role: str, kind: str, facts: Mapping[str, int]) -> WorkerShape:
    node = plan.settings.roles[role]
    followed = plan.settings.roles.get(node.follows or "")
    model = node.model or (followed.model if followed else {})
    objective = "objective" if role == POLICY else f"roles.{role}.objective"
    others = (columns for name, columns in plan.columns.items() if name != role)
    return WorkerShape(
        role=role,
        device=kind,
        slots=node.slots,
        model=dict(_with_path(model)),
        engine=dict(node.engine),
        requires=traits_of(plan.objects.get(objective)).requires,
        given=frozenset(column.name for columns in others for column in columns),
        deterministic=plan.settings.run.deterministic,
        acts=role == ROLLOUT and "environment" in plan.provided,
        push_bytes=traits_of(plan.objects.get("controller")).push_bytes,
        records=_records(plan, role),
        group_size=_group_size(plan),
        minibatches=_minibatches(plan, role),
        facts=facts if _tells_of(plan, role) else {},
    )


def _tells_of(plan: ResolvedJob, role: str) -> bool:
    """Returns whether a role's records are those of the rows that were counted: judges have prompts
    of their own, and in an environment an episode is longer than its row.
    """
    is_trainer = plan.provided[f"roles.{role}"].kind == "trainer"
    return (role == ROLLOUT or is_trainer) and "environment" not in plan.provided


def _records(plan: ResolvedJob, role: str) -> int:
    """Returns the most records that one step brings to all workers of a role; 0: not known.

    Generators that draw ahead of the trainer, or for a filter, may draw more than a step trains on.
    """
    controller = traits_of(plan.objects.get("controller"))
    groups = controller.groups_per_step
    if plan.provided[f"roles.{role}"].kind == "trainer":
        return groups * _group_size(plan)
    filters = plan.settings.filter.use != FilterSettings().use  # the default one keeps all
    if role != ROLLOUT or not groups or controller.overlaps or filters:
        return 0
    evaluates = "evaluation.data" in plan.provided
    evaluated = plan.settings.evaluation.prompts if evaluates else 0
    return max(groups * _group_size(plan), evaluated)


def _group_size(plan: ResolvedJob) -> int:
    """Returns how many records of a step have one prompt."""
    if "advantage" not in plan.provided:
        return traits_of(plan.objects.get("controller")).records_per_group
    return int(getattr(build(plan.factory("advantage")), "group_size", 1))


def _minibatches(plan: ResolvedJob, role: str) -> int:
    """Returns into how many parts a role's trainer cuts the records of a step."""
    if role == POLICY:
        return traits_of(plan.objects.get("controller")).minibatches_per_step
    return plan.settings.roles[role].minibatches


def _with_path(model: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the model's settings, with a path where a run before has made the model."""
    make = model.get("make")
    if not isinstance(make, Mapping):
        return model
    try:
        made = find_made(make, models_cache())
    except ConfigError:  # told where the job is checked
        return model
    return model if made is None else {**model, "path": str(made)}


def _unknown(role: str, needs: Sequence[MemoryNeed]) -> dict[str, str]:
    """Returns why parts of what a role needs are not known, by role."""
    reasons = dict.fromkeys(f"{n.what}: {n.note}" for n in needs if n.nbytes is None)
    return {role: "; ".join(reasons)} if reasons else {}


def _needs_on(
    device: Device, role: str, answers: Mapping[str, Sequence[MemoryNeed]], placed: PlacedJob
) -> Iterator[MemoryNeed]:
    """Yields what a role's worker on a device holds in each phase, awake or asleep."""
    is_awake = role == _awake_there(device, role, answers, placed)
    says_asleep = any(need.phase == ASLEEP for need in answers[role])
    for phase in PHASES:
        rests = role in placed.asleep_in_training and phase in ("preparation", "training")
        # a trainer that does not say what it keeps is counted as awake
        away = role in placed.asleep_in_rollout and phase == "rollout" and says_asleep
        sleeping = role in placed.sleeps and (rests or not is_awake)
        state = ASLEEP if sleeping or away else phase
        for need in answers[role]:
            if need.phase == state:
                yield _in_phase(need, phase)


def _in_phase(need: MemoryNeed, phase: str) -> MemoryNeed:
    if need.phase == phase:
        return need
    return replace(need, phase=phase, what=f"{need.what}, asleep")


def _awake_there(
    device: Device, role: str, answers: Mapping[str, Sequence[MemoryNeed]], placed: PlacedJob
) -> str:
    """Returns which role is awake on a device, of those that take turns with ``role`` there.

    Where devices move between generators each of them is awake at some time, so it is the one that
    needs most.
    """
    needs = placed.window.needs
    moving = [name for name in answers if name in needs and needs[name].kind == "generator"]
    if not placed.moves or placed.mode == "coresident" or role not in moving:
        return role
    there = [
        name
        for name in moving
        if any(device.index in worker for worker in placed.workers.get(name, []))
    ]
    return max(there, key=lambda name: _awake_bytes(answers[name]))


def _awake_bytes(needs: Sequence[MemoryNeed]) -> int:
    """Returns what a worker holds on its device more in a rollout than asleep."""
    on_device = [need for need in needs if need.on == "device"]
    awake = sum(need.nbytes or 0 for need in on_device if need.phase == "rollout")
    return awake - sum(need.nbytes or 0 for need in on_device if need.phase == ASLEEP)


def _there(plan: ResolvedJob, placed: PlacedJob) -> dict[Pool, int]:
    """Returns the bytes of each pool whose size is known."""
    there: dict[Pool, int] = {}
    for node in placed.nodes:
        if host := node.host_bytes or _own_memory(node):
            there[Pool(node.name)] = host
    given = plan.settings.cluster.device_gib
    by_node = {node.name: node for node in placed.nodes}
    for device in placed.window.devices:
        nbytes = int(given * GIB) if given else by_node[device.node].device_bytes
        if device.kind != "cpu" and nbytes:
            there[Pool(device.node, device.index)] = nbytes
    return there


def _own_memory(node: NodeFacts) -> int:
    """Returns the memory of this machine, where the node is this machine; else 0."""
    return 0 if node.host else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
