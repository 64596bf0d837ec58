"""Finds out what goes into a venv: a plugin's tested pins, and G-Core's own distributions.

G-Core's own distributions are installed there in the way in which they are installed here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gcore_core import __version__
from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.contract.installing import find_installed, install_words
from gcore_core.contract.providers import VenvProvider
from gcore_core.kits.commands import Plugins, catalog, find_devices

_CORE = "gcore-core"
_FORMAT = 1  # counts changes of how a venv is made, which make those that there are stale


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the user asks for.

    plugin: the plugin that the venv is for.
    flavour: one of the plugin's venvs; empty: the one that fits this machine.
    python: path of the interpreter that makes the venv.
    extra: plugins or distributions to install besides.
    """

    plugin: str
    flavour: str = ""
    python: str = sys.executable
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of G-Core's own distributions.

    distribution: its name.
    version: its version here.
    words: arguments by which pip installs it as it is installed here.
    requires: the requirements in its metadata.
    """

    distribution: str
    version: str
    words: tuple[str, ...]
    requires: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A wish with everything looked up.

    wish: what the user asks for.
    spec: the plugin's description of the venv.
    requirements: pip's file with the plugin's tested pins; None where it has none.
    sources: G-Core's own distributions to install.
    """

    wish: Wish
    spec: VenvProvider
    requirements: Path | None
    sources: tuple[Source, ...]

    def digest(self) -> str:
        """Returns a hash that changes with anything that would make another venv.

        Code of an editable install does not change it.
        """
        spec = self.spec
        inputs = [
            _FORMAT,
            [self.wish.plugin, os.path.realpath(self.wish.python)],
            [spec.name, spec.engine, spec.no_deps, spec.extras, spec.remove],
            self.requirements.read_text(encoding="utf-8") if self.requirements else "",
            [
                [source.distribution, source.version, source.words, source.requires]
                for source in self.sources
            ],
        ]
        return hashlib.blake2b(json.dumps(inputs).encode(), digest_size=16).hexdigest()

    def pip_steps(self) -> Iterator[tuple[str, list[str]]]:
        """Yields pip's steps in order, each as its name for the user and pip's arguments."""
        source_arguments = [word for source in self.sources for word in source.words]
        pins = ["-r", str(self.requirements)] if self.requirements else []
        shown_arguments = ["-r", self.requirements.name] if self.requirements else []
        if pins and self.spec.no_deps:
            yield (
                f"pip install --no-deps {' '.join(shown_arguments)}",
                ["install", "--no-deps", *pins],
            )
            pins = []
            shown_arguments = []
        shown_arguments += [source.distribution for source in self.sources]
        yield f"pip install {' '.join(shown_arguments)}", ["install", *pins, *source_arguments]
        if self.spec.remove:
            yield (
                f"pip uninstall {' '.join(self.spec.remove)}",
                ["uninstall", "-y", *self.spec.remove],
            )


def interpreter(python: str | None) -> str:
    """Returns the path of the program that ``--python`` names, looked up as a shell does.

    Raises ConfigError where there is none.
    """
    if python is None:
        return sys.executable
    path = shutil.which(os.path.expanduser(python))
    if path is None:
        raise ConfigError(f"there is no interpreter {python}.", where="--python", python=python)
    return os.path.abspath(path)


def recipe(wish: Wish, *, where: str) -> Recipe:
    """Looks up everything that a wish needs; imports the plugin's root.

    Raises ConfigError where the plugin has no such venv, PluginError where it cannot be loaded.
    """
    installed = catalog.scan().get(wish.plugin, where=where)
    plugins = Plugins()
    plugins.load(installed, where=where)
    offered = {item.spec.name: item.spec for item in plugins.providers("venv", wish.plugin)}
    flavour = wish.flavour or _flavour(list(offered))
    spec = offered.get(flavour)
    if not offered:
        raise ConfigError(
            f"plugin {wish.plugin!r} does not say what a venv for it needs.",
            where=where,
            todo="make one with venv and pip: docs/how-to/venvs.md",
        )
    if not isinstance(spec, VenvProvider):
        raise ConfigError(
            (
                f"plugin {wish.plugin!r} has no venv "
                f"{flavour!r}{did_you_mean(flavour, list(offered))}."
            ),
            where=where,
            todo=f"choices: {', '.join(offered)}",
            choices=list(offered),
        )
    companions = [name for name in spec.beside if find_installed(name)]
    names = [installed.distribution, *companions, *(_distribution(name) for name in wish.extra)]
    extras = {installed.distribution: spec.extras}
    return Recipe(
        wish=wish,
        spec=spec,
        requirements=spec.requirements_file(f"plugin {installed.name!r} ({installed.owner})"),
        sources=tuple(_source(name, extras.get(name, ())) for name in _with_ours(names)),
    )


def _flavour(offered: Sequence[str]) -> str:
    """Returns the only flavour, or where there are several that of this machine's devices."""
    return offered[0] if len(offered) == 1 else find_devices("auto")[0].kind


def _distribution(name: str) -> str:
    """Returns the distribution that ``--with`` names by itself or by its plugin.

    Raises ConfigError where neither is installed here.
    """
    owners = {plugin.name: plugin.distribution for plugin in catalog.scan().plugins}
    if name in owners:
        return owners[name]
    if find_installed(name) is None:
        raise ConfigError(
            (
                f"neither a plugin nor a distribution named {name!r} is installed "
                f"here{did_you_mean(name, list(owners))}."
            ),
            where="--with",
            choices=list(owners),
        )
    return name


def _with_ours(names: Sequence[str]) -> list[str]:
    """Returns the core, these distributions, and those of G-Core's that they require.

    They are installed as they are here, not from an index.
    """
    names_of_ours = [_CORE]
    queue = [str(canonicalize_name(name)) for name in names]
    while queue:
        name = queue.pop(0)
        if name not in names_of_ours and (here := find_installed(name)):
            names_of_ours.append(name)
            queue += [required for required in _requires(here) if required.startswith("gcore-")]
    return names_of_ours


def _requires(here: Distribution) -> Iterator[str]:
    """Yields the names of what a distribution requires without its extras."""
    for line in here.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield str(canonicalize_name(requirement.name))


def _source(name: str, extras: Sequence[str]) -> Source:
    """Returns what pip needs to install a distribution as it is installed here."""
    here = find_installed(name)
    # The core may run without being installed.
    version = here.version if here else __version__
    return Source(
        distribution=name,
        version=version,
        words=install_words(name, extras, f"=={version}"),
        requires=tuple((here.requires if here else None) or ()),
    )
