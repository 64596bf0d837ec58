"""Checks the role's ``engine:`` mapping, and refuses names that the engine lacks or that are set
elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gcore_core.contract.errors import ConfigError, did_you_mean

#: Most names that a refusal lists.
_LISTED = 20


@dataclass(frozen=True, kw_only=True)
class EngineArguments:
    """What a plugin says of its engine's arguments; one in a section is named ``section.argument``.

    settings: argument -> where this plugin takes it from instead, a key of the role or of ``run``.
    fixed: argument -> why it cannot be chosen.
    unknown: how the refusal of an unknown name begins.
    listed: where a person finds the names; used when there are too many to list.
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
                few = len(known) < _LISTED
                raise ConfigError(
                    f"{self.unknown} {name!r}{did_you_mean(name, sorted(known))}.",
                    where=f"roles.{role}.engine.{section}{name}",
                    todo=f"These can be set: {', '.join(sorted(known))}." if few else self.listed,
                    argument=name,
                )
