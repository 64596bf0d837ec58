"""What goes into a venv: a plugin's tested pins, and G-Core's own distributions as they are
installed here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gcore_core import __version__
from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.contract.providers import VenvProvider
from gcore_core.kits.commands import Plugins, catalog, find_devices

_CORE = "gcore-core"
_FORMAT = 1  # counts changes of how a venv is made, which make those that there are stale


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked for. flavour: empty for what this machine calls for. extra: plugins or
    distributions besides.
    """

    plugin: str
    flavour: str = ""
    python: str = sys.executable
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of G-Core's own distributions. words: what pip is given to install it as it is installed
    here.
    """

    distribution: str
    version: str
    words: tuple[str, ...]
    requires: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A wish with everything looked up. ``requirements`` is a file for pip."""

    wish: Wish
    spec: VenvProvider
    requirements: Path | None
    sources: tuple[Source, ...]

    def digest(self) -> str:
        """Changes with anything that would make another venv. Code of an editable install
        makes none.
        """
        spec = self.spec
        told = [
            _FORMAT,
            [self.wish.plugin, os.path.realpath(self.wish.python)],
            [spec.name, spec.engine, spec.no_deps, spec.extras, spec.remove],
            self.requirements.read_text(encoding="utf-8") if self.requirements else "",
            [
                [source.distribution, source.version, source.words, source.requires]
                for source in self.sources
            ],
        ]
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()

    def pip_steps(self) -> Iterator[tuple[str, list[str]]]:
        """(what to call it, words after ``pip``), in order."""
        own = [word for source in self.sources for word in source.words]
        pins = ["-r", str(self.requirements)] if self.requirements else []
        told = ["-r", self.requirements.name] if self.requirements else []
        if pins and self.spec.no_deps:
            yield f"pip install --no-deps {' '.join(told)}", ["install", "--no-deps", *pins]
            pins, told = [], []
        told += [source.distribution for source in self.sources]
        yield f"pip install {' '.join(told)}", ["install", *pins, *own]
        if self.spec.remove:
            yield (
                f"pip uninstall {' '.join(self.spec.remove)}",
                ["uninstall", "-y", *self.spec.remove],
            )


def interpreter(python: str | None) -> str:
    """The program that ``--python`` names, looked up as a shell would."""
    if python is None:
        return sys.executable
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise ConfigError(f"there is no interpreter {python}.", where="--python", python=python)
    return os.path.abspath(found)


def recipe(wish: Wish, *, where: str) -> Recipe:
    """Looks everything up; imports the plugin's root. Raises ConfigError, PluginError."""
    installed, plugins = catalog.scan().get(wish.plugin, where=where), Plugins()
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
    beside = [name for name in spec.beside if _installed(name)]
    names = [installed.distribution, *beside, *(_distribution(name) for name in wish.extra)]
    extras = {installed.distribution: spec.extras}
    return Recipe(
        wish=wish,
        spec=spec,
        requirements=spec.requirements_file(f"plugin {installed.name!r} ({installed.owner})"),
        sources=tuple(_source(name, extras.get(name, ())) for name in _with_ours(names)),
    )


def _flavour(offered: Sequence[str]) -> str:
    """The only one, or that of this machine."""
    return offered[0] if len(offered) == 1 else find_devices("auto")[0].kind


def _distribution(name: str) -> str:
    """The distribution that ``--with`` names: a plugin, or itself."""
    owners = {plugin.name: plugin.distribution for plugin in catalog.scan().plugins}
    if name in owners:
        return owners[name]
    if _installed(name) is None:
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
    """The core, these, and what of G-Core's they require: installed as they are here, not from an
    index.
    """
    found, queue = [_CORE], [str(canonicalize_name(name)) for name in names]
    while queue:
        name = queue.pop(0)
        if name not in found and (installed := _installed(name)):
            found.append(name)
            queue += [
                required for required in _requires(installed) if required.startswith("gcore-")
            ]
    return found


def _requires(installed: Distribution) -> Iterator[str]:
    """Names of what it requires without its extras."""
    for line in installed.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield str(canonicalize_name(requirement.name))


def _installed(name: str) -> Distribution | None:
    """The distribution that is installed here; of several copies that which says where it came
    from.
    """
    copies = list(distributions(name=name))
    return next(
        (item for item in copies if item.read_text("direct_url.json")),
        copies[0] if copies else None,
    )


def _source(name: str, extras: Sequence[str]) -> Source:
    found = _installed(name)
    asked = name + (f"[{','.join(extras)}]" if extras else "")
    version = found.version if found else __version__  # the core may run without being installed
    words: tuple[str, ...] = (f"{asked}=={version}",)
    if found and (text := found.read_text("direct_url.json")):
        words = _from_url(asked, json.loads(text), extras)
    requires = tuple((found.requires if found else None) or ())
    return Source(distribution=name, version=version, words=words, requires=requires)


def _from_url(asked: str, direct: dict[str, Any], extras: Sequence[str]) -> tuple[str, ...]:
    """Words for pip, of what it wrote about an install from a directory, an archive or a repository
    (PEP 610).
    """
    url = str(direct["url"])
    if direct.get("dir_info", {}).get("editable"):
        folder = url2pathname(urlsplit(url).path)
        return "-e", folder + (f"[{','.join(extras)}]" if extras else "")
    if vcs := direct.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    if direct.get("subdirectory"):
        url += f"#subdirectory={direct['subdirectory']}"
    return (f"{asked} @ {url}",)
