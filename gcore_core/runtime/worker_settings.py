"""Defines what a worker is told besides what it builds.

There is one class for each kind of worker, which decides the kind.

The controllers' facts stand here too, with the other kinds: the run makes them and a controller
reads them, and these two folders never import each other. Both may import this one. Rejected: an
encoded struct that only the controllers can decode, because then nothing checks who makes it.

Whole sections of the job's settings pass through as they are, so that a new key of one needs no
change here.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec

from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.job_settings import (
    CheckpointSettings,
    EvaluationSettings,
    RewardSettings,
    RunSettings,
)
from gcore_core.contract.placement import Device, Need
from gcore_core.contract.records import Header
from gcore_core.contract.sentinel import SentinelContext

#: An ordinal that no run reaches.
NEVER = 1 << 62
#: Dataset -> the section of the job that chooses it.
DATASET_SECTIONS = MappingProxyType({"train": "data", "evaluation": "evaluation.data"})


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Holds what workers of every kind are told.

    shards: how many controllers there are.
    """

    run: RunSettings
    shards: int = 1

    @property
    def kind(self) -> str:
        """ "trainer", "generator", "annotator", "scorer" or "controller"."""
        return str(self.__struct_config__.tag)


class PlainContext(msgspec.Struct, frozen=True, kw_only=True):
    """Holds those fields of a backend's ``WorkerContext`` that are known before it starts.

    They are explained there. Besides:

    devices_in_use: how many devices of its machine are in use while it works, its own among them.
    """

    devices: tuple[int, ...] = ()
    devices_in_use: int = 0
    updates_per_step: int = 1
    model: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    rendezvous: str = ""
    meeting_address: str = ""
    directory: str = "."
    columns: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    policy: dict[str, Any] = {}


class TrainerSettings(WorkerSettings, frozen=True, kw_only=True, tag="trainer"):
    """Tells a trainer worker where to begin.

    resume: the directory of the trainer's saved state; "": it begins without one.
    sentinel: what the sentinel is to know that compares its log-probs; None: nothing compares them.
    columns: what its role gives.
    adapters: every generator that follows it takes an adapter alone.
    """

    context: PlainContext = PlainContext()
    resume: str = ""
    sentinel: SentinelContext | None = None
    columns: list[ColumnSpec] = []
    adapters: bool = False


class GeneratorSettings(WorkerSettings, frozen=True, kw_only=True, tag="generator"):
    """Tells a generator how to gather work and whether it gets weights.

    follows: whether the policy's weights are pushed to it.
    gather_s: how long to wait for the other shards' part of a round.
    batch_s: how long to wait for more records to end before those that did are sent.
    aborts: whether its backend can end samples (trait ``abort``).
    speakers: player -> the generator role that speaks for it in the environment around the backend.
    asks: generator role that is among these -> peer names of its replicas.
    """

    context: PlainContext = PlainContext()
    follows: bool = False
    gather_s: float = 0.02
    batch_s: float = 0.02
    aborts: bool = False
    speakers: dict[str, str] = {}
    asks: dict[str, list[str]] = {}


class AnnotatorSettings(WorkerSettings, frozen=True, kw_only=True, tag="annotator"):
    """Tells an annotator its context, and describes the columns that it gives."""

    context: PlainContext = PlainContext()
    columns: list[ColumnSpec] = []


class ScorerSettings(WorkerSettings, frozen=True, kw_only=True, tag="scorer"):
    """Tells a scorer which rewards it hosts.

    rewards: name -> its settings.
    asks: generator role that one of them asks -> peer names of its replicas.
    datasets: dataset -> its provider, as in ``use``.
    of_groups: the rewards that see the records of a prompt together.
    """

    context: PlainContext = PlainContext()
    rewards: dict[str, RewardSettings]
    asks: dict[str, list[str]] = {}
    datasets: dict[str, str] = {}
    of_groups: list[str] = []


class PlacementFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Holds what the lead tells a placement policy.

    slots: role -> devices that it may occupy.
    needs: role -> what it asks of placement.
    engines: generator role -> device indexes of each of its replicas.
    sleeps: generator roles whose backend can sleep.
    needed: groups that a step must keep.
    directory: the run's, for the journal; empty: none is kept.
    provider: the policy's, as in ``placement.use``.
    meter: the factory of the meter that the policy wants read; "": none is.
    agents: generator role -> peer name of each replica's node agent, which reads the meter.
    overlaps: whether generators draw while trainers work.
    """

    devices: list[Device]
    slots: dict[str, int]
    needs: dict[str, Need]
    engines: dict[str, list[list[int]]]
    sleeps: list[str]
    needed: int = 0
    directory: str = ""
    provider: str = ""
    meter: str = ""
    agents: dict[str, list[str]] = {}
    overlaps: bool = False


class TrainedFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Tells controllers of a role that is trained: the policy, or a learner besides it.

    ranks: peer names of the workers of each data-parallel rank.
    minibatches, epochs: a step makes minibatches x epochs updates of it. The policy's are in the
        step program's config.
    head_start: how many steps of the run it trains before the policy does.
    gives: whether it gives columns of the records.
    apart: whether it shares no device with the policy, so that both may work at once.
    whole_groups: its objective needs all records of a group on one rank.
    """

    ranks: list[list[str]]
    minibatches: int = 1
    epochs: int = 1
    head_start: int = 0
    gives: bool = False
    apart: bool = False
    whole_groups: bool = False


class JobFacts(WorkerSettings, frozen=True, kw_only=True, tag="controller"):
    """Holds plain facts of the job, the same for every shard but for ``shard`` and ``scorers``.

    rows: size of the datasets "train" and "evaluation".
    replicas: peer names of generator replicas.
    owns_replicas: this shard asks its own part of them only.
    trained: role that is trained -> how; the policy is the last.
    scorers: peer name -> the rewards it hosts, of the scorers that this shard asks.
    rewards: how each counts.
    providers: section of the job -> what it chose, as in ``use``.
    of_groups: rewards that see the records of a prompt together.
    logprob_band: how far apart the log-probs of a pair may be.
    compares_logprobs: the policy's trainer says how far they are; False for one that trains a value
        head, which gives no log-probs.
    sentinel: what the sentinel is to know; None: there is none, and only the band is looked at.
    both_score: trainer and generators can score given actions (trait ``scores_logprobs``).
    output: directory for the final weights, in the run's own.
    trace: directory of the trace; empty: none is written.
    takes_stale: the objective corrects for actions sampled by older weights.
    midway_weights: the rollout's generator goes on with samples through a push.
    judges: generator role that rewards or episodes ask -> peer names of its replicas.
    annotators: role that gives columns and is not trained -> peer names of its workers.
    placement: where devices move between generators.
    asleep_in_training: generator roles whose replicas sleep while the trainer works.
    trainers_sleep: whether trainers sleep between a push and the next preparation.
    last_ordinal: the run ends with the step that consumes the last ordinal below this one.
    start_step, next_ordinal, state: what a resumed run goes on from.
    evaluated: the weights of ``start_step`` were evaluated before.
    carried: records that its shards had kept for the first step.
    """

    shard: int
    rows: dict[str, int]
    replicas: list[str]
    owns_replicas: bool = False
    trained: dict[str, TrainedFacts]
    scorers: dict[str, list[str]]
    rewards: dict[str, RewardSettings]
    providers: dict[str, str] = {}
    of_groups: list[str] = []
    evaluation: EvaluationSettings
    checkpoint: CheckpointSettings
    logprob_band: float = 1e-3
    compares_logprobs: bool = True
    sentinel: SentinelContext | None = None
    both_score: bool = False
    output: str = ""
    trace: str = ""
    takes_stale: bool = False
    midway_weights: bool = False
    judges: dict[str, list[str]] = {}
    annotators: dict[str, list[str]] = {}
    placement: PlacementFacts | None = None
    asleep_in_training: list[str] = []
    trainers_sleep: bool = False
    last_ordinal: int = NEVER
    start_step: int = 0
    evaluated: bool = False
    next_ordinal: int = 0
    state: dict[str, Any] = {}
    carried: list[Header] = []


#: Of workers whose backends are served by a shell.
ShellSettings = TrainerSettings | GeneratorSettings | AnnotatorSettings | ScorerSettings
#: What a WorkerSpec holds; its tag says which.
AnySettings = ShellSettings | JobFacts
