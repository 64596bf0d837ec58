"""From a resolved plan to the workers of a run: names, addresses, what each is told. Pure but for finding devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore_core.config import Plan
from gcore_core.factories import FactorySpec, build, config_object, logprob_band, replica_slots
from gcore_core.placement.devices import Partition, PlacementPolicy, Window, find_devices
from gcore_core.processes import handshake
from gcore_core.processes.launchers import AGENT, Site
from gcore_core.processes.messages import WorkerSpec

SCORER_RESTARTS = 1000  # one that is given up for a timeout is started again


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan with everything known that must be known before processes start.

    models: role -> its ``model:`` mapping with ``path`` resolved. rows: dataset -> its size.
    """

    plan: Plan
    directory: Path
    models: Mapping[str, Mapping[str, Any]]
    rows: Mapping[str, int]
    partition: Partition = field(default_factory=lambda: Partition({}))

    @property
    def shards(self) -> int:
        return int(self.plan.config["controller"]["shards"])

    def names(self) -> list[str]:
        """Every process that serves or is served, but the supervisor and the agent."""
        config = self.plan.config
        workers = [f"{role}.{rank}" for role, node in config["roles"].items() for rank in range(node["slots"])]
        scorers = [f"{name}.0" for name in self.scorers()]
        return [*workers, *scorers, *(f"controller.{shard}" for shard in range(self.shards))]

    def scorers(self) -> dict[str, list[str]]:
        """Scorer worker -> the rewards it hosts."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, node in self.plan.config["rewards"].items():
            found[node["worker"]].append(name)
        return dict(found)


def place(plan: Plan) -> Partition:
    """Asks the placement policy. Raises PlacementError naming the role that does not fit."""
    devices = find_devices(plan.config["cluster"]["devices"])
    slots = {role: int(node["slots"]) for role, node in plan.config["roles"].items()}
    policy: PlacementPolicy = build(plan.factory("placement"))
    return policy.revise(None, Window(devices=devices, slots=slots))


def worker_specs(job: Job, site: Site) -> list[WorkerSpec]:
    """One spec per worker: roles, scorers, controllers."""
    config = job.plan.config
    specs = []
    for role, node in config["roles"].items():
        kind = job.plan.provided[f"roles.{role}"].kind
        for rank in range(node["slots"]):
            specs.append(_role_worker(job, site, role, rank, kind))
    specs += [_scorer(job, site, worker, rewards) for worker, rewards in job.scorers().items()]
    specs += [_controller(job, site, shard) for shard in range(job.shards)]
    return specs


def _spec(
    job: Job, site: Site, name: str, kind: str, factories: dict[str, FactorySpec], settings: dict[str, Any]
) -> WorkerSpec:
    role, _, rank = name.rpartition(".")
    built = {spec.factory for spec in factories.values()}
    plugins = sorted({p.distribution for p in job.plan.provided.values() if p.installed and p.spec.factory in built})
    node = job.plan.config["roles"].get(role, {})
    return WorkerSpec(
        kind=kind,
        role=role,
        rank=int(rank),
        ranks=int(node.get("slots", 1)),
        peers=site.addresses,
        factories=factories,
        secret=site.secret,
        versions=handshake.versions(plugins),
        settings={"node": AGENT, "agent": AGENT, "store": str(site.store), "shards": job.shards, **settings},
        python=node.get("python") or "",
        log=str(job.directory / "logs" / f"{name}.log"),
        restarts=SCORER_RESTARTS if kind == "scorer" else 0,
    )


def _role_worker(job: Job, site: Site, role: str, rank: int, kind: str) -> WorkerSpec:
    config = job.plan.config
    factories = {"backend": job.plan.factory(f"roles.{role}")}
    factories |= {"objective": job.plan.factory("objective")} if kind == "trainer" else _datasets(job)
    settings = {
        "rank": rank,
        "seed": config["run"]["seed"],
        "deterministic": config["run"]["deterministic"],
        "context": _context(job, site, role, rank),
    }
    return _spec(job, site, f"{role}.{rank}", kind, factories, settings)


def _scorer(job: Job, site: Site, worker: str, rewards: list[str]) -> WorkerSpec:
    config = job.plan.config
    factories = {f"reward/{name}": job.plan.factory(f"rewards.{name}") for name in rewards}
    settings = {
        "timeouts_s": {name: config["rewards"][name]["timeout_s"] for name in rewards},
        "context": _context(job, site, worker, 0),
    }
    return _spec(job, site, f"{worker}.0", "scorer", factories | _datasets(job), settings)


def _controller(job: Job, site: Site, shard: int) -> WorkerSpec:
    config = job.plan.config
    names = ("controller", "advantage", "filter", "balance")
    factories = {name: job.plan.factory(name) for name in names}
    roles = config["roles"]
    settings = {
        "shard": shard,
        "steps": config["run"]["steps"],
        "seed": config["run"]["seed"],
        "deterministic": config["run"]["deterministic"],
        "rows": dict(job.rows),
        "replicas": [f"rollout.{i}" for i in range(roles["rollout"]["slots"])],
        "ranks": _data_parallel(job),
        "scorers": {f"{worker}.0": rewards for worker, rewards in job.scorers().items()},
        "logprob_band": logprob_band(*(config_object(job.plan.factory(f"roles.{role}")) for role in roles)),
        "weights": {name: node["weight"] for name, node in config["rewards"].items()},
        "evaluate_every": config["evaluation"]["every"],
        "evaluate_prompts": config["evaluation"]["prompts"],
        "show": config["evaluation"]["show"],
        "output": str(job.directory / "weights"),
        "trace": str(job.directory / "trace"),
    }
    return _spec(job, site, f"controller.{shard}", "controller", factories, settings)


def _data_parallel(job: Job) -> list[list[str]]:
    """The workers of each of the policy's data-parallel ranks: neighbours that hold one replica together."""
    size = replica_slots(config_object(job.plan.factory("roles.policy")))
    workers = [f"policy.{i}" for i in range(job.plan.config["roles"]["policy"]["slots"])]
    return [workers[i : i + size] for i in range(0, len(workers), size)]


def _datasets(job: Job) -> dict[str, FactorySpec]:
    where = {"train": "data", "evaluation": "evaluation.data"}
    return {f"dataset/{name}": job.plan.factory(where[name]) for name in job.rows}


def _context(job: Job, site: Site, role: str, rank: int) -> dict[str, Any]:
    """The part of a WorkerContext that is plain."""
    config = job.plan.config
    node = config["roles"].get(role, {})
    meeting = site.meeting / f"meet-{role}"
    meeting.mkdir(mode=0o700, exist_ok=True)
    return {
        "devices": list(job.partition.devices(role, rank)) if role in job.partition.cells else [],
        "seed": config["run"]["seed"],
        "deterministic": config["run"]["deterministic"],
        "steps": config["run"]["steps"],
        "updates_per_step": config_object(job.plan.factory("controller")).updates_per_step,
        "model": dict(job.models.get(role, {})),
        "rendezvous": str(meeting) if node.get("slots", 1) > 1 else "",
        "engine": dict(node.get("engine", {})),
        "directory": str(job.directory),
    }
