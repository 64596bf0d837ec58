"""The plugin ``migrate`` makes jobs of the configurations of other trainers."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        name="verl",
        summary="make a job of a verl configuration: a YAML file or a shell script",
        factory="gcore_migrate.commands:from_verl",
    )
    yield CommandProvider(
        name="trl",
        summary="make a job of a TRL configuration: a YAML file, a shell script or a Python script",
        factory="gcore_migrate.commands:from_trl",
    )
    yield CommandProvider(
        name="keys",
        summary="every key of verl or TRL that is known, and what becomes of it",
        factory="gcore_migrate.commands:list_keys",
    )
