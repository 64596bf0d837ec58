"""Derives the workers of a run from a resolved plan: names, addresses, settings, and their files.

Nothing here starts a process or writes a file.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from msgspec import structs, to_builtins

from gcore_core.config.column_checks import is_of_actions, rollout_columns
from gcore_core.config.plan import Plan, trained_roles
from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.job_settings import POLICY, ROLLOUT
from gcore_core.contract.launching import Launcher, Site
from gcore_core.contract.local_files import files_beside
from gcore_core.contract.providers import (
    ControllerProvider,
    RewardProvider,
    SentinelProvider,
)
from gcore_core.contract.run_files import TRACE, log_path
from gcore_core.contract.sentinel import BAND, Pair, SentinelContext
from gcore_core.contract.site_files import JobFiles
from gcore_core.contract.traits import traits_of
from gcore_core.node import handshake
from gcore_core.run.checkpoint_service import Resumed
from gcore_core.run.initial_placement import Placed
from gcore_core.runtime.messages import StorePlace, WorkerSpec
from gcore_core.runtime.named_files import NamedFile, texts
from gcore_core.runtime.worker_settings import (
    DATASET_SECTIONS,
    NEVER,
    AnnotatorSettings,
    AnySettings,
    GeneratorSettings,
    JobFacts,
    PlainContext,
    ScorerSettings,
    TrainedFacts,
    TrainerSettings,
)

#: Sections of the job that choose the algorithms that a controller calls.
ALGORITHMS = ("advantage", "filter", "balance")
#: What else a controller names in its errors.
_NAMED = ("controller", "objective", "sentinel", f"roles.{POLICY}", f"roles.{ROLLOUT}")
#: Kind of worker -> how often one is started again: when it was killed, or asks for it by its exit
#: code (``RESTART_EXIT_CODE``). A kind that is not here is never started again.
RESTARTS = {"scorer": 1000, "generator": 100, "annotator": 100}
#: The function that makes a controller's context. It is named by a string and not imported, because
#: ``run`` and ``controllers`` never import each other.
CONTROLLER_CONTEXT = "gcore_core.controllers.context:make_context"
#: Factory of the step check of a sentinel that brings none.
COMPARING = "gcore_core.builtin.band:Comparing"
#: The value of ``launcher.files`` by which what a node does not have is copied there.
COPY = "copy"
#: Sections of the job that name nothing which a worker reads.
_OF_THE_RUN = ("run", "launcher", "cluster", "checkpoint", "observers", "plugins")
#: Observers run next to the supervisor alone, so their code is on no other node.
_AT_HOME = "observers."
#: Keys that name a provider, or an interpreter, which is looked for by itself.
_NO_FILES = ("use", "python", "make")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Holds a plan together with everything that must be known before processes start.

    plan: the resolved configuration.
    directory: the run's directory.
    models: role -> its ``model:`` mapping, with ``path`` resolved.
    rows: dataset ("train", "evaluation") -> number of its rows.
    launcher: has found the nodes of ``placed``, and opens a site there.
    placed: which devices each worker has; by default nothing is placed.
    resumed: the checkpoint that the run goes on from; None for a new run.
    restarts: how often the run may still go on by itself when a process is lost.
    files: config key -> the file or directory that it names, as it was when the run began.
    """

    plan: Plan
    directory: Path
    models: Mapping[str, Mapping[str, Any]]
    rows: Mapping[str, int]
    launcher: Launcher
    placed: Placed = field(default_factory=Placed)
    resumed: Resumed | None = None
    restarts: int = 0
    files: Mapping[str, NamedFile] = field(default_factory=dict)

    @property
    def shards(self) -> int:
        return self.plan.settings.controller.shards

    def names(self) -> list[str]:
        """Returns the names of all processes except the supervisor and the node agents."""
        workers = [name for role in self.plan.settings.roles for name in self.workers(role)]
        scorers = [
            f"{name}.{i}"
            for name, rewards in self.scorers().items()
            for i in range(self.scorer_count(rewards))
        ]
        return [*workers, *scorers, *(f"controller.{shard}" for shard in range(self.shards))]

    def where(self) -> dict[str, str]:
        """Returns the name of each process but the supervisor and agents -> its node's name.

        A role's worker runs where its devices are. Scorers and controllers have none, so they take
        the nodes in turn: a scorer and a controller with one number, which speak with each other,
        share one.
        """
        nodes = self.placed.node_names
        where: dict[str, str] = {}
        for name in self.names():
            role, _, number = name.rpartition(".")
            if role in self.plan.settings.roles:
                where[name] = self.placed.node_of(role, int(number))
            else:
                where[name] = nodes[int(number) % len(nodes)]
        return where

    def workers(self, role: str) -> list[str]:
        """Returns the names of a role's processes."""
        return [f"{role}.{rank}" for rank in range(len(self.devices(role)))]

    def devices(self, role: str) -> list[list[int]]:
        """Returns the devices of each of a role's processes; empty lists where none was placed."""
        return self.placed.workers.get(role) or [[]] * self.plan.settings.roles[role].slots

    def scorers(self) -> dict[str, list[str]]:
        """Returns scorer worker -> names of the rewards that it hosts."""
        rewards_of: dict[str, list[str]] = defaultdict(list)
        for name, reward in self.plan.settings.rewards.items():
            rewards_of[reward.worker].append(name)
        return dict(rewards_of)

    def scorer_count(self, rewards: list[str]) -> int:
        """Returns how many processes the worker that hosts these rewards has."""
        return self.plan.settings.rewards[rewards[0]].workers


def worker_specs(job: Job, site: Site) -> list[WorkerSpec]:
    """Returns one spec for each worker: of roles, then scorers, then controllers."""
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
    ranks: int,
    factories: dict[str, FactorySpec],
    settings: AnySettings,
) -> WorkerSpec:
    """Fills in the part of a spec that all kinds of workers share.

    name: "role.rank".
    ranks: how many workers of this role there are.
    factories: what the worker builds, by the worker's own names.
    """
    role, _, rank = name.rpartition(".")
    # The worker must have the same versions as here of the plugins that it builds something of.
    built = {spec.factory for spec in factories.values()}
    provided = [p for p in job.plan.provided.values() if p.spec.factory in built]
    # What the core defines needs nothing of a plugin that offers it, as ``sentinel/band`` does.
    plugins = sorted({p.distribution for p in provided if p.installed and not p.is_of_the_core})
    node = job.plan.settings.roles.get(role)
    home = site.where[name]
    return WorkerSpec(
        role=role,
        rank=int(rank),
        ranks=ranks,
        peers=site.views[home],
        factories=factories,
        public=site.public.get(name, ""),
        secret=site.secret,
        identity=site.identity,
        settings=settings,
        store=StorePlace(str(site.nodes[home].store), home, home),
        versions=handshake.versions(plugins),
        python=(node.python or "") if node else "",
        log=str(job.directory / "logs" / f"{name}.log"),
        restarts=RESTARTS.get(settings.kind, 0),
        shared_memory=tuple(sorted({name for p in provided for name in p.spec.shared_memory})),
        meeting="" if isinstance(settings, JobFacts) else settings.context.rendezvous,
        files=_opened(job, factories, settings),
    )


def _opened(
    job: Job, factories: Mapping[str, FactorySpec], settings: AnySettings
) -> dict[str, NamedFile]:
    """Returns the job's files that a worker opens, with the Python files next to them."""
    context = PlainContext() if isinstance(settings, JobFacts) else settings.context
    configs = [spec.config for spec in factories.values()]
    opened = {text for _, text in texts(to_builtins([*configs, context.model, context.policy]))}
    opened |= {spec.factory.rpartition(":")[0] for spec in factories.values()}
    keys = {key for key, file in job.files.items() if file.path in opened}
    return {key: file for key, file in job.files.items() if key.partition("/")[0] in keys}


def _role_worker(job: Job, site: Site, role: str, rank: int, kind: str) -> WorkerSpec:
    """Returns the spec of one worker of a trainer, annotator or generator role."""
    factories = {"backend": job.plan.factory(f"roles.{role}")}
    run = job.plan.settings.run
    context = _context(job, site, role, rank)
    settings: TrainerSettings | GeneratorSettings | AnnotatorSettings
    if kind == "trainer":
        factories |= _trained_with(job, role)
        resume = f"{job.resumed.path}/{role}" if job.resumed else ""
        sentinel = _sentinel(job) if role == POLICY else None
        factories |= {"sentinel": _sentinel_on_ranks(job)} if sentinel else {}
        settings = TrainerSettings(
            run=run,
            shards=job.shards,
            context=context,
            resume=resume,
            sentinel=sentinel,
            columns=list(job.plan.columns.get(role, ())),
            adapters=_take_adapters(job, role),
        )
    elif kind == "annotator":
        settings = AnnotatorSettings(
            run=run,
            shards=job.shards,
            context=structs.replace(context, policy=dict(job.models.get(POLICY, {}))),
            columns=list(job.plan.columns[role]),
        )
    else:
        factories |= _dataset_factories(job)
        factories |= _chosen_factories(job, "environment") if role == ROLLOUT else {}
        speakers = job.plan.settings.speakers if role == ROLLOUT else {}
        settings = GeneratorSettings(
            run=run,
            shards=job.shards,
            context=context,
            follows=role == ROLLOUT and _pushes_weights(job),
            aborts=traits_of(job.plan.objects[f"roles.{role}"]).abort,
            speakers=speakers,
            asks={role: job.workers(role) for role in speakers.values()},
        )
    return _spec(job, site, f"{role}.{rank}", len(job.workers(role)), factories, settings)


def _take_adapters(job: Job, trainer: str) -> bool:
    """Returns whether every generator that follows a trainer takes an adapter alone.

    They all read one push, so a single one that cannot has all of them get whole weights.
    """
    roles = job.plan.settings.roles
    followers = [f"roles.{role}" for role, node in roles.items() if node.follows == trainer]
    return all(traits_of(job.plan.objects[path]).adapters for path in followers)


def _trained_with(job: Job, role: str) -> dict[str, FactorySpec]:
    """Returns what a trainer builds besides its backend: its objective, the job's or its own, and
    an advantage that is computed on ranks.
    """
    own = f"roles.{role}.objective"
    chosen = _chosen_factories(job, own if own in job.plan.provided else "objective", "advantage")
    made = {path.rpartition(".")[2]: spec for path, spec in chosen.items()}
    if not is_of_actions(job.plan.provided):
        made.pop("advantage", None)
    return made


def _scorer(
    job: Job,
    site: Site,
    worker: str,
    rank: int,
    rewards: list[str],
) -> WorkerSpec:
    """Returns the spec of one scorer worker, which hosts the named rewards."""
    factories = {f"reward/{name}": job.plan.factory(f"rewards.{name}") for name in rewards}
    settings_of = {name: job.plan.settings.rewards[name] for name in rewards}
    settings = ScorerSettings(
        run=job.plan.settings.run,
        shards=job.shards,
        context=_context(job, site, worker, rank),
        rewards=settings_of,
        asks={
            reward.role: job.workers(reward.role) for reward in settings_of.values() if reward.role
        },
        datasets={name: job.plan.provided[DATASET_SECTIONS[name]].reference for name in job.rows},
        of_groups=[name for name in rewards if _is_of_groups(job, name)],
    )
    name = f"{worker}.{rank}"
    return _spec(
        job, site, name, job.scorer_count(rewards), factories | _dataset_factories(job), settings
    )


def _last_ordinal(job: Job) -> int:
    """Returns the number of groups after which the epochs are over; NEVER without ``epochs``."""
    epochs = job.plan.settings.run.epochs
    if not epochs:
        return NEVER
    # As it is written in decimals: in binary 1.1 times 100 rows is a little more than 110.
    return math.ceil(Fraction(str(epochs)) * job.rows["train"])


def _controller(job: Job, site: Site, shard: int) -> WorkerSpec:
    """Returns the spec of the controller of one shard."""
    moves = ["placement"] if job.placed.moves else []
    watches = ["sentinel"] if _sentinel(job) else []
    factories = _chosen_factories(job, "controller", *ALGORITHMS, *moves, *watches)
    factories["context"] = FactorySpec(CONTROLLER_CONTEXT)
    if watches and shard == 0:
        factories["step_check"] = _step_check(job)
    return _spec(job, site, f"controller.{shard}", 1, factories, _facts(job, shard))


def _facts(job: Job, shard: int) -> JobFacts:
    """Returns the settings of one shard's controller."""
    settings = job.plan.settings
    controller = job.plan.objects["controller"]
    backends = [job.plan.objects[f"roles.{role}"] for role in settings.roles]
    # Each once, in order.
    judges = dict.fromkeys(
        [*(reward.role for reward in settings.rewards.values()), *settings.speakers.values()]
    )
    resumed = job.resumed
    state = resumed.state if resumed else {}
    return JobFacts(
        run=settings.run,
        shards=job.shards,
        shard=shard,
        rows=dict(job.rows),
        replicas=job.workers(ROLLOUT) if ROLLOUT in settings.roles else [],
        owns_replicas=job.plan.settings.controller.replicas == "owned",
        trained={role: _trained(job, role) for role in trained_roles(job.plan)},
        scorers={
            f"{worker}.{shard % job.scorer_count(rewards)}": rewards
            for worker, rewards in job.scorers().items()
        },
        rewards=settings.rewards,
        providers={
            name: job.plan.provided[name].reference
            for name in (*ALGORITHMS, *_NAMED)
            if name in job.plan.provided
        },
        of_groups=[name for name in settings.rewards if _is_of_groups(job, name)],
        evaluation=settings.evaluation,
        checkpoint=settings.checkpoint,
        logprob_band=_logprob_band(*backends),
        compares_logprobs="values" not in traits_of(job.plan.objects.get("objective")).requires,
        sentinel=_sentinel(job),
        both_score=_both_sides_score_actions(job),
        output=str(job.directory / "weights"),
        trace=str(job.directory / TRACE),
        takes_stale=traits_of(job.plan.objects.get("objective")).takes_stale,
        midway_weights=traits_of(job.plan.objects.get(f"roles.{ROLLOUT}")).midway_weights,
        judges={role: job.workers(role) for role in judges if role and role != ROLLOUT},
        annotators={role: job.workers(role) for role in _annotator_roles(job)},
        placement=job.placed.facts(traits_of(controller).groups_per_step, str(job.directory)),
        asleep_in_training=list(job.placed.asleep_in_training),
        trainers_sleep=settings.placement.sleep_in_rollout == "always",
        last_ordinal=_last_ordinal(job),
        start_step=resumed.step if resumed else 0,
        evaluated=resumed.evaluated if resumed else False,
        next_ordinal=state.get("ledger", {}).get("next_ordinal", 0),
        state=state,
        carried=resumed.carried if resumed else [],
    )


def _logprob_band(*backends: Any) -> float:
    """Returns the widest band that a config states, in nats; 1e-3 where none does."""
    return max((traits_of(config).logprob_band for config in backends), default=0.0) or 1e-3


def _both_sides_score_actions(job: Job) -> bool:
    backends = [job.plan.objects.get(f"roles.{role}") for role in (ROLLOUT, POLICY)]
    return all(traits_of(config).scores_logprobs for config in backends)


def _sentinel_on_ranks(job: Job) -> FactorySpec:
    spec = job.plan.factory("sentinel")
    return FactorySpec(BAND) if spec.factory == BAND else spec


def _step_check(job: Job) -> FactorySpec:
    spec = job.plan.provided["sentinel"].spec
    if isinstance(spec, SentinelProvider) and spec.check:
        return structs.replace(job.plan.factory("sentinel"), factory=spec.check)
    return FactorySpec(COMPARING)


def _sentinel(job: Job) -> SentinelContext | None:
    """Returns what the job's sentinel is to know.

    None where nothing watches: the job has no rollout, its generators get no weights, or its
    trainer does not give log-probs.
    """
    plan = job.plan
    paths = [f"roles.{ROLLOUT}", f"roles.{POLICY}"]
    if not {"sentinel", *paths} <= plan.provided.keys() or not _pushes_weights(job):
        return None
    generator, trainer = (plan.objects[path] for path in paths)
    if not traits_of(trainer).compares_logprobs:
        return None
    return SentinelContext(
        pair=Pair(
            generator=plan.provided[paths[0]].plugin,
            generator_precision=traits_of(generator).precision,
            trainer=plan.provided[paths[1]].plugin,
            trainer_precision=traits_of(trainer).precision,
        ),
        band=traits_of(plan.objects["controller"]).largest_gap or _logprob_band(generator, trainer),
        model=dict(job.models.get(POLICY, {})),
        replicas=len(job.workers(ROLLOUT)),
        directory=str(job.directory),
    )


def _pushes_weights(job: Job) -> bool:
    spec = job.plan.provided["controller"].spec
    return isinstance(spec, ControllerProvider) and "push" in spec.calls.get("generator", ())


def _is_of_groups(job: Job, reward: str) -> bool:
    spec = job.plan.provided[f"rewards.{reward}"].spec
    return isinstance(spec, RewardProvider) and spec.level == "group"


def _chosen_factories(job: Job, *paths: str) -> dict[str, FactorySpec]:
    """Leaves out sections that are empty: no step program needs all."""
    return {path: job.plan.factory(path) for path in paths if path in job.plan.provided}


def _annotator_roles(job: Job) -> list[str]:
    roles = job.plan.settings.roles
    return [role for role in roles if job.plan.provided[f"roles.{role}"].kind == "annotator"]


def _trained(job: Job, role: str) -> TrainedFacts:
    """Returns what controllers are to know of a role that is trained."""
    node = job.plan.settings.roles[role]
    objective = "objective" if role == POLICY else f"roles.{role}.objective"
    devices = {name: {d for one in job.devices(name) for d in one} for name in (role, POLICY)}
    return TrainedFacts(
        ranks=_workers_of_each_replica(job, role),
        minibatches=node.minibatches,
        epochs=node.epochs,
        head_start=node.head_start,
        gives=bool(job.plan.columns.get(role)),
        apart=bool(devices[role]) and not devices[role] & devices[POLICY],
        whole_groups="group" in traits_of(job.plan.objects.get(objective)).requires,
    )


def _workers_of_each_replica(job: Job, role: str) -> list[list[str]]:
    """A replica's workers have consecutive numbers."""
    size = traits_of(job.plan.objects[f"roles.{role}"]).replica_slots
    workers = job.workers(role)
    return [workers[i : i + size] for i in range(0, len(workers), size)]


def _dataset_factories(job: Job) -> dict[str, FactorySpec]:
    return {f"dataset/{name}": job.plan.factory(DATASET_SECTIONS[name]) for name in job.rows}


def _context(job: Job, site: Site, role: str, rank: int) -> PlainContext:
    """Returns the context of one worker.

    role: one of the job's roles, or a scorer worker.
    """
    node = job.plan.settings.roles.get(role)
    meets = node is not None and len(job.workers(role)) > 1
    meeting = site.node_of(f"{role}.{rank}").meeting / f"meet-{role}"
    return PlainContext(
        devices=job.placed.local_devices(role, rank) if node else (),
        devices_in_use=job.placed.in_use(role, rank) if node else 0,
        updates_per_step=(
            node.minibatches * node.epochs
            if node is not None and role != POLICY and role in trained_roles(job.plan)
            else traits_of(job.plan.objects["controller"]).updates_per_step
        ),
        model=dict(job.models.get(role, {})),
        engine=dict(node.engine) if node else {},
        rendezvous=str(meeting) if meets else "",
        meeting_address=site.meeting_addresses.get(role, ""),
        directory=str(job.directory),
        columns=tuple(column.name for column in job.plan.columns.get(role, ())),
        given=(
            *(column.name for columns in job.plan.columns.values() for column in columns),
            *rollout_columns(job.plan.provided),
        ),
    )


def job_files(job: Job, where: Mapping[str, str]) -> JobFiles:
    """Returns what every node with workers must have.

    What stands below ``roles.X`` is for the nodes of that role's workers, all else for all nodes.

    where: process -> its node.
    """
    nodes_of: dict[str, set[str]] = {}
    for process, node in where.items():
        nodes_of.setdefault(process.rpartition(".")[0], set()).add(node)
    everywhere = sorted({node for nodes in nodes_of.values() for node in nodes})
    paths: dict[str, set[str]] = {node: set() for node in everywhere}
    for role, path in named_paths(job):
        for node in nodes_of.get(role, everywhere) if role else everywhere:
            paths[node].add(path)
    interpreters: dict[str, set[str]] = {node: set() for node in everywhere}
    for role, settings in job.plan.settings.roles.items():
        for node in nodes_of.get(role, ()) if settings.python else ():
            interpreters[node].add(str(settings.python))
    return JobFiles(
        paths={node: frozenset(found) for node, found in paths.items()},
        interpreters={node: frozenset(found) for node, found in interpreters.items()},
        packages=code_packages(job),
        may_copy=job.plan.settings.launcher.files == COPY,
        host=job.placed.host,
        log=log_path(job.directory, "supervisor"),
    )


def named_paths(job: Job) -> Iterator[tuple[str, str]]:
    """Yields (role, path) of each file and directory that the job names and that is there.

    The role is "" for what is not below ``roles``. A value names a path when it has a slash and
    something is there; the files of the project's own code are named, too. Left out are keys that
    end with ``_dir``, which say where something is written, and the run's own directory with those
    above it. With a file of Python come the files next to it that it imports.
    """
    config = dict(job.plan.config)
    roles = {
        role: {**node, "model": dict(job.models.get(role) or node.get("model") or {})}
        for role, node in config.pop("roles", {}).items()
    }
    code = [
        provided.spec.factory.rpartition(":")[0]
        for path, provided in job.plan.provided.items()
        if ".py:" in provided.spec.factory and not path.startswith(_AT_HOME)
    ]
    plain = {key: value for key, value in config.items() if key not in _OF_THE_RUN}
    named = [("", value) for value in (*code, *_texts(plain))]
    named += [(role, value) for role, node in roles.items() for value in _texts(node)]
    for role, value in dict.fromkeys(named):
        path = Path(os.path.expanduser(value)).absolute()
        # Not Path's own method: it raises for a text that is longer than a path can be, such as the
        # template of a judge.
        if os.path.exists(path) and not job.directory.absolute().is_relative_to(path):
            yield from ((role, str(file)) for file in (path, *files_beside(path)))


def _texts(tree: Any, key: str = "") -> Iterator[str]:
    """Yields each text of a tree that has a slash, but not under keys that name no input."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name not in _NO_FILES:
                yield from _texts(value, str(name))
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _texts(value, key)
    elif isinstance(tree, str) and "/" in tree and not key.endswith("_dir"):
        yield tree


def code_packages(job: Job) -> list[str]:
    """Returns the packages whose code workers run in the launcher's interpreter."""
    of_own_interpreters = {
        f"roles.{role}" for role, node in job.plan.settings.roles.items() if node.python
    }
    factories = [
        provided.spec.factory
        for path, provided in job.plan.provided.items()
        if path not in of_own_interpreters and not path.startswith(_AT_HOME)
    ]
    modules = [factory.rpartition(":")[0] for factory in factories]
    names = {module.partition(".")[0] for module in modules if not module.endswith(".py")}
    return sorted(names | {"gcore_core"})
