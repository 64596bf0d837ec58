"""What becomes of one key of another trainer's configuration.

A `Rule` says it for one key: which keys of a job take its value over, or why there is none. The
tables of rules are in ``verl`` and ``trl``. `Draft` collects the job while rules are applied.

**The order of rules.** Every key is applied once, in this order (``apply_rules``, ``commands``):

    1. keys of ``DEFAULTS`` that the configuration leaves out: their defaults are not ours
    2. keys that the configuration gives, in its order
    3. ``finish`` of ``verl`` or ``trl``, which adds what the other trainer does without being told

What a rule *reads* does not depend on the order: ``Draft.get`` knows all keys of the other trainer
from the beginning, those of the defaults included. What a rule *sets* does: where several set one
key of the job, the last wins. So what is given wins over defaults. Where two keys that are given
set one key of the job, their rules are mostly such that the order does not matter: a rule asks for
the other key too, or takes the smallest of all budgets. For example, a configuration of verl gives

    clip_ratio_high  0.28
    clip_ratio       0.2

The first sets ``clip_high`` to 0.28. The second is for both sides; it asks for ``clip_ratio_high``
and sets ``clip_low`` to 0.2 and ``clip_high`` to 0.28. The other order gives the same job. Of two
keys that say one thing in two ways, such as ``max_prompt_length`` and ``max_model_len``, the later
one wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

Apply = Callable[["Draft", Any], None]


class NoCounterpart(Exception):
    """Raised by a rule whose key says nothing that a job can say; its text says why."""


@dataclass(frozen=True)
class Rule:
    """Says what becomes of one key.

    key: of the other trainer.
    targets: keys of a job that it may set; empty where it has no counterpart.
    apply: sets them in a draft; it raises NoCounterpart where this value has none.
    why: why it has no counterpart, or what to know about the one that it has.
    """

    key: str
    targets: tuple[str, ...]
    apply: Apply
    why: str = ""


@dataclass
class Outcome:
    """What became of a key that the configuration sets.

    key, value: as the configuration says them.
    targets: keys of the job that were set; empty where nothing took it over.
    why: why nothing did.
    """

    key: str
    value: Any
    targets: tuple[str, ...] = ()
    why: str = ""


@dataclass
class Draft:
    """A job in the making.

    settings: the other trainer's keys -> values, with its defaults.
    job: the job so far, as a tree of plain values.
    todo: what a person still has to say, in whole sentences.
    """

    settings: Mapping[str, Any]
    job: dict[str, Any] = field(default_factory=dict)
    todo: list[str] = field(default_factory=list)
    _set: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any) -> None:
        """Sets a key of the job; ``key`` is dotted."""
        *path, last = key.split(".")
        node = self.job
        for name in path:
            node = node.setdefault(name, {})
        node[last] = deepcopy(value)  # YAML would name a list that stands in two places
        self._set.append(key)

    def has(self, key: str) -> bool:
        """Returns whether the job says the key, or something below it."""
        node: Any = self.job
        for name in key.split("."):
            if not isinstance(node, dict) or name not in node:
                return False
            node = node[name]
        return True

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value of the other trainer's configuration."""
        return self.settings.get(key, default)

    def took(self) -> tuple[str, ...]:
        """Returns the keys that were set since it was called last."""
        taken = tuple(dict.fromkeys(self._set))
        self._set.clear()
        return taken


def to(key: str, *targets: str, convert: Callable[[Any], Any] | None = None, why: str = "") -> Rule:
    """Returns the rule of a key whose value, or what ``convert`` makes of it, is that of others."""

    def apply(draft: Draft, value: Any) -> None:
        converted = value if convert is None else convert(value)
        for target in targets:
            draft.set(target, converted)

    return Rule(key, targets, apply, why)


def run_name(value: Any) -> str:
    """Returns the name of a run as that of a directory, which a run here has."""
    return str(value).replace("/", "-")


def by(key: str, targets: Sequence[str], apply: Apply, why: str = "") -> Rule:
    """Returns the rule of a key for which a function decides."""
    return Rule(key, tuple(targets), apply, why)


def absent(key: str, why: str) -> Rule:
    """Returns the rule of a key that has no counterpart."""

    def apply(draft: Draft, value: Any) -> None:
        raise NoCounterpart(why)

    return Rule(key, (), apply, why)


def chosen(names: Mapping[str, Any], what: str) -> Callable[[Any], Any]:
    """Returns a converter that looks a name up. It raises NoCounterpart for a name that is lacking.

    what: what the names are of, for the reason.
    """

    def convert(value: Any) -> Any:
        if str(value) not in names:
            raise NoCounterpart(f"there is no {what} such as {value}")
        return names[str(value)]

    return convert


#: What the plugin ``trackers`` has an observer for, under the name that others know it by.
_TRACKERS = ("mlflow", "trackio", "wandb")


def trackers_of(value: Any) -> list[str]:
    """Returns the trackers among loggers that there is an observer for.

    value: a name or several.
    """
    names = value if isinstance(value, list) else [value]
    return [name for name in names if name in _TRACKERS]


def reports(draft: Draft, value: Any) -> None:
    """Takes TensorBoard over, and trackers that there is an observer for.

    value: a name or several.
    Raises NoCounterpart where none of them is among these.
    """
    trackers = trackers_of(value)
    if "tensorboard" in (value if isinstance(value, list) else [value]):
        draft.set("plugins.report", None)
    elif not trackers:
        raise NoCounterpart("it names no tracker that is known here")
    for name in trackers:
        draft.set(f"observers.{name}.use", f"trackers/{name}")
    if trackers:
        draft.todo.append(
            f"observers: install gcore-report[{','.join(trackers)}], and log in as before."
        )


#: Backends whose engines lie in a venv of their own, see ``g-core venv``.
_IN_VENVS = ("vllm", "sglang", "megatron", "deepspeed")


def in_venvs(draft: Draft) -> None:
    """Has every role of such a backend run in the venv of its engine."""
    for name, role in draft.job.get("roles", {}).items():
        engine = str(role.get("use", "")).partition("/")[0]
        if engine in _IN_VENVS:
            draft.set(f"roles.{name}.python", f"venv:{engine}")


def apply_rules(
    rules: Mapping[str, Rule], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[Draft, list[Outcome]]:
    """Returns the job that the rules make, and what became of each given key, in its order.

    Defaults of the other trainer are applied before what the configuration gives; see the module. A
    job says them, since ours are others.

    rules: key -> its rule; a key that ends in ``.*`` is that of a family.
    given: key -> value, as the configuration says them.
    defaults: key -> value, of the other trainer.
    """
    draft = Draft({**defaults, **given})
    for key, value in defaults.items():
        if key not in given:
            _apply(rules, draft, key, value)
    outcomes = [_apply(rules, draft, key, value) for key, value in given.items()]
    return draft, outcomes


def _apply(rules: Mapping[str, Rule], draft: Draft, key: str, value: Any) -> Outcome:
    """Applies the rule of one key, and returns what became of the key."""
    draft.took()  # forgets what rules before it have set
    rule: Rule | None = rules.get(key)
    argument = value
    if rule is None:
        rule, argument = _of_family(rules, key, value)
    if rule is None:
        return Outcome(key, value, why="it is not known here")
    try:
        rule.apply(draft, argument)
    except NoCounterpart as error:
        return Outcome(key, value, why=str(error))
    except (TypeError, ValueError):
        return Outcome(key, value, why=f"{value!r} is no value that is understood")
    return Outcome(key, value, draft.took())


def _of_family(rules: Mapping[str, Rule], key: str, value: Any) -> tuple[Rule | None, Any]:
    """Returns the rule of all keys that begin alike, ``name.*``, and what it gets.

    That is a mapping with one entry: what is left of the key -> the value. For example
    ``engine_kwargs.vllm.seed`` with 1 has the rule of ``engine_kwargs.*``, which gets
    {"vllm.seed": 1}. Where several families begin like the key, the longest is its own.
    """
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        rule = rules.get(".".join([*parts[:length], "*"]))
        if rule is not None:
            return rule, {".".join(parts[length:]): value}
    return None, value
