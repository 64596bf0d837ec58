"""Holds the settings of a job that are the core's own, as typed values.

That is every key of the YAML but those of plugins.

A key is one line here, with its default and what it may be, and a row of docs/reference/config.md,
which explains it. Every process of a run reads the same classes: that is why they stand in the
contract, which the configuration, the workers and the controllers may all import.

``config`` holds what the chosen provider's own dataclass describes, as plain values. No value is
changed once a configuration has been resolved; the classes are not frozen, because OmegaConf
merges nothing into a frozen one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gcore_core.contract.errors import did_you_mean

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
class Run:
    """The run as a whole."""

    name: str | None = None  # None: stem of the file
    steps: int = _at_least(1, default=100)
    # The run ends when this many passes over the data are consumed; None: by steps alone.
    epochs: float | None = _positive(default=None)
    seed: int = 0
    dir: str | None = None  # None: runs/<name>/<NNN>
    deterministic: bool = False
    # How long one process waits for another that shows no progress.
    patience_s: float = _positive(default=600.0)
    # Processes that are kept ready to take the place of lost workers.
    spares: str = _one_of("auto", "always", "never")


@dataclass
class Choice:
    """A provider and its own settings."""

    use: str = MISSING
    config: Any = _open()


@dataclass
class Launcher(Choice):
    """What starts the node agents, and what is done about files that a node does not have."""

    use: str = "core/local"
    files: str = _one_of("copy", "check")


@dataclass
class Cluster:
    """What the run may occupy."""

    devices: int | str = "auto"
    # Memory of each accelerator in GiB, where the launcher does not tell; None: not known.
    device_gib: float | None = _positive(default=None)
    # A run that has lost machines, and does not fit on the others, waits so long for them.
    wait_s: float = _positive(default=600.0)


@dataclass
class Controller(Choice):
    """The step program."""

    use: str = "core/sync"
    shards: int = _at_least(1, default=1)
    replicas: str = _one_of("shared", "owned")


@dataclass
class Data(Choice):
    """A dataset of prompts."""

    use: str = "core/jsonl"


@dataclass
class Evaluation:
    """When and on what the policy is evaluated."""

    every: int = _at_least(0, default=0)
    prompts: int = _at_least(1, default=256)
    show: int = _at_least(0, default=3)
    data: Data | None = field(default=None, metadata={KIND: "dataset"})


@dataclass
class Filter(Choice):
    """Says which groups teach."""

    use: str = "core/keep-all"


@dataclass
class Sampling(Choice):
    """Says how the records of a group are drawn."""

    use: str = "core/plain"


@dataclass
class Balance(Choice):
    """Splits records over data-parallel ranks."""

    # "auto": the plugin balance where the policy has several slots, else core/in-order.
    use: str = AUTO


@dataclass
class Sentinel(Choice):
    """Watches whether generators compute what the trainer computes."""

    # "auto": the plugin sentinel where it is installed, else core/band.
    use: str = AUTO
    # Records that both sides score again after a push, where a step's own cannot be compared; 0:
    # none.
    canaries: int = _at_least(0, default=16)


@dataclass
class Placement(Choice):
    """Decides which devices each role has."""

    use: str = "core/even"
    # When generators sleep; only those whose backend can sleep ever do.
    sleep_in_training: str = _one_of("auto", "always", "never")
    # When trainers sleep between a push and the next preparation.
    sleep_in_rollout: str = _one_of("never", "always")


@dataclass
class Checkpoint:
    """When the run's state is saved and which states stay."""

    # Steps; 0: saved only when a signal ends the run, or somebody asks for it (``run_files.SAVE``).
    every: int = _at_least(0, default=0)
    last: int = _at_least(1, default=3)
    keep_every: int = _at_least(0, default=0)
    best: str | None = None  # a metric
    best_is: str = _one_of("higher", "lower")
    restarts: int = _at_least(0, default=3)


@dataclass
class MadeModel:
    """What ``model.make`` of a role holds: a function that makes the model before the run."""

    path: str = MISSING
    name: str = MISSING
    config: dict[str, Any] = _open()


@dataclass
class Model:
    """The keys of a role's ``model`` that the core knows; plugins may read others."""

    path: str | None = None
    revision: str | None = None
    make: MadeModel | None = None


@dataclass
class Role(Choice):
    """One of ``roles``: a backend and where it runs."""

    slots: int = _at_least(1, default=1)
    # Replicas that stay awake where a placement policy moves devices, and that a run which has lost
    # machines goes on with. None: 1 of a generator, all of others.
    least: int | None = field(default=None, metadata={LIMIT: Limit(at_least=1)})
    # Of rollout: how many of its replicas, the last ones, sleep on the trainer's devices and wake
    # while the trainer waits. They are among ``slots``. Only under a step program that lends.
    lent: int = _at_least(0, default=0)
    follows: str | None = None
    python: str | None = None
    model: dict[str, Any] = field(default_factory=dict, metadata={KEYS: Model})
    engine: dict[str, Any] = _open()
    # Of a trainer besides the policy: what it trains, how, and for how many steps before the policy
    # trains too. None: what the role's plugin says.
    objective: Choice | None = None
    minibatches: int = _at_least(1, default=1)
    epochs: int = _at_least(1, default=1)
    head_start: int = _at_least(0, default=0)


@dataclass
class Reward(Choice):
    """One of ``rewards``: a scorer and how its values count."""

    weight: float = 1.0
    normalise: str = _one_of("none", "group", "batch")
    when: dict[str, Any] = _open()
    role: str | None = None
    timeout_s: float = _positive(default=10.0)
    worker: str = "scorer"
    workers: int = _at_least(1, default=1)
    # In every ``alone_every``-th call in which scores differ, one record's score is asked for
    # again, alone; 0: in none. Where that score is another, the run ends.
    alone_every: int = _at_least(0, default=0)
    # A file of rows whose reward is known beforehand; None: none.
    known: str | None = None


@dataclass
class Observer(Choice):
    """One of ``observers``: what is told of everything and changes nothing."""

    # How long one report may take it, and how long the end of the run waits for it.
    timeout_s: float = _positive(default=120.0)


@dataclass
class JobSettings:
    """The root of the YAML."""

    run: Run = field(default_factory=Run)
    launcher: Launcher = _choice("launcher", Launcher)
    cluster: Cluster = field(default_factory=Cluster)
    controller: Controller = _choice("controller", Controller)
    data: Data = _choice("dataset", Data)
    evaluation: Evaluation = field(default_factory=Evaluation)
    advantage: Choice = _choice("advantage", Choice)
    objective: Choice = _choice("objective", Choice)
    filter: Filter = _choice("filter", Filter)
    sampling: Sampling = _choice("sampler", Sampling)
    balance: Balance = _choice("balancer", Balance)
    sentinel: Sentinel = _choice("sentinel", Sentinel)
    placement: Placement = _choice("placement", Placement)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    roles: dict[str, Role] = field(default_factory=dict)
    rewards: dict[str, Reward] = field(default_factory=dict)
    observers: dict[str, Observer] = field(default_factory=dict)
    plugins: dict[str, str | None] = field(default_factory=dict)
    local: list[str] = field(default_factory=list)
