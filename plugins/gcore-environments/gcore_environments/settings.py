"""What may be set under ``environment.config``, and of the reward ``environments``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gcore_core.contract.errors import ConfigError

_CHOICES = {
    "drift": ("fork", "error"),
    "history": ("strict", "keep"),
    "sandbox": ("none", "confine", "docker"),
}


@dataclass(frozen=True, kw_only=True)
class PlayConfig:
    """How episodes are played, in whatever environment."""

    python: str = ""
    """Interpreter of the environment, such as a virtual environment's. It needs nothing of G-Core.
    Empty: the generator's own.
    """
    hosts: int = 1
    """Processes of each replica in which environments run."""
    turns: int = 8
    """Most turns of an episode. One that needs more ends as truncated."""
    turn_tokens: int = 0
    """Most tokens of one turn. 0: as many as an episode may have, ``max_new_tokens`` of the
    generator.
    """
    turn_s: float = 30.0
    """Most seconds of an environment for one observation. Beyond it the episode fails."""
    episode_s: float = 0.0
    """Most seconds of an episode once its process is ready. Beyond it the episode is truncated. 0:
    no limit.
    """
    start_s: float = 120.0
    """Most seconds until the imports of a process are over."""
    retries: int = 2
    """How often an episode is drawn again when its process is lost and nobody knows by whose fault.
    """
    drift: str = "fork"
    """What happens where a history does not continue what was said. fork: another sequence begins.
    error: an agent's request is refused, and an environment's episode fails.
    """
    history: str = "strict"
    """strict forks where a chat template writes old turns in another way once new ones follow. keep
    goes on behind what the policy said, word for word.
    """
    parser: str = "auto"
    """How tool calls are read from what the policy says. auto: by the chat template."""
    sandbox: str = "none"
    """What its processes are confined by: none, confine or docker."""
    readable: list[str] = field(default_factory=list)
    """Absolute paths that a confined environment may read, next to its own modules and its
    interpreter.
    """
    variables: list[str] = field(default_factory=list)
    """Names of the generator's environment variables that its processes see, next to the few that
    all see, such as PATH.
    """

    def made(self) -> tuple[str, Mapping[str, Any]]:
        """Returns the environment's class, and what it is made with."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        for key in ("hosts", "turns"):
            if getattr(self, key) < 1:
                raise ConfigError(f"must be at least 1, is {getattr(self, key)}", where=key)
        for key in ("turn_tokens", "episode_s", "retries"):
            if getattr(self, key) < 0:
                raise ConfigError(f"must not be negative, is {getattr(self, key)}", where=key)
        for key in ("turn_s", "start_s"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"must be above 0, is {getattr(self, key)}", where=key)
        _require_absolute(self.readable)
        for key, choices in _CHOICES.items():
            if getattr(self, key) not in choices:
                raise ConfigError(
                    f"must be one of {', '.join(choices)}, is {getattr(self, key)!r}", where=key
                )


def _require_absolute(paths: list[str]) -> None:
    for path in paths:
        if not path.startswith("/") or ".." in path.split("/") or path == "/":
            raise ConfigError(f"must be absolute and not the root, is {path!r}", where="readable")


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(PlayConfig):
    """An ``Environment`` or a ``Program`` of an author, and how long it may take."""

    environment: str
    """The class: ``file.py:Class``, relative to the job file, or ``package.module:Class``."""
    config: dict[str, Any] = field(default_factory=dict)
    """What the class is made with, as keywords."""

    def __post_init__(self) -> None:
        place, _, name = self.environment.rpartition(":")
        is_module = all(part.isidentifier() for part in place.split("."))
        if not (place.endswith(".py") or is_module) or not name.isidentifier():
            raise ConfigError(
                f"must be file.py:Class or package.module:Class, is {self.environment!r}",
                where="environment",
            )
        super().__post_init__()

    def made(self) -> tuple[str, Mapping[str, Any]]:
        return self.environment, self.config


@dataclass(frozen=True, kw_only=True)
class EnvironmentRewardConfig:
    """What the environment gave, summed over the turns of an episode."""

    name: str = ""
    """The environment's name of the reward. Empty: the sum of all."""
    keep: bool = False
    """Whether each episode is written into the run's folder ``episodes``, to be scored again by
    other rewards; one of an evaluation into ``episodes/evaluation``. One that is drawn again is
    there again.
    """
