"""What must hold between the roles of a configuration, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OWN = ("diffusion", "diffusion/default")
#: Settings that sampler and trainer must have alike, or their log-probs differ.
_SHARED = ("guidance", "lora", "dtype", "max_sequence_length")


def problems(plan: Mapping[str, Any]) -> Iterator[str]:
    """One sentence each, starting with the config path."""
    roles = plan.get("roles", {})
    mine = {name: role for name, role in roles.items() if role.get("use") in _OWN}
    forward = plan.get("objective", {}).get("use") == "diffusion/nft"
    if forward and "policy" not in mine:
        yield (
            "objective.use: diffusion/nft teaches denoisers, and roles.policy uses none; "
            "choose another."
        )
    for name, role in mine.items():
        followed = role.get("follows")
        if followed in mine:
            yield from _differences(name, role["config"], followed, mine[followed]["config"])
            scale = role["config"].get("scale")
            if not forward and scale == 0:
                yield (
                    f"roles.{name}.config.scale: without noise there are no actions, which "
                    f"{plan['objective']['use']} "
                    "needs; set scale above 0, or use diffusion/nft."
                )


def _differences(
    name: str, config: Mapping[str, Any], followed: str, other: Mapping[str, Any]
) -> Iterator[str]:
    for key in _SHARED:
        if config.get(key) != other.get(key):
            yield (
                f"roles.{name}.config.{key}: is {config.get(key)!r}, but {other.get(key)!r} in "
                f"roles.{followed}."
            )
