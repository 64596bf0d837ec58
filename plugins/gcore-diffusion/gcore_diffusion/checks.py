"""What must hold between the roles of a configuration, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gcore_language.engine_arguments import without_engine

_OWN = ("diffusion", "diffusion/default")
#: Settings that sampler and trainer must have alike, or their log-probs differ.
_SHARED = ("guidance", "lora", "dtype", "max_sequence_length")


def problems(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each thing that is wrong, which starts with its config path."""
    roles = plan.get("roles", {})
    denoisers = {name: role for name, role in roles.items() if role.get("use") in _OWN}
    forward = plan.get("objective", {}).get("use") == "diffusion/nft"
    if forward and "policy" not in denoisers:
        yield (
            "objective.use: diffusion/nft teaches denoisers, and roles.policy uses none; "
            "choose another."
        )
    for name, role in denoisers.items():
        yield from without_engine(name, role)
        followed = role.get("follows")
        if followed in denoisers:
            yield from _differences(name, role["config"], followed, denoisers[followed]["config"])
            scale = role["config"].get("scale")
            if not forward and scale == 0:
                yield (
                    f"roles.{name}.config.scale: without noise there are no actions, which "
                    f"{plan['objective']['use']} "
                    "needs; set scale above 0, or use diffusion/nft."
                )


def _differences(
    name: str, config: Mapping[str, Any], followed: str, expected: Mapping[str, Any]
) -> Iterator[str]:
    """Yields a sentence for each setting that sampler and trainer must have alike and do not."""
    for key in _SHARED:
        if config.get(key) != expected.get(key):
            yield (
                f"roles.{name}.config.{key}: is {config.get(key)!r}, but {expected.get(key)!r} in "
                f"roles.{followed}."
            )
