"""Defines what the config class of a provider may tell the core, by a method of an agreed name.

Each ability is a protocol with one method. A config class that has the method has the ability;
nothing is registered and no base class is needed:

    @dataclass(frozen=True, kw_only=True)
    class MyObjectiveConfig:
        clip: float = 0.2

        def requires(self) -> frozenset[str]:
            return frozenset({"old_logp"})

        def takes_stale(self) -> bool:
            return False

The methods are called before anything starts, on the config object of the run, so they may depend
on its settings. They are pure. A method whose name is nearly one of these would be silently
ignored, so ``g-core plugins check`` reports it. A plugin in which the core could not call one of
them, because it is a field or takes arguments, is refused.

Beside the protocols stand the functions by which the core asks; they give what holds for a config
without the ability.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gcore_core.contract.memory import PUSH_BYTES


@runtime_checkable
class Requires(Protocol):
    """Says what an objective or an advantage cannot work without."""

    def requires(self) -> frozenset[str]:
        """Returns the names of what is required; a run in which nothing supplies one is refused.

        These are columns ("old_logp", "ref_logp", "values", ...), outputs ("entropy") and scalars
        of a record ("kl_k1", ...).
        """


@runtime_checkable
class WorksWithoutRewards(Protocol):
    """Says that an advantage can do without rewards, as where a teacher says what is good."""

    def works_without_rewards(self) -> bool:
        """Returns whether a job with this advantage needs no reward.

        Without rewards ``GroupScalars.rewards`` is 0 everywhere. Without the method: False, and a
        job without rewards is refused.
        """


@runtime_checkable
class SamplesAlike(Protocol):
    """Says that a generator gives all samples of a prompt alike under these settings."""

    def samples_alike(self) -> str:
        """Returns which setting makes them alike, such as "temperature=0"; "": they may differ.

        Without the method: "".
        """


@runtime_checkable
class StatesLogprobBand(Protocol):
    """Says how exact the log-probs of a generator or trainer are."""

    def logprob_band(self) -> float:
        """Returns by how many nats the log-prob of one action may be off; positive.

        It follows from dtype and engine. For a pair, the wider band of generator and trainer
        holds; a run in which they differ by more ends.
        """


@runtime_checkable
class StatesPrecision(Protocol):
    """Says in which dtype a generator or trainer computes."""

    def precision(self) -> str:
        """Returns the dtype of the arithmetic that gives log-probs, such as "bfloat16".

        A sentinel compares log-probs by it. Without the method: "", which says that nobody knows.
        """


@runtime_checkable
class TakesStale(Protocol):
    """Says whether an objective may train on records of older weights."""

    def takes_stale(self) -> bool:
        """Returns whether the loss corrects for actions that older weights sampled.

        Without the method: False. Records that a step did not need are then drawn again.
        """


@runtime_checkable
class ReadsRewards(Protocol):
    """Says which named rewards a filter, an advantage or a sampling program reads by name."""

    def reads_rewards(self) -> frozenset[str]:
        """Returns names out of ``rewards``; a job without one of them is refused.

        Without the method: none.
        """


@runtime_checkable
class SpansSlots(Protocol):
    """Says that a replica of a trainer or generator spreads over several slots."""

    def replica_slots(self) -> int:
        """Returns how many slots one replica takes together; at least 1.

        That is tensor x pipeline x context parallel. All workers of a trainer's replica get the
        same records. Without the method: 1.
        """


@runtime_checkable
class KeepsWeights(Protocol):
    """Says where a generator with the capability "sleep" has its weights while it sleeps."""

    def keeps_weights(self) -> bool:
        """Returns whether a generator that sleeps keeps its weights in host memory.

        Their size is then checked before anything starts. Without the method: True.
        """


@runtime_checkable
class SaysWidths(Protocol):
    """Says how wide the columns [A, k] are that an annotator gives."""

    def column_widths(self) -> Mapping[str, int]:
        """Returns k by the name of a column, for each wide one that is given.

        A wide column of the role that is not named, or has k 0, is not given in this run. Without
        the method none is.
        """


@runtime_checkable
class TakesAdapters(Protocol):
    """Says whether a generator with the capability "weights.adapter" has it with these settings."""

    def takes_adapters(self) -> bool:
        """Returns whether a push may bring an adapter alone. Without the method: True."""


@runtime_checkable
class GivesRouting(Protocol):
    """Says whether a generator with the capability "routing" has it with these settings."""

    def gives_routing(self) -> bool:
        """Returns whether records of a mixture of experts have the column "routing".

        Without the method: True.
        """


@runtime_checkable
class NeedsRouting(Protocol):
    """Says that a trainer cannot do without the experts by which a record was sampled."""

    def needs_routing(self) -> bool:
        """Returns whether a run is refused whose generator does not give the column "routing".

        Without the method: False.
        """


@runtime_checkable
class HasOwnColumns(Protocol):
    """Says which per-action columns the policy's trainer computes for its own advantage."""

    def own_columns(self) -> frozenset[str]:
        """Returns names such as "values"; no other process sees these columns.

        An advantage of level "action" that the policy alone computes may require them. Without the
        method: none.
        """


@runtime_checkable
class ShowsImages(Protocol):
    """Says that a dataset's prompts have images, or that a reward shows images to a role."""

    def shows_images(self) -> bool:
        """Returns whether there are images under these settings.

        The roles that would see them must then claim the capability "images". Without the method:
        False.
        """


@runtime_checkable
class Downloads(Protocol):
    """Says that opening a dataset may take what is not on this machine yet."""

    def downloads(self) -> bool:
        """Returns whether opening it would ask a network, under these settings.

        ``g-core check`` then leaves it closed; a run opens it first. Without the method: False.
        """


@runtime_checkable
class CountsUpdates(Protocol):
    """Says how many optimizer updates a controller's step makes."""

    def updates_per_step(self) -> int:
        """Returns the optimizer updates of one step, at least 1.

        A trainer's learning-rate schedule counts them. Without the method: 1.
        """


@runtime_checkable
class CountsGroups(Protocol):
    """Says how many groups a controller's step trains on."""

    def groups_per_step(self) -> int:
        """Returns how many groups a step trains on, over all shards.

        A placement policy plans for them. Without the method: 0, which says that nobody knows.
        """


@runtime_checkable
class CountsMinibatches(Protocol):
    """Says into how many parts a controller cuts a step's groups for the policy's trainer."""

    def minibatches_per_step(self) -> int:
        """Returns how many optimizer updates see all of a step's groups once, at least 1.

        ``WorkerShape.minibatches`` tells it to backends that say what they will need. Without the
        method: 1.
        """


@runtime_checkable
class SizesGroups(Protocol):
    """Says how many records a group has under a controller that needs no advantage."""

    def records_per_group(self) -> int:
        """Returns how many records of a step have one prompt, at least 1.

        ``WorkerShape.group_size`` tells it to backends that say what they will need. An advantage's
        ``group_size`` comes first. Without the method: 1.
        """


@runtime_checkable
class LimitsGaps(Protocol):
    """Says that a controller's settings bound log-prob gaps in place of what the pair states."""

    def largest_gap(self) -> float:
        """Returns by how many nats the log-prob of one action may be off; 0 for the pair's band.

        Without the method: 0.
        """


@runtime_checkable
class PushesNearby(Protocol):
    """Says that a controller's settings keep weights from reaching generators elsewhere."""

    def pushes_nearby(self) -> str:
        """Returns which setting keeps pushes on the trainer's machine; "": they reach every one.

        A job whose generators are placed elsewhere is refused then, and no machine that
        comes is taken in. Without the method: "".
        """


@runtime_checkable
class SizesPushes(Protocol):
    """Says how much memory a controller's weight pushes go through."""

    def push_bytes(self) -> int:
        """Returns the bytes of shared memory that all buckets of a push may take together.

        ``WorkerShape.push_bytes`` tells it to backends that say what they will need. Without the
        method: ``gcore_core.contract.memory.PUSH_BYTES``.
        """


@runtime_checkable
class NamesMeters(Protocol):
    """Says that a placement policy looks at ``Window.used``, and who reads it."""

    def meters(self) -> Mapping[str, str]:
        """Returns kind of device -> the factory of a meter, ``"module:attribute"``.

        It is as in ``Device.kind``; see ``gcore_core.contract.metering``. Without the method:
        empty. Nothing is read then.
        """


# -- how the core asks -----------------------------------------------------------------------------


def required_by(config: Any) -> frozenset[str]:
    """Returns what an objective or advantage requires; nothing without the ability."""
    return config.requires() if isinstance(config, Requires) else frozenset()


def works_without_rewards(config: Any) -> bool:
    """Returns whether a job with this advantage needs no reward."""
    return isinstance(config, WorksWithoutRewards) and config.works_without_rewards()


def samples_alike(config: Any) -> str:
    """Returns which setting of a generator makes all samples of a prompt alike; "": none."""
    return config.samples_alike() if isinstance(config, SamplesAlike) else ""


def logprob_band(*configs: Any) -> float:
    """Returns the widest band that a config states, in nats; 1e-3 where none does."""
    stated = [config.logprob_band() for config in configs if isinstance(config, StatesLogprobBand)]
    return max(stated, default=1e-3)


def precision(config: Any) -> str:
    """Returns the dtype in which a generator or trainer computes; "" where its config is silent."""
    return config.precision() if isinstance(config, StatesPrecision) else ""


def takes_stale(config: Any) -> bool:
    """Returns whether an objective's loss is right for actions that older weights sampled."""
    return isinstance(config, TakesStale) and config.takes_stale()


def rewards_read_by(config: Any) -> frozenset[str]:
    """Returns the rewards that a filter, an advantage or a sampling program reads by name."""
    return config.reads_rewards() if isinstance(config, ReadsRewards) else frozenset()


def replica_slots(config: Any) -> int:
    """Returns how many slots one replica of a trainer or generator takes together."""
    return config.replica_slots() if isinstance(config, SpansSlots) else 1


def keeps_weights(config: Any) -> bool:
    """Returns whether a generator that sleeps keeps its weights in host memory."""
    return config.keeps_weights() if isinstance(config, KeepsWeights) else True


def column_widths(config: Any) -> Mapping[str, int]:
    """Returns k of each column [A, k] that an annotator gives under its settings."""
    return config.column_widths() if isinstance(config, SaysWidths) else {}


def takes_adapters(config: Any) -> bool:
    """Returns whether a generator that claims "weights.adapter" has it with these settings."""
    return config.takes_adapters() if isinstance(config, TakesAdapters) else True


def gives_routing(config: Any) -> bool:
    """Returns whether a generator that claims "routing" has it with these settings."""
    return config.gives_routing() if isinstance(config, GivesRouting) else True


def needs_routing(config: Any) -> bool:
    """Returns whether a trainer needs the experts by which records were sampled."""
    return isinstance(config, NeedsRouting) and config.needs_routing()


def own_columns(config: Any) -> frozenset[str]:
    """Returns the per-action columns that a trainer computes for its own advantage."""
    return frozenset(config.own_columns()) if isinstance(config, HasOwnColumns) else frozenset()


def shows_images(config: Any) -> bool:
    """Returns whether a dataset's prompts, or what a reward shows, have images."""
    return isinstance(config, ShowsImages) and config.shows_images()


def downloads(config: Any) -> bool:
    """Returns whether opening a dataset would ask a network."""
    return isinstance(config, Downloads) and config.downloads()


def updates_per_step(config: Any) -> int:
    """Returns the optimizer updates of one step under a controller."""
    return config.updates_per_step() if isinstance(config, CountsUpdates) else 1


def groups_per_step(config: Any) -> int:
    """Returns how many groups a step trains on under a controller; 0 when nobody knows."""
    return config.groups_per_step() if isinstance(config, CountsGroups) else 0


def minibatches_per_step(config: Any) -> int:
    """Returns into how many parts a step's groups are cut under a controller."""
    return config.minibatches_per_step() if isinstance(config, CountsMinibatches) else 1


def records_per_group(config: Any) -> int:
    """Returns how many records of a step have one prompt under a controller without advantage."""
    return config.records_per_group() if isinstance(config, SizesGroups) else 1


def largest_gap(config: Any) -> float:
    """Returns the band that a controller's settings give, in nats; 0 where they give none."""
    return config.largest_gap() if isinstance(config, LimitsGaps) else 0.0


def pushes_nearby(config: Any) -> str:
    """Returns which setting of a controller keeps pushes on the trainer's machine; "": none."""
    return config.pushes_nearby() if isinstance(config, PushesNearby) else ""


def push_bytes(config: Any) -> int:
    """Returns how much shared memory a push may go through under a controller."""
    return config.push_bytes() if isinstance(config, SizesPushes) else PUSH_BYTES


def meter_of(config: Any, kind: str) -> str:
    """Returns the factory of the meter that a placement policy wants read; "" for none.

    kind: of the devices.
    """
    return config.meters().get(kind, "") if isinstance(config, NamesMeters) else ""


# -- what looks like an ability and is none --------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ability:
    """Describes one ability.

    method: the name of its method.
    returns: the return type of the method, as text.
    kinds: the kinds of provider whose configs may have it, as in
        ``gcore_core.contract.providers.KINDS``.
    """

    method: str
    returns: str
    kinds: frozenset[str]

    @property
    def definition(self) -> str:
        return f"def {self.method}(self) -> {self.returns}"


def _ability(protocol: type, *kinds: str) -> Ability:
    """Reads an ability off its protocol, so that neither can differ from the other."""
    (name,) = (word for word in vars(protocol) if not word.startswith("_"))
    returns = inspect.signature(getattr(protocol, name)).return_annotation
    return Ability(method=name, returns=returns, kinds=frozenset(kinds))


ABILITIES = (
    _ability(Requires, "objective", "advantage"),
    _ability(WorksWithoutRewards, "advantage"),
    _ability(SamplesAlike, "generator"),
    _ability(StatesLogprobBand, "generator", "trainer"),
    _ability(StatesPrecision, "generator", "trainer"),
    _ability(TakesStale, "objective"),
    _ability(ReadsRewards, "filter", "advantage", "sampler"),
    _ability(HasOwnColumns, "trainer"),
    _ability(SpansSlots, "trainer", "generator"),
    _ability(KeepsWeights, "generator"),
    _ability(SaysWidths, "annotator"),
    _ability(TakesAdapters, "generator"),
    _ability(GivesRouting, "generator"),
    _ability(NeedsRouting, "trainer"),
    _ability(ShowsImages, "dataset", "reward"),
    _ability(Downloads, "dataset"),
    _ability(CountsUpdates, "controller"),
    _ability(CountsGroups, "controller"),
    _ability(CountsMinibatches, "controller"),
    _ability(SizesGroups, "controller"),
    _ability(LimitsGaps, "controller"),
    _ability(PushesNearby, "controller"),
    _ability(SizesPushes, "controller"),
    _ability(NamesMeters, "placement"),
)
_NEAR_EDITS = 2


def wrong_signatures(kind: str, config: type) -> Iterator[str]:
    """Yields a sentence for each ability of a config class that the core cannot call.

    kind: of the provider whose config class it is, as in ``gcore_core.contract.providers.KINDS``.
    """
    names = _public_names(config)
    for ability in ABILITIES:
        if kind not in ability.kinds or ability.method not in names:
            continue
        if wrong := _uncallable(inspect.getattr_static(config, ability.method, None)):
            yield f"{ability.method!r} {wrong}; write {ability.definition}"


def near_misses(kind: str, config: type) -> Iterator[str]:
    """Yields a sentence for each method that looks like an ability and is none.

    kind: as for ``wrong_signatures``.
    """
    abilities = {ability.method: ability for ability in ABILITIES}
    close = [ability for ability in ABILITIES if kind in ability.kinds]
    for name in sorted(_public_names(config)):
        method = inspect.getattr_static(config, name, None)
        if not inspect.isfunction(method):
            continue
        if name not in abilities:
            for ability in close:
                if _edits(name, ability.method) <= _NEAR_EDITS:
                    yield f"the core never calls {name}(); did you mean {ability.method}()?"
        elif abilities[name] not in close:
            kinds = " or ".join(sorted(abilities[name].kinds))
            yield f"the core calls {name}() only on the config of a {kinds}"
        elif (returns := _return_type(method)) not in ("", _plain(abilities[name].returns)):
            yield f"{name}() returns {returns}; write {abilities[name].definition}"


def _public_names(config: type) -> set[str]:
    names = {name for cls in config.__mro__ if cls is not object for name in vars(cls)}
    fields = set(getattr(config, "__dataclass_fields__", ()))
    return {name for name in names | fields if not name.startswith("_")}


def _uncallable(value: Any) -> str:
    """Returns why the core cannot call an attribute without arguments; "" when it can."""
    if isinstance(value, classmethod | staticmethod):
        return ""
    if not inspect.isfunction(value):
        return "is no method"
    if inspect.iscoroutinefunction(value):
        return "is async, and the core does not wait for it"
    _, *parameters = inspect.signature(value).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        word.name
        for word in parameters
        if word.default is inspect.Parameter.empty and word.kind not in optional
    ]
    return f"takes {', '.join(required)}, and the core calls it with nothing" if required else ""


def _return_type(method: Any) -> str:
    """Returns the annotated type without its parameters ("frozenset"); "" when there is none."""
    returns = inspect.signature(method).return_annotation
    if returns is inspect.Signature.empty:
        return ""
    return _plain(returns if isinstance(returns, str) else getattr(returns, "__name__", ""))


def _plain(annotation: str) -> str:
    return annotation.partition("[")[0]


def _edits(one: str, other: str) -> int:
    """Returns the Levenshtein distance of two words.

    That is how many insertions, deletions and replacements turn one into the other.
    """
    costs = list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        above = costs
        costs = [row]
        for column, other_letter in enumerate(other, 1):
            replaced = above[column - 1] + (letter != other_letter)
            costs.append(min(above[column] + 1, costs[-1] + 1, replaced))
    return costs[-1]
