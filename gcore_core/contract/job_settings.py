"""Holds the settings of a job that are the core's own, as typed values.

That is every key of the YAML but plugins' own.

A key is declared here alone: its default, what it may be, and under it the text that explains it.
docs/reference/config.md is made of these. Every process of a run reads the same classes: that is
why they stand in the contract, which the configuration, the workers and the controllers may all
import.

``config`` holds what the chosen provider's own dataclass describes, as plain values. No value is
changed once a configuration has been resolved; the classes are not frozen, because OmegaConf
merges nothing into a frozen one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gcore_core.contract.errors import did_you_mean
from gcore_core.contract.installing import install_command

#: The role that learns, and the one that samples from it.
POLICY = "policy"
ROLLOUT = "rollout"
#: The default of a value that must be given.
MISSING = "???"
#: A value that is chosen by others of the job.
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Says what a value may be; None always passes.

    at_least: its smallest value.
    above: what it must be greater than.
    one_of: the words that are allowed; none: any.
    """

    at_least: float | None = None
    above: float | None = None
    one_of: tuple[str, ...] = ()

    def problem(self, value: Any) -> str:
        """Returns what is wrong with a value; empty when nothing is."""
        if value is None:
            return ""
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least}, not {value}."
        if self.above is not None and not value > self.above:
            return f"must be greater than {self.above}, not {value}."
        if self.one_of and value not in self.one_of:
            guess = did_you_mean(str(value), list(self.one_of))
            return f"must be one of {', '.join(self.one_of)}{guess}, not {value!r}."
        return ""


#: Keys of a field's metadata: its Limit, the kind of provider that is chosen there, and the class
#: that names the known keys of an open mapping.
LIMIT = "limit"
KIND = "kind"
KEYS = "keys"


def _at_least(least: int, default: int) -> Any:
    return field(default=default, metadata={LIMIT: Limit(at_least=least)})


def _positive(default: float | None) -> Any:
    return field(default=default, metadata={LIMIT: Limit(above=0)})


def _one_of(default: str, *others: str) -> Any:
    return field(default=default, metadata={LIMIT: Limit(one_of=(default, *others))})


def _choice(kind: str, cls: type) -> Any:
    """Makes a field in which a provider of ``kind`` is chosen."""
    return field(default_factory=cls, metadata={KIND: kind})


def _open() -> Any:
    return field(default_factory=dict)


@dataclass
class RunSettings:
    """The run as a whole."""

    GONE_KEYS: ClassVar[dict[str, str]] = {
        "spares": "remove it: no processes are kept ready; a lost worker starts as at the beginning"
    }

    name: str | None = None
    """Names the run's directory. ``null``: the file's name without its suffix."""
    steps: int = _at_least(1, default=100)
    """Steps to train, at least 1."""
    epochs: float | None = _positive(default=None)
    """The run also ends with the step that has consumed this many passes over the data."""
    seed: int = 0
    """Of everything random: order of prompts, samples, mini-batches."""
    dir: str | None = None
    """The run's directory. ``null``: ``runs/<name>/<NNN>``, the next free number. One that holds a
    run is an error.
    """
    deterministic: bool = False
    """The run repeats bit for bit, as far as its backends claim ``determinism``; slower."""
    patience_s: float = _positive(default=600.0)
    """Seconds that one process waits for another that shows no progress."""


@dataclass
class Choice:
    """A provider and its own settings."""

    use: str = MISSING
    config: Any = _open()
    """Its settings."""


@dataclass
class LauncherSettings(Choice):
    """What starts the node agents, and what is done about files that a node does not have."""

    use: str = "core/local"
    """What starts the node agents. ``core/inline`` keeps everything in one process, for a debugger:
    its event loop waits while a function of yours runs.
    """
    files: str = _one_of("copy", "check")
    """What is done about files that the job names and a node does not have: ``copy`` them there
    from the machine that ``g-core run`` is called on, or only ``check`` and refuse the run. A file
    that differs is never replaced.
    """


@dataclass
class ClusterSettings:
    """What the run may occupy."""

    devices: int | str = "auto"
    """How many devices the run may use. ``auto``: all GPUs, or all cores on a machine without."""
    device_gib: float | None = _positive(default=None)
    """Memory of each GPU in GiB, above 0; a job that needs more is refused. Empty: it is not known,
    and nothing is refused for it. A CPU device has the memory of its machine.
    """
    wait_s: float = _positive(default=600.0)
    """A run that has lost machines, and does not fit on the others, waits so many seconds for
    them.
    """
    grow: str = _one_of("checkpoint", "never")
    """When a run that goes on changes its machines: at its next ``checkpoint`` it begins again from
    that, on the machines that there are then, where one has come that it has room for or one says
    that it will leave; or ``never``. A machine that is lost always has it begin again.
    """


@dataclass
class ControllerSettings(Choice):
    """The step program."""

    use: str = "core/sync"
    """The step program."""
    config: Any = _open()
    """Its settings: prompts per step, mini-batches, epochs and others, which ``g-core plugins show
    core`` lists.
    """
    shards: int = _at_least(1, default=1)
    """Controllers that run in parallel, each over its share of the prompts."""
    replicas: str = _one_of("shared", "owned")
    """Which of the policy's generators a controller asks. ``shared``: all of them. ``owned``: its
    own, as many as every other, to within one. Controllers then have fewer messages, but replicas
    of one help no other, so a controller with longer answers holds up the step. It needs at least
    as many replicas as controllers; where a placement policy leaves fewer awake, controllers share
    what there is. A deterministic run refuses it, since there each replica hears every
    controller.
    """


@dataclass
class DataSettings(Choice):
    """A dataset of prompts."""

    use: str = "core/jsonl"
    """The dataset of prompts; a section ``data`` must be given."""
    config: Any = _open()
    """Its settings, such as ``path``."""


@dataclass
class EvaluationSettings:
    """When and on what the policy is evaluated."""

    every: int = _at_least(0, default=0)
    """Steps between evaluations. 0: only before the first and after the last step."""
    prompts: int = _at_least(1, default=256)
    """Prompts of one evaluation, the first ones; fewer where there are fewer rows."""
    show: int = _at_least(0, default=3)
    """Prompts, the first ones, whose answers are shown with each evaluation: one greedy, one
    drawn.
    """
    data: DataSettings | None = field(default=None, metadata={KIND: "dataset"})
    """A dataset of its own, of prompts that are not trained on. ``null``: nothing is evaluated, and
    ``evaluation.every`` is refused; so are ``evaluation.prompts`` and ``evaluation.show`` where
    this key is not set at all.
    """


@dataclass
class AdvantageSettings(Choice):
    """Turns rewards into advantages."""

    use: str = MISSING
    """Turns rewards into advantages."""
    config: Any = _open()
    """Its settings, such as ``group_size``."""


@dataclass
class ObjectiveSettings(Choice):
    """A loss."""

    use: str = MISSING
    """The loss."""


@dataclass
class FilterSettings(Choice):
    """Says which groups teach."""

    use: str = "core/keep-all"
    """Says which groups teach. ``core/varied`` drops those whose rewards are all equal: the sum, or
    the one that ``filter.config.reward`` names.
    """


@dataclass
class EnvironmentSettings(Choice):
    """Says what the policy acts in, over several turns."""

    use: str = MISSING
    """What the policy acts in, over several turns."""
    roles: dict[str, str] = field(default_factory=dict)
    """Player -> the generator role that speaks for it, such as a frozen opponent. The policy speaks
    for every other player.
    """


@dataclass
class BalanceSettings(Choice):
    """Splits records over data-parallel ranks."""

    use: str = AUTO
    """Splits records over data-parallel ranks. ``auto``: ``balance`` where the policy has several
    slots and gcore-placement is installed, else ``core/in-order``; ``g-core check`` and the run's
    start say which.
    """


@dataclass
class SentinelSettings(Choice):
    """Watches whether generators compute what the trainer computes."""

    GONE_KEYS: ClassVar[dict[str, Callable[[], str]]] = {
        "canaries": lambda: (
            "set sentinel.config.canaries, a key of gcore-sentinel's sentinel and "
            f"sentinel/band: {install_command('gcore-sentinel')}"
        )
    }

    use: str = AUTO
    """Watches whether generators compute what the trainer computes. ``auto``: ``sentinel`` where
    gcore-sentinel is installed, ``sentinel/band`` where the policy also has an interpreter of its
    own, else ``core/band``.
    """


@dataclass
class PlacementSettings(Choice):
    """Decides which devices each role has."""

    use: str = "core/even"
    """Decides which devices each role has."""
    sleep_in_training: str = _one_of("auto", "always", "never")
    """Generators sleep while the trainer works, so that their memory is its: ``always``, ``never``,
    or ``auto``: those that share an accelerator with it and can.
    """
    sleep_in_rollout: str = _one_of("never", "always")
    """Trainers give their memory back between a push and the next preparation: ``always`` or
    ``never``.
    """


@dataclass
class CheckpointSettings:
    """When the run's state is saved and which states stay."""

    every: int = _at_least(0, default=0)
    """Steps between two. 0: one is saved only when SIGTERM or Ctrl-C ends the run, or somebody asks
    for it.
    """
    last: int = _at_least(1, default=3)
    """How many of the newest stay."""
    keep_every: int = _at_least(0, default=0)
    """The checkpoint of every so many steps stays, too. 0: none."""
    best: str | None = None
    """A metric of a step or of its evaluation, such as ``reward`` or ``greedy/exact``; the best
    checkpoint by it stays, too.
    """
    best_is: str = _one_of("higher", "lower")
    """Which value of ``best`` is the best: the ``higher`` or the ``lower``."""
    restarts: int = _at_least(0, default=3)
    """How often a run goes on by itself."""


@dataclass
class MadeModelSettings:
    """What ``model.make`` of a role holds: a function that makes the model before the run."""

    path: str = MISSING
    name: str = MISSING
    config: dict[str, Any] = _open()


@dataclass
class ModelSettings:
    """The keys of a role's ``model`` that the core knows; plugins may read others."""

    path: str | None = None
    revision: str | None = None
    make: MadeModelSettings | None = None


@dataclass
class RoleSettings(Choice):
    """One of ``roles``: a backend and where it runs."""

    GONE_KEYS: ClassVar[dict[str, str]] = {
        "lent": "remove it: no trainer lends its devices; give roles.rollout slots of its own, as "
        "many as g-core simulate --async finds best"
    }

    use: str = MISSING
    """The backend."""
    slots: int = _at_least(1, default=1)
    """Devices the role may occupy."""
    least: int | None = field(default=None, metadata={LIMIT: Limit(at_least=1)})
    """Replicas that stay awake where a placement policy moves devices between generators, and with
    which a run that has lost machines goes on. ``null``: 1 of a generator, all of another role.
    """
    follows: str | None = None
    """The role whose weights it follows; for ``rollout``, ``null`` means ``policy``."""
    python: str | None = None
    """Interpreter of its workers: a path, a command such as ``python3.12``, or ``venv:NAME``.
    ``null``: the one that runs ``g-core``.
    """
    model: dict[str, Any] = field(default_factory=dict, metadata={KEYS: ModelSettings})
    """The model: ``path``, with ``revision`` of one on a hub, or ``make`` for one that is made
    once, before the run; not both. Of the two, the one that the command line says wins over the
    file's.
    """
    engine: dict[str, Any] = _open()
    """Passed to the engine as it is; a plugin that has no engine, or whose engine has other keys
    for it, refuses it at check.
    """
    objective: ObjectiveSettings | None = None
    """What a trainer besides the policy trains. ``null``: what the role's plugin says."""
    minibatches: int = _at_least(1, default=1)
    """Of a trainer besides the policy: updates of one pass over a step's records."""
    epochs: int = _at_least(1, default=1)
    """The same: passes over a step's records."""
    head_start: int = _at_least(0, default=0)
    """The same: steps of the run that it trains before the policy does; the policy's weights stay
    as they are meanwhile.
    """


@dataclass
class RewardSettings(Choice):
    """One of ``rewards``: a scorer and how its values count."""

    use: str = MISSING
    """The scorer."""
    weight: float = 1.0
    """Its factor in the sum."""
    normalise: str = _one_of("none", "group", "batch")
    """What comes before the weight. ``group``: less the group's mean, over its standard deviation.
    ``batch``: the same over all groups of the step.
    """
    when: dict[str, Any] = _open()
    """The records it is for: field of the row -> value, or list of values; others are ``skipped``
    and it adds nothing to them.
    """
    role: str | None = None
    """Of a reward that asks a model, the generator role that answers."""
    timeout_s: float = _positive(default=10.0)
    """Seconds that one call of the reward may take, for all records that it is asked about
    together; then the reward of these has status ``timeout`` and no value. There is no limit for a
    reward with a ``role``.
    """
    worker: str = "scorer"
    """Name of the worker that runs it; rewards of one name share a process."""
    workers: int = _at_least(1, default=1)
    """How many processes of that worker there are; the shards of the controller use them in
    turn.
    """
    alone_every: int = _at_least(0, default=0)
    """Of how many calls in which scores differ one record's score is asked for again, alone;
    another score ends the run. Only plain functions of one record may have it. 0: of none.
    """
    known: str | None = None
    """A file of answers whose reward is known beforehand, which are scored now and then; another
    value ends the run.
    """


@dataclass
class ObserverSettings(Choice):
    """One of ``observers``: what is told of everything and changes nothing."""

    use: str = MISSING
    """The observer."""
    timeout_s: float = _positive(default=120.0)
    """Seconds that one report may take it, and that the end of the run waits for it; then it is
    ended, and the run goes on.
    """


@dataclass
class JobSettings:
    """The root of the YAML."""

    GONE_KEYS: ClassVar[dict[str, str]] = {
        "sampling": "remove it; choose an environment, whose episodes draw, look at the answer and "
        "draw again: docs/how-to/move-to-0.3.md"
    }

    run: RunSettings = field(default_factory=RunSettings)
    launcher: LauncherSettings = _choice("launcher", LauncherSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    controller: ControllerSettings = _choice("controller", ControllerSettings)
    data: DataSettings = _choice("dataset", DataSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    advantage: AdvantageSettings = _choice("advantage", AdvantageSettings)
    objective: ObjectiveSettings = _choice("objective", ObjectiveSettings)
    filter: FilterSettings = _choice("filter", FilterSettings)
    environment: EnvironmentSettings | None = field(default=None, metadata={KIND: "environment"})
    """What the policy acts in over several turns, by ``use`` and ``config``. ``null``: it answers
    each prompt once.
    """
    balance: BalanceSettings = _choice("balancer", BalanceSettings)
    sentinel: SentinelSettings = _choice("sentinel", SentinelSettings)
    placement: PlacementSettings = _choice("placement", PlacementSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    roles: dict[str, RoleSettings] = field(default_factory=dict)
    rewards: dict[str, RewardSettings] = field(default_factory=dict)
    observers: dict[str, ObserverSettings] = field(default_factory=dict)
    plugins: dict[str, str | None] = field(default_factory=dict)
    """Plugin -> version specifier, or ``null``."""
    local: list[str] = field(default_factory=list)
    """Python files of the project that hold hooks; the plugin's name is the file's stem."""

    @property
    def speakers(self) -> dict[str, str]:
        """Player -> the role that speaks for it in episodes."""
        return self.environment.roles if self.environment else {}
