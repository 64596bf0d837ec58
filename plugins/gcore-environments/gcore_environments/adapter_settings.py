"""What may be set of environments of other packages, besides what holds for every environment.

Each names a class of ``gcore_environments.adapters`` and what it is made with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gcore_core.contract.errors import ConfigError
from gcore_environments.settings import PlayConfig

_ADAPTERS = "gcore_environments.adapters"


@dataclass(frozen=True, kw_only=True)
class GymnasiumConfig(PlayConfig):
    """An environment of Gymnasium whose actions are numbered, told as text. ``python`` has the
    distribution gymnasium.
    """

    id: str
    """As ``gymnasium.make`` takes it; "minigrid:MiniGrid-Empty-5x5-v0" imports minigrid first."""
    template: str
    """What the policy is told. {state} is the observation, {actions} and {last} name the actions,
    {text} is what the environment draws in text.
    """
    options: dict[str, Any] = field(default_factory=dict)
    """What the environment is made with."""
    actions: list[str] = field(default_factory=list)
    """Names of the actions, from the first on. Empty: their numbers."""
    unread: float = 0.0
    """What an answer costs that names no action."""

    def made(self) -> tuple[str, Mapping[str, Any]]:
        return f"{_ADAPTERS}.gymnasium:Gymnasium", {
            "id": self.id,
            "template": self.template,
            "options": self.options,
            "actions": list(self.actions),
            "unread": self.unread,
        }


@dataclass(frozen=True, kw_only=True)
class TextArenaConfig(PlayConfig):
    """A game of TextArena. ``python`` has the distribution textarena."""

    game: str
    """Its id, such as TicTacToe-v0."""
    players: int = 1
    """How many the game is begun with. The policy plays those for whom no role speaks."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the game is made with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.players < 1:
            raise ConfigError(f"must be at least 1, is {self.players}", where="players")

    def made(self) -> tuple[str, Mapping[str, Any]]:
        return f"{_ADAPTERS}.textarena:TextArena", {
            "game": self.game,
            "players": self.players,
            "options": self.options,
        }


@dataclass(frozen=True, kw_only=True)
class QuestionsConfig:
    """Questions of reasoning-gym. ``python`` has the distribution reasoning-gym."""

    task: str
    """The task's name there, such as chain_sum; a row's field ``task`` goes before it."""
    size: int = 4096
    """How many questions there are; a row's field ``number`` says which is asked."""
    questions_seed: int = 0
    """Seed of the questions."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the task is made with, such as how hard it is."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"must be at least 1, is {self.size}", where="size")

    def words(self) -> dict[str, Any]:
        """Returns what the adapter's classes are made with."""
        names = ("task", "size", "questions_seed", "options")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig(QuestionsConfig, PlayConfig):
    """A task of reasoning-gym. ``python`` has the distribution reasoning-gym."""

    levels: list[dict[str, Any]] = field(default_factory=list)
    """What the task is made with on each level, besides ``options``: an answer that is worth 1 is
    followed by a question of the next level. Empty: one question an episode.
    """
    begin: str = ""
    """What stands before the answer in a reply. Empty: the whole reply is the answer."""
    end: str = ""
    """What stands behind it."""

    def __post_init__(self) -> None:
        QuestionsConfig.__post_init__(self)
        PlayConfig.__post_init__(self)
        if len(self.levels) > self.turns:
            raise ConfigError(
                f"an episode has at most {self.turns} turns, and there are {len(self.levels)} "
                "levels",
                where="levels",
                todo=f"set turns to {len(self.levels)} or more, or leave levels out",
            )

    def made(self) -> tuple[str, Mapping[str, Any]]:
        further = {"levels": self.levels, "begin": self.begin, "end": self.end}
        return f"{_ADAPTERS}.reasoning:Reasoning", {**self.words(), **further}


@dataclass(frozen=True, kw_only=True)
class AskedConfig(QuestionsConfig):
    """Questions that are read or scored without an environment."""

    python: str = ""
    """Interpreter that has the distribution reasoning-gym. Empty: that of the process."""


@dataclass(frozen=True, kw_only=True)
class ReasoningRowsConfig(AskedConfig):
    """Which questions a data set has."""

    first: int = 0
    """Number of the first. Take other numbers to evaluate on than to train on."""
    rows: int = 0
    """How many. 0: all from ``first`` on."""
    chat: bool = True
    """Whether a question is a message of a chat; false: plain text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.first < self.size:
            raise ConfigError(f"must be from 0 to {self.size - 1}, is {self.first}", where="first")
        if not 0 <= self.rows <= self.size - self.first:
            raise ConfigError(
                f"must be from 0 to {self.size - self.first}, since there are {self.size} "
                f"questions, is {self.rows}",
                where="rows",
            )


@dataclass(frozen=True, kw_only=True)
class ReasoningRewardConfig(AskedConfig):
    """Whose ``score_answer`` scores. Task, size, seed and options are those of the data set."""

    begin: str = ""
    """What stands before the answer in a record's text. Empty: all of it is the answer."""
    end: str = ""
    """What stands behind it."""


@dataclass(frozen=True, kw_only=True)
class AviaryConfig(PlayConfig):
    """An environment of aviary. ``python`` has the distribution fhaviary."""

    cls: str
    """file.py:Class, relative to the job file; package.module:Class; or a name that aviary
    knows.
    """
    options: dict[str, Any] = field(default_factory=dict)
    """What it is made with. Without any, a row's field ``task`` goes to its ``from_task``."""

    def made(self) -> tuple[str, Mapping[str, Any]]:
        return f"{_ADAPTERS}.aviary:Aviary", {"cls": self.cls, "options": self.options}


@dataclass(frozen=True, kw_only=True)
class McpConfig(PlayConfig):
    """Tools of MCP servers over stdio. ``python`` has the distribution mcp."""

    command: list[str] = field(default_factory=list)
    """What starts a server, such as [python, server.py]."""
    commands: list[list[str]] = field(default_factory=list)
    """What starts each of several servers, in place of ``command``."""
    path: str = ""
    """Folder in which servers are started, relative to the job file."""
    env: dict[str, str] = field(default_factory=dict)
    """Further variables of the servers."""
    tool_s: float = 10.0
    """Seconds that a call may take. A server begins within ``turn_s``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.command) == bool(self.commands) or not all(self.commands):
            raise ConfigError(
                "either command or commands says how MCP servers are started",
                where="command",
                todo="write command: [python, server.py], or a list of such lists as commands",
            )
        if not self.tool_s > 0:
            raise ConfigError(f"must be above 0, is {self.tool_s}", where="tool_s")

    def made(self) -> tuple[str, Mapping[str, Any]]:
        commands = self.commands or [self.command]
        return f"{_ADAPTERS}.mcp:Mcp", {
            "commands": [list(command) for command in commands],
            "path": self.path,
            "env": self.env,
            "tool_s": self.tool_s,
        }


@dataclass(frozen=True, kw_only=True)
class OpenEnvConfig(PlayConfig):
    """An environment of OpenEnv. ``python`` has the distribution openenv."""

    cls: str = ""
    """The environment: file.py:Class, relative to the job file, or package.module:Class."""
    action: str = ""
    """The class of its actions, written so; with ``cls`` alone."""
    base_url: str = ""
    """Of a server that has the environment, in place of ``cls``."""
    field: str = ""
    """The action's field that is the text of a reply. Empty: a reply is the action as JSON."""
    told: str = ""
    """The observation's field that the policy is told. Empty: the whole observation as JSON."""
    options: dict[str, Any] | None = None
    """What the environment is made with; with ``cls`` alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.cls) == bool(self.base_url):
            raise ConfigError(
                "either cls or base_url says where the environment is",
                where="cls",
                todo="write cls and action, or base_url: http://127.0.0.1:8000",
            )
        if bool(self.cls) != bool(self.action):
            raise ConfigError(
                f"cls is {self.cls!r} and action is {self.action!r}",
                where="action",
                why="an environment in the host needs the class of its actions, a server does not",
                todo="write both as file.py:Class or package.module:Class, or leave action out",
            )

    def made(self) -> tuple[str, Mapping[str, Any]]:
        names = ("cls", "base_url", "action", "field", "told")
        words = {name: getattr(self, name) for name in names}
        return f"{_ADAPTERS}.openenv:OpenEnv", words | {"options": dict(self.options or {})}
