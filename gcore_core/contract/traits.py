"""Defines ``Traits``: what the core knows of a provider before it starts anything.

A config class says what holds under its settings:

    @dataclass(frozen=True, kw_only=True)
    class MyObjectiveConfig:
        clip: float = 0.2

        def traits(self) -> Traits:
            return Traits(requires=frozenset({"old_logp"}))

The method is pure. A config class without it, and a provider without a config class, has none of
the traits. In a worker the backend itself counts: a protocol that its object has (``Sleeps``,
``ReceivesWeights``, ...) is used. The kit tests that the two agree.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any

from gcore_core.contract.errors import ContractError, GcoreError, did_you_mean
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.memory import PUSH_BYTES

#: The page for authors of plugins that were written for an earlier version.
MIGRATION = "docs/how-to/move-to-0.3.md"


def _trait(default: Any, *kinds: str, **protocols: str) -> Any:
    """Returns a field of ``Traits``.

    kinds: kinds of provider whose config may set it. No protocol belongs to it there.
    protocols: kind of provider whose config may set it -> "module:name", a protocol of the
        contract. A backend of that kind that claims the trait must have the protocol.
    """
    metadata = {"kinds": frozenset({*kinds, *protocols}), "protocols": protocols}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Holds what a provider promises under its settings; a default says that it has it not."""

    def __new__(cls, **given: Any) -> Traits:
        for name in given:
            if name not in cls.__dataclass_fields__:
                guess = did_you_mean(name, list(cls.__dataclass_fields__))
                raise ContractError(f"Traits has no field {name!r}{guess}.")
        return super().__new__(cls)

    # -- generators and trainers -------------------------------------------------------------------

    logprob_band: float = _trait(0.0, "generator", "trainer")
    """How many nats the log-prob of one action may be off. It follows from dtype and engine.
    0 counts as 1e-3. A generator and its trainer are compared by the wider of their two bands.
    A larger gap ends the run."""

    precision: str = _trait("", "generator", "trainer")
    """The dtype of the arithmetic that gives log-probs, such as "bfloat16", by which a sentinel
    compares them; "": nobody knows."""

    replica_slots: int = _trait(1, "generator", "trainer")
    """How many slots one replica takes together: tensor x pipeline x context parallel. All workers
    of a trainer's replica get the same records."""

    sleeps: bool = _trait(False, generator="generator:Sleeps", trainer="trainer:SleepsInRollout")
    """It gives its memory back and takes it again."""

    images: bool = _trait(False, "generator", "trainer")
    """It takes prompts with images."""

    scores_logprobs: bool = _trait(
        False, generator="generator:ScoresLogprobs", trainer="generator:ScoresLogprobs"
    )
    """It scores given actions."""

    adapters: bool = _trait(False, "generator", trainer="trainer:SendsAdapter")
    """A push may bring a LoRA adapter alone, which a generator puts on its base
    (``WeightPlan.adapter``)."""

    device_weights: bool = _trait(
        False, generator="weight_transfer:ReceivesDevice", trainer="weight_transfer:SendsDevice"
    )
    """Its pushes may go by other ways than shared memory."""

    # -- generators --------------------------------------------------------------------------------

    receives_weights: bool = _trait(False, generator="generator:ReceivesWeights")
    """It follows the policy's weights."""

    midway_weights: bool = _trait(False, "generator")
    """Its samples go on through a push, read again under the new weights."""

    fingerprints: bool = _trait(False, generator="generator:Fingerprints")
    """It hashes the weights that it holds."""

    abort: bool = _trait(False, "generator")
    """It ends unfinished samples and returns what there is of them."""

    determinism: bool = _trait(False, "generator")
    """The same seed gives the same tokens bit for bit when ``deterministic`` is set."""

    routing: bool = _trait(False, "generator")
    """Its records of a mixture of experts say which experts computed each token, in the column
    "routing"."""

    tokens: bool = _trait(False, generator="generator:TakesTokens")
    """It goes on behind given tokens, with limits and stops of each request."""

    samples_alike: str = _trait("", "generator")
    """Which setting makes all samples of a prompt alike, such as "temperature=0"; "": they may
    differ. The plugin of an advantage that compares samples refuses them."""

    # -- trainers ----------------------------------------------------------------------------------

    action_advantages: bool = _trait(False, "trainer")
    """It computes advantages of level "action" on its ranks (``ActionAdvantage``)."""

    annotates: bool = _trait(False, trainer="annotator:Annotates")
    """It gives per-action columns too, as a critic does."""

    value_head: bool = _trait(False, "trainer")
    """Its model gets a value head where its objective requires values."""

    evaluates: bool = _trait(False, trainer="trainer:EvaluatesLoss")
    """It computes its objective without an update."""

    compares_logprobs: bool = _trait(False, trainer="trainer:ComparesLogprobs")
    """It gives its log-probs under the weights that a step begins with."""

    token_logprobs: bool = _trait(False, "trainer")
    """It gives an objective log-probs of other tokens than the actions, which a column names
    ("logp@COLUMN" of ``Objective``)."""

    adapts_objective: bool = _trait(False, "trainer")
    """It shows an objective its steps and saves its state (``AdaptsToSteps``)."""

    saves_in_background: bool = _trait(False, trainer="trainer:SavesInBackground")
    """It trains on while its state is written."""

    sharding: bool = _trait(False, "trainer")
    """It takes more than one slot."""

    sharding_over_nodes: bool = _trait(False, "trainer")
    """Its ranks may be on several nodes (``WorkerContext.meeting_address``)."""

    needs_routing: bool = _trait(False, "trainer")
    """It replays which experts computed a token; a generator that does not say so is refused."""

    own_columns: frozenset[str] = _trait(frozenset(), "trainer")
    """The per-action columns, such as "values", that the policy's trainer computes for its own
    advantage of level "action", which may require them. No other process sees these columns."""

    # -- annotators --------------------------------------------------------------------------------

    column_widths: Mapping[str, int] = _trait({}, "annotator")
    """k of each column [A, k] that it gives, by name. A wide column of the role that is not named,
    or has k 0, is not given in this run."""

    # -- objectives and advantages -----------------------------------------------------------------

    requires: frozenset[str] = _trait(frozenset(), "objective", "advantage")
    """Columns ("old_logp", "ref_logp", "values", ...), outputs ("entropy") and scalars of a record
    ("kl_k1", ...) that it cannot work without. A run in which nothing supplies one is refused."""

    takes_stale: bool = _trait(False, "objective")
    """The loss corrects for actions that older weights sampled. Else records that a step did not
    need are redrawn."""

    weighs_rows: bool = _trait(False, "objective")
    """What it averages over records counts each of a record's rows as its part of one (column
    ``rows``), or it averages no records."""

    works_without_rewards: bool = _trait(False, "advantage")
    """A job with it may have no reward, as where a teacher says what is good.
    ``GroupScalars.rewards`` is then 0 everywhere."""

    reads_rewards: frozenset[str] = _trait(frozenset(), "advantage", "filter")
    """The rewards that it reads by name; a job without one of them is refused."""

    # -- balancers ---------------------------------------------------------------------------------

    learns_costs: bool = _trait(False, balancer="algorithms:LearnsCosts")
    """It learns costs from measured seconds."""

    # -- datasets and rewards ----------------------------------------------------------------------

    shows_images: bool = _trait(False, "dataset", "reward")
    """Its prompts have images, or it shows images to a role; the roles that see them must take
    images."""

    asks: bool = _trait(False, "reward")
    """It has a generator role answer questions, which ``role:`` must name."""

    downloads: bool = _trait(False, "dataset")
    """Opening it would ask a network. ``g-core check`` leaves it closed; a run opens it first."""

    # -- step programs -----------------------------------------------------------------------------

    overlaps: bool = _trait(False, "controller")
    """It has generators draw while trainers work. Placement policies are told
    (``Window.overlaps``), and none may have roles take turns on a device."""

    updates_per_step: int = _trait(1, "controller")
    """The optimizer updates of one step, which a trainer's learning-rate schedule counts."""

    groups_per_step: int = _trait(0, "controller")
    """How many groups a step trains on, over all shards, for placement policies; 0: not known."""

    minibatches_per_step: int = _trait(1, "controller")
    """How many optimizer updates see all of a step's groups once (``WorkerShape.minibatches``)."""

    records_per_group: int = _trait(1, "controller")
    """How many records have one prompt where no advantage says it (``WorkerShape.group_size``)."""

    largest_gap: float = _trait(0.0, "controller")
    """By how many nats the log-prob of one action may be off, in place of the pair's band; 0: the
    pair's."""

    pushes_nearby: str = _trait("", "controller")
    """Which setting keeps pushes on the trainer's machine, so that a job with generators elsewhere
    is refused, and no machine that comes is taken in; "": they reach every one."""

    push_bytes: int = _trait(PUSH_BYTES, "controller")
    """The bytes of shared memory that all buckets of a push may take together."""

    # -- placement policies ------------------------------------------------------------------------

    meters: Mapping[str, str] = _trait({}, "placement")
    """Kind of device, as in ``Device.kind`` -> ``"module:attribute"``, the factory of a meter
    (``gcore_core.contract.metering``), for a policy that looks at ``Window.used``."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, _TYPES[_outer(item.type)]):
                raise ContractError(f"Traits.{item.name} is {item.type}, not {value!r}.")

    def misplaced(self, kind: str) -> list[str]:
        """Returns a sentence for each field that is set and does not belong to a kind."""
        nothing = Traits()
        return [
            f"Traits.{item.name} is of {', '.join(sorted(item.metadata['kinds']))}, not of {kind}"
            for item in fields(self)
            if kind not in item.metadata["kinds"]
            and getattr(self, item.name) != getattr(nothing, item.name)
        ]


_TYPES: Mapping[str, Any] = {
    "bool": bool,
    "int": int,
    "float": int | float,
    "str": str,
    "frozenset": Set,
    "Mapping": Mapping,
}


def _outer(annotation: Any) -> str:
    """Returns the word of an annotation: "frozenset" of ``frozenset[str]``."""
    return str(annotation).partition("[")[0]


def traits_of(config: Any) -> Traits:
    """Returns the traits of a config object; by it alone the core asks.

    config: None for a provider without settings.
    Raises ContractError where the object's method ``traits`` does not return them.
    """
    if not hasattr(config, "traits"):
        return Traits()
    name = f"{type(config).__module__}.{type(config).__qualname__}.traits()"
    try:
        found = config.traits()
    except GcoreError as error:
        raise ContractError(f"{name}: {error.what}", todo=error.todo) from error
    except Exception as error:  # what a plugin raises is for its author to fix
        raise ContractError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Traits):
        raise ContractError(f"{name} returned {found!r}; it returns Traits and takes nothing.")
    return found


# -- what would be silently ignored ----------------------------------------------------------------

#: Methods of config classes that 0.2 called -> the field that says it now; "": the plugin itself
#: refuses what does not suit it.
FORMER_METHODS: Mapping[str, str] = {
    **{
        name: name
        for name in (
            *("column_widths", "downloads"),
            *("gives_routing", "groups_per_step", "largest_gap", "logprob_band", "meters"),
            *("minibatches_per_step", "needs_routing", "own_columns", "precision", "push_bytes"),
            *("pushes_nearby", "reads_rewards", "records_per_group", "replica_slots", "requires"),
            *("samples_alike", "shows_images", "takes_adapters", "takes_stale"),
            *("updates_per_step", "works_without_rewards"),
        )
    },
    **dict.fromkeys(("adapts", "compares_samples", "cuts_samples", "keeps_weights"), ""),
    "gives_routing": "routing",
    "takes_adapters": "adapters",
}
#: Words of descriptions of 0.2: capabilities, and flags -> the field that says it now.
FORMER_WORDS: Mapping[str, str] = {
    "abort": "abort",
    "advantages.action": "action_advantages",
    "annotate": "annotates",
    "asks": "asks",
    "costs.learned": "learns_costs",
    "determinism": "determinism",
    "evaluate": "evaluates",
    "images": "images",
    "logprobs": "scores_logprobs",
    "logprobs.compared": "compares_logprobs",
    "logprobs.tokens": "token_logprobs",
    "objective.adapts": "adapts_objective",
    "overlaps": "overlaps",
    "routing": "routing",
    "save.background": "saves_in_background",
    "sharding": "sharding",
    "sharding.nodes": "sharding_over_nodes",
    "sleep": "sleeps",
    "values": "value_head",
    "weights.adapter": "adapters",
    "weights.device": "device_weights",
    "weights.fingerprint": "fingerprints",
    "weights.midway": "midway_weights",
    "weights.push": "receives_weights",
}


def refuse_former_words(description: str, given: Mapping[str, Any]) -> None:
    """Raises ContractError where a description is given what traits say now.

    description: the name of its class.
    given: its arguments.
    """
    for word in ("capabilities", "overlaps", "asks"):
        if word not in given:
            continue
        claimed = given[word] if word == "capabilities" else (word,)
        fields_ = ", ".join(f"{FORMER_WORDS.get(one, one)}=True" for one in sorted(claimed))
        raise ContractError(
            f"{description} has no {word!r}; it is what traits() of the config class returns.",
            todo=f"return Traits({fields_}), see {MIGRATION}",
        )


def protocols_of(kind: str) -> dict[str, type]:
    """Returns trait -> the protocol by which a backend of a kind keeps it, where there is one."""
    places = {item.name: item.metadata["protocols"].get(kind) for item in fields(Traits)}
    return {
        name: import_attribute(f"gcore_core.contract.{place}")
        for name, place in places.items()
        if place
    }


def methods_of(protocol: type) -> list[str]:
    """Returns the names of a protocol's own methods."""
    return [name for name in vars(protocol) if not name.startswith("_")]


def wrong_methods(config: type) -> Iterator[str]:
    """Yields a sentence for each method of a config class that the core cannot or does not call."""
    method = inspect.getattr_static(config, "traits", None)
    if method is not None and (wrong := _uncallable(method)):
        yield f"'traits' {wrong}; write def traits(self) -> Traits"
    for name in _methods(config):
        if name in FORMER_METHODS:
            trait = FORMER_METHODS[name]
            todo = f"return Traits({trait}=...) from traits()" if trait else "check it yourself"
            yield f"the core does not call {name}(); {todo}, see {MIGRATION}"


def near_misses(config: type) -> Iterator[str]:
    """Yields a sentence for each method whose name is nearly ``traits`` or that of a trait."""
    names = [item.name for item in fields(Traits)]
    for name in _methods(config):
        if name == "traits" or name in FORMER_METHODS:
            continue
        if not hasattr(config, "traits") and difflib.get_close_matches(name, ["traits"], 1, 0.75):
            yield f"the core never calls {name}(); did you mean traits()?"
        for near in difflib.get_close_matches(name, names, 1, 0.85):
            yield f"the core never calls {name}(); did you mean Traits({near}=...) of traits()?"


def _methods(config: type) -> list[str]:
    """Returns the public methods of a class and of its bases, in order."""
    names = {name for cls in config.__mro__ if cls is not object for name in vars(cls)}
    return [
        name
        for name in sorted(names)
        if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(config, name))
    ]


def _uncallable(method: Any) -> str:
    """Returns why the core cannot call an attribute without arguments; "" when it can."""
    if isinstance(method, classmethod | staticmethod):
        return ""
    if not inspect.isfunction(method):
        return "is no method"
    if inspect.iscoroutinefunction(method):
        return "is async, and the core does not wait for it"
    try:
        inspect.signature(method).bind(None)
    except TypeError:
        return "takes arguments, and the core gives it none"
    return ""
