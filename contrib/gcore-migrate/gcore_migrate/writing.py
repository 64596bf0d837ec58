"""Writes a job as YAML, with a comment for every key that nothing takes over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gcore_core.kits.commands import yaml12
from gcore_migrate.rules import Draft, Outcome

#: The order in which a job is read best.
_ORDER = (
    "run",
    "controller",
    "data",
    "evaluation",
    "advantage",
    "objective",
    "filter",
    "roles",
    "rewards",
    "placement",
    "cluster",
    "checkpoint",
    "observers",
    "plugins",
)
_FIRST = ("name", "use", "slots", "weight", "model", "config")


def written(draft: Draft, outcomes: Sequence[Outcome], source: str) -> str:
    """Returns the job as YAML.

    source: what the job was made of, for its first line.
    """
    taken = [outcome for outcome in outcomes if outcome.targets]
    lines = [f"# Made of {source}: {len(taken)} of its {len(outcomes)} keys are taken over."]
    lines += [f"# To do: {todo}" for todo in dict.fromkeys(draft.todo)]
    job = {name: _sorted(draft.job[name]) for name in _ORDER if name in draft.job}
    lines += [_section(name, value) for name, value in job.items()]
    left = [outcome for outcome in outcomes if not outcome.targets]
    if left:
        lines.append("\n# Keys without a counterpart:")
        lines += [f"#   {each.key}={_short(each.value)}: {each.why}" for each in left]
    return "\n".join(lines) + "\n"


def _section(name: str, value: Mapping[str, Any]) -> str:
    return str(yaml12.dump({name: value})).rstrip("\n")


def _sorted(tree: Any) -> Any:
    """Returns the tree with what is chosen first, then what it is told."""
    if not isinstance(tree, dict):
        return tree
    first = [name for name in _FIRST if name in tree]
    return {name: _sorted(tree[name]) for name in [*first, *(n for n in tree if n not in first)]}


def _short(value: Any) -> str:
    text = str(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."
