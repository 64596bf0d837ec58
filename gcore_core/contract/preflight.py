"""Defines what ``gcore_check`` and ``gcore_preflight`` are told of a job that is to start.

Both classes show a part of what the core has. They are read, never made, by a plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.job_settings import JobSettings
from gcore_core.contract.launching import NodeFacts
from gcore_core.contract.placement import Mode, Window
from gcore_core.contract.providers import Provider


class ChosenProvider(Protocol):
    """Is a provider that a job has chosen."""

    @property
    def kind(self) -> str:
        """What is provided, such as "trainer"."""

    @property
    def reference(self) -> str:
        """What ``use:`` says: ``vllm`` or ``vllm/async``."""

    @property
    def owner(self) -> str:
        """The distribution and its version, as errors show them."""

    @property
    def spec(self) -> Provider:
        """Its description."""


class ResolvedJob(Protocol):
    """Is a job whose configuration is resolved; for ``gcore_preflight`` it is checked, too."""

    @property
    def name(self) -> str:
        """The name of its runs."""

    @property
    def settings(self) -> JobSettings:
        """The core's settings, with all defaults."""

    @property
    def provided(self) -> Mapping[str, ChosenProvider]:
        """Config path, such as "roles.policy" -> the chosen provider."""

    @property
    def objects(self) -> Mapping[str, Any]:
        """Config path -> the provider's own config object; None where it has no settings."""

    @property
    def columns(self) -> Mapping[str, Sequence[ColumnSpec]]:
        """Role -> the per-action columns that it gives."""

    @property
    def source(self) -> Path:
        """The YAML file."""

    def factory(self, path: str) -> FactorySpec:
        """Returns what makes the object that was chosen at a config path."""


class PlacedJob(Protocol):
    """Says where a job's workers are."""

    @property
    def workers(self) -> Mapping[str, list[list[int]]]:
        """Role -> device indexes of each of its workers."""

    @property
    def nodes(self) -> Sequence[NodeFacts]:
        """The machines, in order."""

    @property
    def window(self) -> Window:
        """What the placement policy was shown."""

    @property
    def moves(self) -> bool:
        """Whether devices may change between generators."""

    @property
    def sleeps(self) -> Sequence[str]:
        """Generator roles whose backend can sleep."""

    @property
    def asleep_in_training(self) -> Sequence[str]:
        """Roles of ``sleeps`` that sleep while the trainer works."""

    @property
    def asleep_in_rollout(self) -> Sequence[str]:
        """Trainers that sleep while generators sample."""

    @property
    def mode(self) -> Mode:
        """How generators share devices at first, as in ``Decision.mode``."""

    @property
    def reason(self) -> str:
        """Why workers are where they are, in the policy's words."""

    def host(self, node: str) -> str:
        """Returns what a person calls a node."""
