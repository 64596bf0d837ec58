"""What must hold between the roles of a configuration, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore_language.engine_arguments import without_engine

from gcore_core.contract.looking import Look

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


def file_problems(plan: Mapping[str, Any], here: bool) -> Iterator[str | Look]:
    """Yields a sentence for each model of this plugin's roles and rewards that no worker could
    open, and a look at each other one.

    here: whether all workers start on this machine.
    """
    from gcore_language.model_places import directory_here, missing, path_problems

    for name, reward in plan.get("rewards", {}).items():
        if reward["use"] == "diffusion/preference":
            where, path = f"rewards.{name}.config.path", str(reward["config"]["path"])
            yield from path_problems(where, path, None, here, "clip")
    for name, role in plan["roles"].items():
        model = role.get("model") or {}
        if role["use"].partition("/")[0] != "diffusion" or not model.get("path"):
            continue
        where = f"roles.{name}.model.{'make' if 'make' in model else 'path'}"
        directory = directory_here(str(model["path"]), model.get("revision"))
        if directory is None:
            yield from missing(where, str(model["path"]), here)
        elif not any((directory / file).is_file() for file in ("model_index.json", "config.json")):
            yield (
                f"{where}: {directory} has neither a model_index.json, as a pipeline of diffusers "
                "has, nor a config.json, so it is no model; correct it."
            )
        else:
            yield Look(
                where=where,
                python=role.get("python"),
                function="gcore_diffusion.components:problems",
                arguments={"directory": str(directory)},
                files=tuple(map(str, _folders(directory))),
            )


def _folders(directory: Path) -> list[Path]:
    """Returns a pipeline's directory and those of its parts."""
    return [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
