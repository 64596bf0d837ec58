"""The core's part of the YAML: every key that is not a plugin's own.

docs/reference/config.md explains each.

``config`` nodes are open here; the chosen provider's dataclass takes their place (see
``gcore_core.config.plan``).
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from gcore_core.contract.errors import ConfigError

MISSING = "???"
#: of a role, a reward, a scorer worker
NAME = re.compile(r"[A-Za-z_][\w-]*")


def _open() -> Any:
    return field(default_factory=dict)


@dataclass
class Run:
    name: str | None = None  # None: stem of the file
    steps: int = 100
    epochs: float | None = (
        None  # the run ends when this many passes over the data are consumed; None: by steps alone
    )
    seed: int = 0
    dir: str | None = None  # None: runs/<name>/<NNN>
    deterministic: bool = False
    patience_s: float = 600.0  # how long one process waits for another that shows no progress


@dataclass
class Choice:
    """A provider and its own settings."""

    use: str = MISSING
    config: Any = _open()


@dataclass
class Launcher(Choice):
    use: str = "core/local"


@dataclass
class Cluster:
    devices: int | str = "auto"


@dataclass
class Controller(Choice):
    use: str = "core/sync"
    shards: int = 1


@dataclass
class Data(Choice):
    use: str = "core/jsonl"


@dataclass
class Evaluation:
    every: int = 0
    prompts: int = 256
    show: int = 3
    data: Data | None = None


@dataclass
class Filter(Choice):
    use: str = "core/keep-all"


@dataclass
class Balance(Choice):
    use: str = "core/in-order"


@dataclass
class Placement(Choice):
    use: str = "core/even"
    sleep_in_training: str = (
        "auto"  # generators, where their backend can: "auto" | "always" | "never"
    )


@dataclass
class Checkpoint:
    every: int = 0  # steps; 0: one is saved only when a signal ends the run
    last: int = 3
    keep_every: int = 0
    best: str | None = None  # a metric
    best_is: str = "higher"  # or "lower"
    restarts: int = 3


@dataclass
class Role(Choice):
    slots: int = 1
    least: int = 1  # replicas that stay awake where a placement policy moves devices
    follows: str | None = None
    python: str | None = None
    model: dict[str, Any] = _open()
    engine: dict[str, Any] = _open()


@dataclass
class Reward(Choice):
    weight: float = 1.0
    normalise: str = "none"  # "group" | "batch"
    when: dict[str, Any] = _open()
    role: str | None = None
    timeout_s: float = 10.0
    worker: str = "scorer"
    workers: int = 1


@dataclass
class Core:
    """The root of the YAML."""

    run: Run = field(default_factory=Run)
    launcher: Launcher = field(default_factory=Launcher)
    cluster: Cluster = field(default_factory=Cluster)
    controller: Controller = field(default_factory=Controller)
    data: Data = field(default_factory=Data)
    evaluation: Evaluation = field(default_factory=Evaluation)
    advantage: Choice = field(default_factory=Choice)
    objective: Choice = field(default_factory=Choice)
    filter: Filter = field(default_factory=Filter)
    balance: Balance = field(default_factory=Balance)
    placement: Placement = field(default_factory=Placement)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    roles: dict[str, Role] = field(default_factory=dict)
    rewards: dict[str, Reward] = field(default_factory=dict)
    plugins: dict[str, str | None] = field(default_factory=dict)
    local: list[str] = field(default_factory=list)


#: Where one provider is chosen -> its kind. Below ``roles`` the role decides, below ``rewards`` it
#: is "reward".
KIND_AT = {
    "launcher": "launcher",
    "controller": "controller",
    "data": "dataset",
    "evaluation.data": "dataset",
    "advantage": "advantage",
    "objective": "objective",
    "filter": "filter",
    "balance": "balancer",
    "placement": "placement",
}

#: Smallest value of a number; ``*`` stands for any name.
AT_LEAST = {
    "run.steps": 1,
    "controller.shards": 1,
    "evaluation.every": 0,
    "evaluation.prompts": 1,
    "evaluation.show": 0,
    "roles.*.slots": 1,
    "roles.*.least": 1,
    "rewards.*.workers": 1,
    "checkpoint.every": 0,
    "checkpoint.last": 1,
    "checkpoint.keep_every": 0,
    "checkpoint.restarts": 0,
}
#: Numbers that must be greater than zero.
POSITIVE = ("rewards.*.timeout_s", "run.epochs", "run.patience_s")
#: What a value must be one of.
ONE_OF = {
    "rewards.*.normalise": ("none", "group", "batch"),
    "checkpoint.best_is": ("higher", "lower"),
    "placement.sleep_in_training": ("auto", "always", "never"),
}


def core_keys() -> dict[str, Any]:
    """Every key of the core with its default; ``*`` stands for a name the user gives."""
    return dict(_keys(Core, ""))


def check_containers(hint: Any, value: Any, path: str) -> None:
    """Raises ConfigError where ``value`` is no mapping, list or plain value although ``hint`` wants
    one.

    OmegaConf checks the plain values, but reports a wrong container without its path.
    """
    expected = _without_none(hint)
    if value is None or (isinstance(value, str) and value.startswith("${")):
        return
    if is_dataclass(expected) or typing.get_origin(expected) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"expected a mapping, got {_shown(value)}.", where=path)
        for key, inner in children(expected, value):
            check_containers(inner, value[key], f"{path}.{key}" if path else key)
    elif typing.get_origin(expected) is list:
        if not isinstance(value, list):
            raise ConfigError(f"expected a list, got {_shown(value)}.", where=path)
        (inner,) = typing.get_args(expected)
        for index, item in enumerate(value):
            check_containers(inner, item, f"{path}[{index}]")
    elif expected in (str, int, float, bool) and isinstance(value, Mapping | list):
        raise ConfigError(f"expected {expected.__name__}, got {_shown(value)}.", where=path)


def children(expected: Any, value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, type hint) for the keys of ``value`` that the type knows."""
    if is_dataclass(expected):
        hints = typing.get_type_hints(expected)
        yield from ((key, hints[key]) for key in value if key in hints)
    else:
        inner = typing.get_args(expected)[1]
        yield from ((key, inner) for key in value)


def _keys(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    defaults = cls()
    for key, hint in typing.get_type_hints(cls).items():
        name, hint, default = prefix + key, _without_none(hint), getattr(defaults, key)
        if is_dataclass(hint):
            if default is None:
                yield name, None
            yield from _keys(typing.cast(type, hint), f"{name}.")
        elif typing.get_origin(hint) is dict and is_dataclass(element := typing.get_args(hint)[1]):
            yield from _keys(typing.cast(type, element), f"{name}.*.")
        else:
            yield name, default


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner[0] if len(inner) == 1 else Any
    return hint


def _shown(value: Any) -> str:
    kind = (
        "a mapping"
        if isinstance(value, Mapping)
        else "a list"
        if isinstance(value, list)
        else type(value).__name__
    )
    return f"{kind}: {value!r}"
