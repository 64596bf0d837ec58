"""From a resolved plan to the workers of a run: names, addresses, what each is told. Pure but for
finding devices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore_core.config.plan import Plan
from gcore_core.contract.factories import (
    FactorySpec,
    config_object,
    logprob_band,
    replica_slots,
    takes_stale,
)
from gcore_core.contract.run_files import TRACE
from gcore_core.run.checkpoint_service import TRAINER, Resumed
from gcore_core.run.placed import Placed
from gcore_core.runtime.messages import WorkerSpec
from gcore_core.runtime.process import handshake
from gcore_core.runtime.process.launchers import AGENT, Site

#: How often a worker that was killed, or gives itself up for a timeout, is started again.
RESTARTS = {"scorer": 1000, "generator": 100}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan with everything known that must be known before processes start.

    models: role -> its ``model:`` mapping with ``path`` resolved. rows: dataset -> its size.
    """

    plan: Plan
    directory: Path
    models: Mapping[str, Mapping[str, Any]]
    rows: Mapping[str, int]
    placed: Placed = field(default_factory=Placed)
    resumed: Resumed | None = None

    @property
    def shards(self) -> int:
        return self.plan.settings.controller.shards

    def names(self) -> list[str]:
        """Every process that serves or is served, but the supervisor and the agent."""
        workers = [name for role in self.plan.settings.roles for name in self.workers(role)]
        scorers = [
            f"{name}.{i}"
            for name, rewards in self.scorers().items()
            for i in range(self.scorer_count(rewards))
        ]
        return [*workers, *scorers, *(f"controller.{shard}" for shard in range(self.shards))]

    def workers(self, role: str) -> list[str]:
        """Names of a role's processes."""
        return [f"{role}.{rank}" for rank in range(len(self.devices(role)))]

    def devices(self, role: str) -> list[list[int]]:
        """Of each of a role's processes; none where nothing was placed."""
        return self.placed.workers.get(role) or [[]] * self.plan.settings.roles[role].slots

    def scorers(self) -> dict[str, list[str]]:
        """Scorer worker -> the rewards it hosts."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, reward in self.plan.settings.rewards.items():
            found[reward.worker].append(name)
        return dict(found)

    def scorer_count(self, rewards: list[str]) -> int:
        """How many processes there are of the worker that hosts these rewards."""
        return self.plan.settings.rewards[rewards[0]].workers


def worker_specs(job: Job, site: Site) -> list[WorkerSpec]:
    """One spec per worker: roles, scorers, controllers."""
    specs = []
    for role in job.plan.settings.roles:
        kind = job.plan.provided[f"roles.{role}"].kind
        for rank in range(len(job.workers(role))):
            specs.append(_role_worker(job, site, role, rank, kind))
    for worker, rewards in job.scorers().items():
        specs += [
            _scorer(job, site, worker, rank, rewards) for rank in range(job.scorer_count(rewards))
        ]
    specs += [_controller(job, site, shard) for shard in range(job.shards)]
    return specs


def _spec(
    job: Job,
    site: Site,
    name: str,
    kind: str,
    factories: dict[str, FactorySpec],
    settings: dict[str, Any],
) -> WorkerSpec:
    role, _, rank = name.rpartition(".")
    built = {spec.factory for spec in factories.values()}
    plugins = sorted(
        {
            p.distribution
            for p in job.plan.provided.values()
            if p.installed and p.spec.factory in built
        }
    )
    node = job.plan.settings.roles.get(role)
    ranks = len(job.workers(role)) if node else settings.pop("workers", 1)
    return WorkerSpec(
        kind=kind,
        role=role,
        rank=int(rank),
        ranks=ranks,
        peers=site.addresses,
        factories=factories,
        secret=site.secret,
        versions=handshake.versions(plugins),
        settings={
            "node": AGENT,
            "agent": AGENT,
            "store": str(site.store),
            "shards": job.shards,
            **settings,
        },
        python=(node.python or "") if node else "",
        log=str(job.directory / "logs" / f"{name}.log"),
        restarts=RESTARTS.get(kind, 0),
    )


def _role_worker(job: Job, site: Site, role: str, rank: int, kind: str) -> WorkerSpec:
    run = job.plan.settings.run
    factories = {"backend": job.plan.factory(f"roles.{role}")}
    factories |= (
        {"objective": job.plan.factory("objective")} if kind == "trainer" else _datasets(job)
    )
    settings = {
        "rank": rank,
        "seed": run.seed,
        "deterministic": run.deterministic,
        "trainers": job.workers("policy"),
        "resume": f"{job.resumed.path}/{TRAINER}" if job.resumed and kind == "trainer" else "",
        "context": _context(job, site, role, rank),
    }
    return _spec(job, site, f"{role}.{rank}", kind, factories, settings)


def _scorer(job: Job, site: Site, worker: str, rank: int, rewards: list[str]) -> WorkerSpec:
    nodes = {name: job.plan.settings.rewards[name] for name in rewards}
    factories = {f"reward/{name}": job.plan.factory(f"rewards.{name}") for name in rewards}
    settings = {
        "workers": job.scorer_count(rewards),
        "rewards": {
            name: {
                "timeout_s": node.timeout_s,
                "role": node.role,
                "when": {key: _listed(value) for key, value in node.when.items()},
            }
            for name, node in nodes.items()
        },
        "asks": {node.role: job.workers(node.role) for node in nodes.values() if node.role},
        "context": _context(job, site, worker, rank),
    }
    return _spec(job, site, f"{worker}.{rank}", "scorer", factories | _datasets(job), settings)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _last_ordinal(job: Job) -> dict[str, int]:
    epochs = job.plan.settings.run.epochs
    return {"last_ordinal": math.ceil(epochs * job.rows["train"])} if epochs else {}


def _controller(job: Job, site: Site, shard: int) -> WorkerSpec:
    settings = job.plan.settings
    names = (
        "controller",
        "advantage",
        "filter",
        "balance",
        *(["placement"] if job.placed.moves else []),
    )
    factories = {name: job.plan.factory(name) for name in names}
    asked = {reward.role: None for reward in settings.rewards.values()}
    controller = config_object(job.plan.factory("controller"))
    facts = {
        "shard": shard,
        "steps": settings.run.steps,
        "seed": settings.run.seed,
        "deterministic": settings.run.deterministic,
        "rows": dict(job.rows),
        "replicas": job.workers("rollout"),
        "ranks": _data_parallel(job),
        "scorers": {
            f"{worker}.{shard % job.scorer_count(rewards)}": rewards
            for worker, rewards in job.scorers().items()
        },
        "logprob_band": logprob_band(
            *(config_object(job.plan.factory(f"roles.{role}")) for role in settings.roles)
        ),
        "rewards": {
            name: {
                "weight": node.weight,
                "normalise": node.normalise,
                "level": job.plan.provided[f"rewards.{name}"].spec.level,  # type: ignore[attr-defined]
            }
            for name, node in settings.rewards.items()
        },
        "evaluate_every": settings.evaluation.every,
        "evaluate_prompts": settings.evaluation.prompts,
        "show": settings.evaluation.show,
        "output": str(job.directory / "weights"),
        "trace": str(job.directory / TRACE),
        "takes_stale": takes_stale(config_object(job.plan.factory("objective"))),
        "judges": {role: job.workers(role) for role in asked if role and role != "rollout"},
        "placement": job.placed.facts(getattr(controller, "prompts", 0), str(job.directory)),
        "resting": list(job.placed.resting),
        **_last_ordinal(job),
        "patience_s": settings.run.patience_s,
        "checkpoint_every": settings.checkpoint.every,
        **_start(job),
    }
    return _spec(job, site, f"controller.{shard}", "controller", factories, facts)


def _start(job: Job) -> dict[str, Any]:
    """Where controllers begin."""
    if job.resumed is None:
        return {}
    state = job.resumed.state
    place = {"start_step": job.resumed.step, "next_ordinal": state["ledger"]["next_ordinal"]}
    return {**place, "state": state, "carried": job.resumed.carried}


def _data_parallel(job: Job) -> list[list[str]]:
    """The workers of each of the policy's data-parallel ranks: neighbours that hold one replica
    together.
    """
    size = replica_slots(config_object(job.plan.factory("roles.policy")))
    workers = job.workers("policy")
    return [workers[i : i + size] for i in range(0, len(workers), size)]


def _datasets(job: Job) -> dict[str, FactorySpec]:
    where = {"train": "data", "evaluation": "evaluation.data"}
    return {f"dataset/{name}": job.plan.factory(where[name]) for name in job.rows}


def _context(job: Job, site: Site, role: str, rank: int) -> dict[str, Any]:
    """The part of a WorkerContext that is plain."""
    run = job.plan.settings.run
    node = job.plan.settings.roles.get(role)
    meeting = site.meeting / f"meet-{role}"
    meeting.mkdir(mode=0o700, exist_ok=True)
    return {
        "devices": job.devices(role)[rank] if node else [],
        "seed": run.seed,
        "deterministic": run.deterministic,
        "steps": run.steps,
        "updates_per_step": config_object(job.plan.factory("controller")).updates_per_step,
        "model": dict(job.models.get(role, {})),
        "rendezvous": str(meeting) if node and len(job.workers(role)) > 1 else "",
        "engine": dict(node.engine) if node else {},
        "directory": str(job.directory),
    }
