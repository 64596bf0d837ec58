"""Trains on the records of a step: balance, preparation, advantages, updates.

A gradient is a sum of rounded numbers, so its last bits depend on which records share a forward
pass. In a deterministic run these are therefore chosen without a look at the number of ranks:
every minibatch is cut into the same number of *tiles*, and each rank gets whole tiles. A trainer
that computes each tile by itself, and adds tiles up exactly, has the same bits with any number of
ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from gcore_core.contract.algorithms import (
    ActionAdvantage,
    Balancer,
    GroupScalars,
    KeepsCosts,
    LearnsCosts,
    Work,
)
from gcore_core.contract.errors import ContractError, RecordMismatch, TrainingError, WeightMismatch
from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.lineage import check_receipt, name_of
from gcore_core.contract.order import row_of, step_seed
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.records import FINISHED, TRUNCATED, Assignment, Facts, Header, Ref
from gcore_core.contract.run_files import UPDATE_METRICS
from gcore_core.controllers.algorithm_answers import (
    advantages_of,
    balancer_code,
    costs_of,
    split_of,
    statistics_of,
)
from gcore_core.controllers.annotating import annotate, annotated
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.reward_weights import group_scalars, statistics
from gcore_core.controllers.watching import GAP_MAX, Watching
from gcore_core.runtime.messages import (
    PREPARE_RANKS,
    SKIP_STEP,
    TRAIN_RANKS,
    Answer,
    Part,
    PrepareRequest,
    RelayedEndpoint,
    SkipStep,
    TrainItem,
    TrainReply,
    TrainRequest,
)
from gcore_core.runtime.relay import ask_ranks
from gcore_core.runtime.step_digests import digest_of, sum_of
from gcore_core.runtime.worker_settings import TrainedFacts
from gcore_core.wire.retry import insist

Key = tuple[int, int]  # (ordinal, sample) of a record
Plan = dict[Key, Assignment]
Plans = dict[str, Plan]  # of each role that is trained


@dataclass(frozen=True)
class PlannedUpdate:
    """Holds a plan and what the balancer predicts of it.

    plan: where each record trains.
    loads: for each rank, the work that it has by the plan.
    imbalance: the worst of all minibatches, as predicted: the largest load over the mean.
    """

    plan: Plan
    loads: list[Work]
    imbalance: float


class Training:
    """Does one shard's part of a step's update.

    A step program calls ``balance``, ``prepare``, ``advantages`` and ``train``, in this order; in a
    step without a group to train on only ``skip``.

    Every role that is trained goes through the same loops, the policy as the last. Its plan of a
    step says on which data-parallel rank and in which minibatch a record trains it. A record is
    stale when older weights than the trainer's began it: the trainer does not compare its log-probs
    with its own.

    watching: compares log-probs by the job's sentinel.
    """

    def __init__(self, context: ControllerContext, config: SyncConfig) -> None:
        self._context = context
        self._config = config
        trained = dict(context.facts.trained)
        trained[POLICY] = msgspec.structs.replace(
            trained[POLICY], minibatches=config.minibatches, epochs=config.epochs
        )
        self._trained: dict[str, TrainedFacts] = trained
        self._planned: PlannedUpdate | None = None  # of the policy; only the lead has it
        self._digests: dict[str, int] = {}
        self.watching = Watching(context)
        self._balancer_provider = context.facts.providers.get("balance", "")
        restore_costs(
            context.balancer, context.facts.state.get("balance", {}), self._balancer_provider
        )

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run goes on with, besides the trainers' own part; plain values."""
        return learned_costs(self._context.balancer, self._balancer_provider)

    def digests(self) -> dict[str, int]:
        """Returns stage -> this shard's digest of the latest update; empty after a skipped step.

        The sum over the shards is the step's.
        """
        return self._digests

    async def balance(self, step: int, groups: list[list[Header]]) -> Plans:
        """Sends the facts of this shard's records to the lead; returns the plans for these records.

        Only the lead sees the facts of all shards, and only it asks the balancer. It makes a plan
        for every role, which has ranks and minibatches of its own.
        """

        async def lead(payloads: list[bytes]) -> list[bytes]:
            by_shard = [msgspec.msgpack.decode(payload, type=list[Facts]) for payload in payloads]
            planned = self._plan(step, [fact for part in by_shard for fact in part])
            self._planned = planned[POLICY]
            return [
                msgspec.msgpack.encode(
                    {
                        role: [one.plan[f.ordinal, f.sample] for f in part]
                        for role, one in planned.items()
                    }
                )
                for part in by_shard
            ]

        facts = [
            Facts(h.ordinal, h.sample, h.n_prompt, h.n_actions, h.cost)
            for group in groups
            for h in group
        ]
        answer = await self._context.agree.ask("facts", msgspec.msgpack.encode(facts), lead)
        by_role = msgspec.msgpack.decode(answer, type=dict[str, list[Assignment]])
        keys = [(fact.ordinal, fact.sample) for fact in facts]
        return {role: dict(zip(keys, own, strict=True)) for role, own in by_role.items()}

    def _plan(self, step: int, records: list[Facts]) -> dict[str, PlannedUpdate]:
        """Makes the plan of each role for the records of all shards."""
        context = self._context
        run = context.facts.run
        return {
            role: make_plan(
                records,
                len(trained.ranks),
                trained.minibatches,
                step_seed(run.seed, step),
                context.balancer,
                context.balancer_code,
                self._config.tiles if run.deterministic else None,
                whole_groups=trained.whole_groups,
            )
            for role, trained in self._trained.items()
        }

    async def prepare(
        self, step: int, groups: list[list[Header]], plans: Plans
    ) -> dict[Key, list[float]]:
        """Prepares the records on the ranks; returns the scalars that the advantage requires.

        Every role that gives columns annotates the records first. Then each rank of every trainer
        gets references to its records. Each record has a row of scalars, by their sorted
        names; it is empty in a step in which the policy is not trained.
        """
        context = self._context
        masks = self._config.truncated == "mask"
        items = {
            role: dealt(groups, plans[role], len(ranks), masks_truncated=masks)
            for role, ranks in context.trained.items()
        }
        unplaced = [item for part in items[POLICY] for item in part]
        extras = await annotate(context, step, unplaced, items)
        scalars: dict[Key, list[float]] = {}
        for role in self._roles_that_train(step):
            required = role == POLICY and not self._is_of_actions
            names = sorted(context.advantage.requires) if required else []
            parts = items[role]
            requests = [PrepareRequest(step, annotated(part, extras), names) for part in parts]
            replies = await self._ask(role, PREPARE_RANKS, step, requests)
            scalars = {
                (item.ordinal, item.sample): row
                for part, rows in zip(parts, replies, strict=True)
                for item, row in zip(part, rows, strict=True)
            }
        return scalars

    @property
    def _is_of_actions(self) -> bool:
        return isinstance(self._context.advantage, ActionAdvantage)

    def _roles_that_train(self, step: int) -> list[str]:
        """Returns the roles that train in this step; not the policy while one has a head start."""
        policy_waits = step < max(trained.head_start for trained in self._trained.values())
        return [role for role in self._trained if role != POLICY or not policy_waits]

    async def _ask(
        self,
        role: str,
        endpoint: RelayedEndpoint[Part, Answer],
        step: int,
        parts: Sequence[Part],
    ) -> list[Answer]:
        context = self._context
        return await ask_ranks(context.facts.shard, context.trained[role], endpoint, step, parts)

    async def advantages(
        self, groups: list[list[Header]], scalars: Mapping[Key, list[float]]
    ) -> dict[Key, float]:
        """Returns the advantage of each of this shard's records.

        It is computed from this shard's groups and from statistics summed over all shards. Raises
        RecordMismatch when a record is of another row than its ordinal has, or has rewards that no
        scorer gave it.

        Where ranks compute the advantages, these are the rewards of the records.

        scalars: what ``prepare`` returned.
        """
        self._check_records(groups)
        advantage = self._context.advantage
        rewards = self._context.facts.rewards
        totals = statistics(groups, rewards)
        if totals.size:
            totals = (await self._context.agree.sum("rewards", totals)).reshape(totals.shape)
        numbers = [group_scalars(group, rewards, totals) for group in groups]
        if isinstance(advantage, ActionAdvantage):
            return by_key(groups, [own.rewards for own in numbers])
        names = sorted(advantage.requires)
        scalars_of_groups = [
            self._scalars(group, own, names, scalars)
            for group, own in zip(groups, numbers, strict=True)
        ]
        code = self._context.advantage_code
        shared = statistics_of(code, advantage, scalars_of_groups)
        if shared.size:
            shared = await self._context.agree.sum("statistics", shared)
        return by_key(groups, advantages_of(code, advantage, scalars_of_groups, shared))

    def _check_records(self, groups: list[list[Header]]) -> None:
        """Raises RecordMismatch for a record of a wrong row, or with rewards that nobody gave."""
        facts = self._context.facts
        for header in (header for group in groups for header in group):
            source = f"replica {header.replica} with version {header.versions[0]}"
            where = f"advantages of shard {facts.shard}, sampled by {source}"
            check_row(header, facts.rows["train"], facts.run.seed, where)
            check_receipt(header.receipt, header.seal, *header.key, header.rewards, where)

    def _scalars(
        self,
        group: list[Header],
        numbers: GroupScalars,
        names: list[str],
        scalars: Mapping[Key, list[float]],
    ) -> GroupScalars:
        """Returns the group's numbers with the scalars that the ranks gave.

        names: of the scalars, in the order of each row.
        scalars: what ``prepare`` returned.
        """
        rows = np.array([scalars[header.key] for header in group], np.float64).reshape(
            len(group), len(names)
        )
        return replace(numbers, scalars={name: rows[:, i] for i, name in enumerate(names)})

    async def train(
        self, step: int, advantages: Mapping[Key, float], plans: Plans
    ) -> dict[str, float]:
        """Runs all updates of the step on all ranks.

        Returns the metrics that the ranks agreed on; empty on other shards than the lead. Metrics
        of a role that is trained besides the policy begin with its name and a slash. Raises
        TrainingError when no action was trained on, and WeightMismatch when log-probs differ by
        more than the band, or when the sentinel gives an alarm.
        """
        self._context.trace.advantages(step, advantages)
        self._digests = {
            "preparation": sum_of(digest_of(*key, value) for key, value in advantages.items())
        }
        roles = self._roles_that_train(step)
        *learners, last = roles
        # One role after the other, unless learners share no device with the policy.
        at_once = last == POLICY and all(self._trained[role].apart for role in learners)
        lines = [[POLICY], learners] if at_once else [roles]
        metrics: dict[str, float] = {}
        for of_line in await asyncio.gather(
            *(self._update(line, step, advantages, plans) for line in lines)
        ):
            metrics |= of_line
        await self._skip(self._trained.keys() - roles, step)
        return metrics

    async def _update(
        self, roles: Sequence[str], step: int, advantages: Mapping[Key, float], plans: Plans
    ) -> dict[str, float]:
        """Runs the step's updates of some roles, one after the other; returns their metrics."""
        metrics: dict[str, float] = {}
        for role in roles:
            trained = self._trained[role]
            parts = dealt_advantages(advantages, plans[role], len(trained.ranks))
            requests = [
                TrainRequest(step, part, trained.minibatches, trained.epochs) for part in parts
            ]
            replies = await self._ask(role, TRAIN_RANKS, step, requests)
            answers = [reply for reply in replies if reply is not None]
            if role == POLICY:
                metrics |= await self._judged(step, answers)
            elif self._context.agree.lead:
                masked_share(step, answers)  # raises where no action was trained on
                own = answers[0].metrics
                metrics |= {f"{role}/{name}": value for name, value in own.items()}
        return metrics

    async def _judged(self, step: int, answers: Sequence[TrainReply]) -> dict[str, float]:
        """Judges the answers of the policy's ranks; returns the policy's metrics in the lead."""
        compared = await self.watching.judge(step, (g for reply in answers for g in reply.groups))
        if not self._context.agree.lead:
            return {}
        config = self._config
        metrics = answers[0].metrics | {"masked_share": masked_share(step, answers)} | compared
        self._digests["training"] = digest_of({name: metrics.get(name) for name in UPDATE_METRICS})
        facts = self._context.facts
        if facts.compares_logprobs:
            provider = facts.providers.get("roles.policy", "")
            check_logprobs(step, metrics, config.logprob_band or facts.logprob_band, provider)
        busy_s = np.array([reply.busy_s for reply in answers], np.float64)
        return self.watching.compared_gaps(metrics) | self._balance_metrics(busy_s)

    async def _skip(self, roles: Iterable[str], step: int) -> None:
        """Tells the workers of roles that they do not train in this step; the lead does it."""
        if self._context.agree.lead:
            workers = [peer for role in roles for peer in self._context.workers_of(role)]
            await asyncio.gather(*(insist(peer, SKIP_STEP, SkipStep(step)) for peer in workers))

    async def skip(self, step: int) -> None:
        """Ends a step that no shard has a group for: its weights stay as they were."""
        self._digests = {}
        await self._skip(self._trained, step)

    def _balance_metrics(self, busy_s: np.ndarray) -> dict[str, float]:
        """Measures how even the ranks' work was planned, and how even it was.

        A balancer that learns gets the seconds too, unless the run is to repeat. Returns metrics;
        empty except in the lead.

        busy_s: float64[ranks], seconds of each rank's own work (``TrainReply.busy_s``).
        """
        planned = self._planned
        balancer = self._context.balancer
        if planned is None:
            return {}
        metrics = {"balance_planned": planned.imbalance}
        if not ((busy_s > 0) & np.isfinite(busy_s)).all():
            return metrics
        metrics["balance_achieved"] = most_over_mean(busy_s)
        # Measured time never repeats, so a run that is to repeat may not plan by it.
        if isinstance(balancer, LearnsCosts) and not self._context.facts.run.deterministic:
            code = self._context.balancer_code
            r2 = code.call(balancer.observe, planned.loads, busy_s)
            metrics |= {} if r2 is None else {"balance_r2": r2}
        return metrics


def by_key(groups: list[list[Header]], rows: Sequence[np.ndarray]) -> dict[Key, float]:
    """Returns (ordinal, sample) -> number, of a row of numbers for each group."""
    return {
        header.key: float(value)
        for group, row in zip(groups, rows, strict=True)
        for header, value in zip(group, row, strict=True)
    }


def dealt(
    groups: list[list[Header]], plan: Plan, ranks: int, *, masks_truncated: bool = False
) -> list[list[TrainItem]]:
    """Returns the records that each rank trains on, as a plan says.

    masks_truncated: no action of a truncated record is trained on.
    """
    parts: list[list[TrainItem]] = [[] for _ in range(ranks)]
    for header in (header for group in groups for header in group):
        item = train_item(header, plan)
        if masks_truncated and header.status == TRUNCATED:
            item = msgspec.structs.replace(item, masked=True)
        parts[plan[header.key].rank].append(item)
    return parts


def dealt_advantages(
    advantages: Mapping[Key, float], plan: Plan, ranks: int
) -> list[list[tuple[int, int, float]]]:
    """Returns (ordinal, sample, advantage) of the records of each rank, as a plan says."""
    parts: list[list[tuple[int, int, float]]] = [[] for _ in range(ranks)]
    for (ordinal, sample), value in advantages.items():
        parts[plan[ordinal, sample].rank].append((ordinal, sample, value))
    return parts


def train_item(header: Header, plan: Plan) -> TrainItem:
    """Makes the form in which workers get a record: references to its columns, no arrays."""
    ref: Ref = header.columns  # type: ignore[assignment]  # records without columns never pass the filter
    place = plan[header.key]
    return TrainItem(
        *header.key,
        place.minibatch,
        ref,
        header.slot,
        header.media,
        header.versions[0],
        tile=place.tile,
        prompt_digest=header.prompt_digest,
        seal=header.seal,
        stamp=header.stamp,
        last_version=header.versions[1],
        replica=header.replica,
        truncated=header.status != FINISHED,
    )


def check_row(header: Header, rows: int, seed: int, where: str) -> None:
    """Raises RecordMismatch when a record is of another row than its ordinal has in this run.

    rows: size of the dataset.
    seed: of the run; it gives the order of the rows.
    """
    _, row = row_of(header.ordinal, rows, seed)
    if row == header.row:
        return
    raise RecordMismatch(
        f"record {name_of(*header.key)} is of row {header.row}, its ordinal has row {row}",
        where=where,
        why="order, seed or size of the dataset are others than when the record was drawn",
        todo="go on with the dataset and the seed that the run began with",
        ordinal=header.ordinal,
        sample=header.sample,
        replica=header.replica,
    )


def make_plan(
    facts: list[Facts],
    ranks: int,
    minibatches: int,
    seed: int,
    balancer: Balancer,
    code: PluginCode | None = None,
    tiles: int | None = None,
    *,
    whole_groups: bool = False,
) -> PlannedUpdate:
    """Assigns records to minibatches and ranks. Raises TrainingError without a record.

    The seed draws the minibatches, from whole groups, so that records of one prompt may train
    together and share its encoding. Inside a minibatch the balancer chooses the ranks.

    Minibatches are never chosen by length: a length that decides the update in which a record takes
    part would bias the gradient. So a balancer is asked about one minibatch at a time, and cannot
    move a record to another.

    code: what errors say of the balancer; without it they name its class.
    tiles: into how many parts each minibatch is cut that train on one rank as a whole; None where
        records go to ranks one by one. Tiles are dealt by the costs that the balancer predicts.
    whole_groups: whether all records of a group train on one rank; groups are then dealt by the
        same costs.
    """
    if code is None:
        code = balancer_code(balancer)
    if not facts:
        raise TrainingError(
            "no group was left to train on",
            where="balance",
            todo="metrics.jsonl counts dropped groups by reason: groups/dropped/<reason>",
        )
    facts = sorted(facts, key=attrgetter("ordinal", "sample"))
    work = Work(
        group=np.array([fact.ordinal for fact in facts], np.int64),
        prompt=np.array([fact.n_prompt for fact in facts], np.int64),
        actions=np.array([fact.n_actions for fact in facts], np.int64),
        extra=np.array([fact.cost for fact in facts], np.float64),
    )
    ordinals = np.random.default_rng(seed).permutation(np.unique(work.group))
    rank_of, minibatch_of, tile_of = np.zeros((3, len(facts)), np.int64)
    imbalances = []
    for minibatch, groups in enumerate(np.array_split(ordinals, minibatches)):
        members = np.flatnonzero(np.isin(work.group, groups))
        costs = costs_of(code, balancer, work.take(members))
        minibatch_of[members] = minibatch
        if tiles is None and whole_groups:
            # A group is dealt as a tile would be: this is the number of each record's group.
            place = np.unique(work.group[members], return_inverse=True)[1]
            rank_of[members] = deal_tiles(place, costs, ranks)
        elif tiles is None:
            for rank, indexes in enumerate(split_of(code, balancer, work.take(members), ranks)):
                rank_of[members[indexes]] = rank
        else:
            tile_of[members] = cut_into_tiles(work.group[members], tiles)
            rank_of[members] = deal_tiles(tile_of[members], costs, ranks)
        imbalances.append(
            most_over_mean(np.bincount(rank_of[members], weights=costs, minlength=ranks))
        )
    columns = (column.tolist() for column in (rank_of, minibatch_of, tile_of))
    places = zip(facts, *columns, strict=True)
    return PlannedUpdate(
        {
            (f.ordinal, f.sample): Assignment(rank, minibatch, tile)
            for f, rank, minibatch, tile in places
        },
        [work.take(np.flatnonzero(rank_of == rank)) for rank in range(ranks)],
        max(imbalances),
    )


def most_over_mean(loads: np.ndarray) -> float:
    """Returns the largest load over the mean: 1 when all are equal.

    Everybody waits for the most burdened rank, so a step takes this much longer than it must.
    """
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean > 0 else 1.0


def masked_share(step: int, replies: Sequence[TrainReply]) -> float:
    """Returns the share of the step's actions that were not trained on, as their records say.

    Raises TrainingError when none was: such a step changes nothing, and no log-prob is compared.

    replies: of all ranks.
    """
    trained = sum(reply.trained for reply in replies)
    masked = sum(reply.masked for reply in replies)
    if not trained:
        raise TrainingError(
            "no action was trained on",
            where=f"step {step}",
            why=(
                f"action_mask is 0 at all {masked} actions of the step's records"
                if masked
                else "the step's records have no actions"
            ),
            todo=(
                "the generator writes action_mask: 1 for every action that the policy sampled, its "
                "end token too, 0 for the others"
            ),
        )
    return masked / (trained + masked)


def check_logprobs(
    step: int, metrics: Mapping[str, float], band: float, provider: str = ""
) -> None:
    """Raises WeightMismatch when the generator's and the trainer's log-probs differ too much.

    The first forward of a step runs under the weights that sampled its records, so they must agree
    within the band. Raises ContractError when the trainer does not say how far they differ: that
    must not pass for agreement.

    provider: of the trainer, as ``use`` names it; "" where it is not known.
    """
    gap = metrics.get(GAP_MAX)
    if gap is None:
        raise ContractError(
            f"trainer {provider}: train() gave no metric {GAP_MAX} in step {step}.",
            where="roles.policy.use",
            why="without it nobody sees that the generator samples with other weights",
            todo="ask its author; its contract is gcore_testing.TrainerContract",
            provider=provider,
        )
    if not gap <= band:
        raise WeightMismatch(
            (
                f"generator and trainer disagree by {gap:.3g} in the log-prob of an action, the "
                "band "
                f"is {band:g}"
            ),
            where=f"step {step}",
            why=(
                "the generator does not compute what the trainer computes: wrong weights, cache, "
                "dtype or temperature"
            ),
            todo=(
                "check the pair in float32; a wider band for a low-precision pair is "
                "controller.config.logprob_band"
            ),
        )


def learned_costs(balancer: Balancer, provider: str = "") -> dict[str, Any]:
    """Returns what the balancer has learned, for a checkpoint, under its provider's name.

    A resumed run may have another balancer, which must not get it. It is empty for a balancer that
    keeps nothing.

    provider: as ``use`` names it; "" where only the class is known, whose name then stands for it.
    """
    name = provider or type(balancer).__qualname__
    return {name: balancer.state()} if isinstance(balancer, KeepsCosts) else {}


def restore_costs(balancer: Balancer, learned: Mapping[str, Any], provider: str = "") -> None:
    """Gives the balancer what ``learned_costs`` returned, if it stands under its name."""
    name = provider or type(balancer).__qualname__
    if isinstance(balancer, KeepsCosts) and (state := learned.get(name)):
        balancer.restore(state)


def cut_into_tiles(groups: np.ndarray, tiles: int) -> np.ndarray:
    """Returns the tile of each record of a minibatch: int64[N], counted from 0.

    A tile is a run of neighbouring groups; the numbers of groups differ by at most one. The
    minibatch has as many tiles as asked for, or one for each group where these are fewer.

    groups: int64[N], the ordinal of each record.
    """
    ordinals, place = np.unique(groups, return_inverse=True)
    count = min(tiles, len(ordinals))
    sizes = [len(part) for part in np.array_split(ordinals, count)]
    tile_of: np.ndarray = np.repeat(np.arange(count), sizes)[place]
    return tile_of


def deal_tiles(tile_of: np.ndarray, costs: np.ndarray, ranks: int) -> np.ndarray:
    """Returns the rank of each record: int64[N]; records of one tile have one rank.

    The costliest tile goes first, each to the rank that has the least so far (Graham 1969, "Bounds
    on multiprocessing timing anomalies"). Among equals the first tile and the first rank are taken.

    tile_of: int64[N], what ``cut_into_tiles`` returned; or any numbers from 0 on, where equal ones
        go to one rank.
    costs: float64[N], what each record costs.
    """
    tile_costs = np.bincount(tile_of, weights=costs)
    rank_of_tile = np.zeros(len(tile_costs), np.int64)
    loads = np.zeros(ranks)
    for tile in np.argsort(-tile_costs, kind="stable"):
        rank = int(np.argmin(loads))
        rank_of_tile[tile] = rank
        loads[rank] += tile_costs[tile]
    rank_of: np.ndarray = rank_of_tile[tile_of]
    return rank_of
