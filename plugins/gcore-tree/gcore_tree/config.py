"""What can be set under ``sampling.config``."""

from __future__ import annotations

from dataclasses import dataclass

from gcore_core.contract.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """Settings of tree search.

    A group has first + (steps - 1) * beams * width records; set advantage.config.group_size to
    that.
    """

    steps: int = 3
    """Steps in which an answer grows, at least 2. The last one has no end of its own: there, an
    answer is drawn to its end.
    """
    beams: int = 2
    """Beginnings that are kept after each step, at least 1: those of the highest reward."""
    width: int = 2
    """Continuations that are drawn of each beginning, at least 2: they are compared with each
    other.
    """
    first: int = 0
    """Beginnings that the first step draws, at least 2; 0: beams * width. Where the first actions
    decide most, more of them cost little.
    """
    actions: int = 0
    """Most actions of a step; 0: only `end` ends it."""
    end: str = "\n"
    """A text behind which a step ends, by default a line break; "": only `actions` ends it."""
    reward: str = ""
    """The reward by which beginnings are kept, a name out of `rewards`; "": their weighted sum. A
    beginning that the reward skipped is kept last.
    """

    def __post_init__(self) -> None:
        self._at_least("steps", 2, "with one step nothing is continued", "2 or more")
        self._at_least("beams", 1, "a tree without a beginning has no leaves", "1 or more")
        alone = "continuations are compared with each other, so one alone teaches nothing"
        self._at_least("width", 2, alone, "2 or more")
        if self.first:
            alone = "beginnings are compared with each other, so one alone teaches nothing"
            self._at_least("first", 2, alone, "2 or more, or to 0 for beams * width")
        self._at_least("actions", 0, "nothing can be shorter than nothing", "0 or more")
        if not self.actions and not self.end:
            raise ConfigError(
                "nothing ends a step",
                where="sampling.config",
                why="actions is 0 and end is empty, so the first step would be the whole answer",
                todo='set actions to a number, or end to a text such as "\\n"',
            )

    def reads_rewards(self) -> frozenset[str]:
        """Returns the reward by which beginnings are kept, where it has a name."""
        return frozenset({self.reward} - {""})

    def _at_least(self, name: str, least: int, why: str, todo: str) -> None:
        """Raises ConfigError where a number is less than ``least``."""
        value = getattr(self, name)
        if value < least:
            raise ConfigError(
                f"{value} is less than {least}",
                where=f"sampling.config.{name}",
                why=why,
                todo=f"set {name} to {todo}",
            )
