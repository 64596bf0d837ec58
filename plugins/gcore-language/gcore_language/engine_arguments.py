"""Checks the role's ``engine:`` mapping, and refuses names that the engine lacks or that are set
elsewhere. It imports neither torch nor an engine, so that ``g-core check`` can ask it too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gcore_core.contract.errors import ConfigError, did_you_mean

#: Most names that a refusal lists.
_LISTED = 20


@dataclass(frozen=True, kw_only=True)
class EngineArguments:
    """What a plugin says of its engine's arguments; one in a section is named ``section.argument``.

    settings: argument -> where this plugin takes it from instead, a key of the role or of ``run``.
    fixed: argument -> why it cannot be chosen.
    unknown: how the refusal of an unknown name begins.
    listed: where a person finds the names; used when there are too many to list, or none.
    """

    settings: Mapping[str, str]
    fixed: Mapping[str, str]
    unknown: str
    listed: str

    def check_set_here(self, names: Iterable[str], role: str, section: str = "") -> None:
        """Raises ConfigError for a name that is set elsewhere or fixed.

        role: the role whose mapping it is.
        section: prefix of the names, with its dot; "" for names without a section.
        """
        for name in names:
            where = f"roles.{role}.engine.{section}{name}"
            if (place := self.settings.get(section + name)) is not None:
                key = place if place.startswith("run.") else f"roles.{role}.{place}"
                raise ConfigError(
                    "this argument is set by another key.",
                    where=where,
                    todo=f"Set {key}.",
                    argument=name,
                )
            if (why := self.fixed.get(section + name)) is not None:
                raise ConfigError("this argument is fixed.", where=where, why=why, argument=name)

    def check_known(
        self, names: Iterable[str], known: Collection[str], role: str, section: str = ""
    ) -> None:
        """Raises ConfigError for a name that is not among ``known``, the engine's own.

        role, section: see ``check_set_here``.
        """
        for name in names:
            if name not in known:
                few = 0 < len(known) < _LISTED
                near = did_you_mean(name, sorted({*known, *self._elsewhere(section)}))
                raise ConfigError(
                    f"{self.unknown} {name!r}{near}.",
                    where=f"roles.{role}.engine.{section}{name}",
                    todo=f"These can be set: {', '.join(sorted(known))}." if few else self.listed,
                    argument=name,
                )

    def _elsewhere(self, section: str) -> list[str]:
        """Returns the arguments of a section that have another key, without the section."""
        names = [name for name in self.settings if name.startswith(section)]
        return [name for name in (n.removeprefix(section) for n in names) if "." not in name]

    def refusals(
        self, names: Iterable[str], known: Collection[str], role: str, section: str = ""
    ) -> Iterator[ConfigError]:
        """Yields the error of every name that ``check_set_here`` or ``check_known`` refuses."""
        for name in names:
            try:
                self.check_set_here([name], role, section)
                self.check_known([name], known, role, section)
            except ConfigError as error:
                yield error

    def refusals_here(self, names: Iterable[str], role: str) -> Iterator[ConfigError]:
        """Yields the error of every name that ``check_set_here`` refuses; no engine is asked."""
        for name in names:
            try:
                self.check_set_here([name], role)
            except ConfigError as error:
                yield error


def sentence(error: ConfigError) -> str:
    """Returns an error as one sentence, as ``gcore_check`` yields them: path, what, why, to do."""
    parts = (error.what, error.why, error.todo and error.todo[0].lower() + error.todo[1:])
    said = "; ".join(part.rstrip(".") for part in parts if part)
    return f"{error.where}: {said}."


def with_own(engine: Mapping[str, Any], own: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Returns ``engine:`` with the arguments that a provider needs.

    own: argument -> the value that it needs.

    Raises ConfigError where ``engine:`` has another value.
    """
    for name, value in own.items():
        if engine.get(name, value) != value:
            raise ConfigError(
                f"this provider needs {value!r} here.",
                where=f"roles.{role}.engine.{name}",
                todo="Leave it out, or take another provider.",
                argument=name,
            )
    return {**engine, **own}


def without_engine(role: str, node: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with ``engine:`` of a role whose backend has no engine.

    node: the role of the resolved configuration.
    """
    if node.get("engine"):
        yield (
            f"roles.{role}.engine: {node['use']} has no engine, so {', '.join(node['engine'])} "
            "would go nowhere; its settings stand under config."
        )
