"""Lists the plugins that are installed, from their metadata alone.

It imports no plugin, and neither pluggy nor omegaconf. A plugin is an entry point of a distribution
in the group ``gcore``. Its state is one of

    ok            may be used
    undeclared    may be used, but its metadata has no readable requirement on gcore-core, so nobody promised that it fits
    incompatible  its requirement on gcore-core does not admit this version
    clash         another distribution provides a plugin of the same name
    disabled      ``G_CORE_PLUGINS=off`` leaves only ``core``
    broken        it failed when ``g-core plugins check`` imported it, in a process of its own; a scan cannot know
"""  # noqa: E501

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from gcore_core import __version__
from gcore_core.config.homes import GONE, NO_PLUGINS, home_of, uninstall_command
from gcore_core.contract.errors import (
    ConfigError,
    PluginClash,
    PluginIncompatible,
    PluginNotFound,
    did_you_mean,
)
from gcore_core.contract.installing import install_command, is_offered

GROUP = "gcore"
CORE = "core"
#: What a plugin's root must not import. The root is the module of its hooks: reading a job
#: imports the roots of all plugins that it names, also where no engine is installed.
HEAVY = (
    "deepspeed",
    "jax",
    "matplotlib",
    "megatron",
    "ray",
    "sglang",
    "tensorflow",
    "torch",
    "transformers",
    "vllm",
)
_EPISODES = (
    "remove it and the section sampling; choose an environment, whose episodes draw, look at the "
    "answer and draw again: docs/how-to/move-to-0.3.md"
)
#: Name of a plugin that this project had and deleted -> what to do in its place.
DELETED = {
    "refine": _EPISODES,
    "tree": _EPISODES,
    "museum": "run it in a checkout of the project: python -m tests.museum run",
}
_CORE_DISTRIBUTION = "gcore-core"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_EXTRAS = re.compile(r"(?<=gcore-core)\[[\w,-]+\]")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """Describes an installed plugin, as its distribution does.

    name: the name that a configuration uses.
    distribution: the distribution that it belongs to.
    version: version of the distribution; of a project's own file, a hash of its content.
    module: an importable name, or the path of a project's own file.
    state: one of the states in the docstring of this module.
    reason: why the state is not "ok"; empty when it is.
    requires: its requirement on gcore-core; empty when it states none.
    notes: remarks for the reader, such as a second copy that is ignored.
    """

    name: str
    distribution: str
    version: str
    module: str
    state: str = "ok"
    reason: str = ""
    requires: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_file(self) -> bool:
        """Says whether it is a project's own file."""
        return self.module.endswith(".py")

    @property
    def owner(self) -> str:
        """Returns the distribution and version as errors show them: ``gcore-vllm 1.3.0``."""
        return f"{self.distribution} {self.version}".rstrip()


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Holds a plugin whose state is not known yet, with the facts that its state follows from.

    plugin: the plugin, whose fields of state are still empty.
    requires: the distribution's requirements on gcore-core; None for the core itself.
    clashes: other distributions that provide a plugin of this name.
    """

    plugin: Installed
    requires: tuple[str, ...] | None
    clashes: tuple[str, ...] = ()


class Catalog:
    """Holds every plugin that a scan has seen.

    Names are known at once. A state is computed only when somebody asks for it, because versions
    are compared by `packaging`, which takes as long to import as a whole scan.
    """

    def __init__(self, rows: Sequence[_Found], core_version: str, *, disabled: bool) -> None:
        self._rows = sorted(rows, key=lambda row: (row.plugin.name, row.plugin.distribution))
        self._core_version = core_version
        self._disabled = disabled

    @cached_property
    def plugins(self) -> tuple[Installed, ...]:
        """Returns all plugins, sorted by name. A clash has one row for each distribution."""
        return tuple(self._with_state(row) for row in self._rows)

    def names(self) -> list[str]:
        return sorted({row.plugin.name for row in self._rows})

    def get(self, name: str, *, where: str, pin: str = "") -> Installed:
        """Returns the plugin, or raises when it may not be used.

        where: the config key that names the plugin.
        pin: a version specifier; empty for any version.
        """
        self.require({name: where})
        rows = [self._with_state(row) for row in self._rows if row.plugin.name == name]
        plugin = rows[0]
        if plugin.state == "disabled":
            raise PluginNotFound(
                f"plugin {name!r} is disabled: {plugin.reason}.",
                where=where,
                todo="unset G_CORE_PLUGINS to allow it",
            )
        old = [row.distribution for row in rows if row.distribution in GONE]
        if plugin.state == "clash":
            raise PluginClash(
                (
                    f"plugin {name!r} is provided by {len(rows)} distributions: "
                    f"{' and '.join(row.owner for row in rows)}."
                ),
                where=where,
                todo=uninstall_command(old)
                if old
                else "uninstall all but one; a name cannot be shared",
                distributions=[row.distribution for row in rows],
            )
        if old:
            in_its_place = DELETED.get(name) or install_command(home_of(name))
            raise PluginIncompatible(
                f"plugin {name!r} is of {plugin.owner}, which 0.3 no longer has.",
                where=where,
                todo=f"{uninstall_command(old)}\n{in_its_place}",
            )
        if plugin.state == "incompatible":
            raise PluginIncompatible(
                f"plugin {name!r} ({plugin.owner}) {plugin.reason}.",
                where=where,
                todo=f"take a version of it that admits this core, or {plugin.requires}",
            )
        _check_pin(plugin, where, pin)
        return plugin

    def require(self, wanted: Mapping[str, str]) -> None:
        """Raises PluginNotFound that names every wanted plugin that is not installed.

        wanted: name -> the config key that names it.
        """
        here = self.names()
        missing = [name for name in wanted if name not in here]
        for name in missing:
            if name in DELETED:
                raise PluginNotFound(
                    f"plugin {name!r} was deleted.", where=wanted[name], todo=DELETED[name]
                )
        if not missing:
            return
        names = ", ".join(map(repr, missing))
        one = f"no plugin named {names} is installed."
        several = f"no plugins named {names} are installed."
        near = "".join(did_you_mean(name, here) for name in missing)
        raise PluginNotFound(
            one if len(missing) == 1 else several,
            where=", ".join(wanted[name] for name in missing),
            why=f"installed: {', '.join(here)}{near}",
            todo="\n".join(self._ways_to_add(missing)),
            choices=here,
        )

    def _ways_to_add(self, names: Sequence[str]) -> Iterator[str]:
        """Yields how to install plugins, where the core was installed from has them.

        What is installed already would bring them no more the next time.
        """
        here = {row.plugin.distribution for row in self._rows}
        offered = []
        unknown = []
        for name in names:
            home = home_of(name)
            distribution = home.partition("[")[0]
            if distribution in here or name in NO_PLUGINS:
                unknown.append(f"{distribution} brings no plugin {name!r}")
            elif is_offered(distribution):
                offered.append(home)
            else:
                unknown.append(f"no distribution of G-Core brings {name!r}")
        if offered:
            yield f"to add {'it' if len(names) == 1 else 'them'}: {install_command(*offered)}"
        if unknown:
            yield f"{'; '.join(unknown)}; list: g-core plugins"

    def _with_state(self, row: _Found) -> Installed:
        """Returns the plugin with its state: disabled, else a clash, else what its versions say."""
        if row.requires is None:
            state = "ok"
            reason = ""
            requires = ""
        else:
            state, reason, requires = _compatibility(row.requires, self._core_version)
        if self._disabled and row.plugin.distribution != _CORE_DISTRIBUTION:
            state = "disabled"
            reason = "G_CORE_PLUGINS=off"
        elif row.clashes and not self._disabled:
            state = "clash"
            reason = f"also provided by {' and '.join(row.clashes)}"
        return replace(row.plugin, state=state, reason=reason, requires=requires)


def scan(path: Sequence[str] | None = None) -> Catalog:
    """Reads the metadata of all distributions in one pass.

    path: where to look, such as another interpreter's ``sys.path``; None for that of this one.
    """
    declared = _declared(path)
    core_version = __version__
    if path is None:
        # The running core is the core, installed or not.
        declared = [item for item in declared if item[0].distribution != _CORE_DISTRIBUTION]
        core = Installed(
            name=CORE,
            distribution=_CORE_DISTRIBUTION,
            version=__version__,
            module="gcore_core.builtin.hooks",
        )
        declared.append((core, None))
    else:
        core_version = next(
            (item.version for item, _ in declared if item.distribution == _CORE_DISTRIBUTION),
            __version__,
        )
    owners: dict[str, list[Installed]] = {}
    for plugin, _ in declared:
        owners.setdefault(plugin.name, []).append(plugin)
    rows = []
    for plugin, requires in declared:
        clashes = tuple(other.owner for other in owners[plugin.name] if other is not plugin)
        rows.append(_Found(plugin=plugin, requires=requires, clashes=clashes))
    disabled = os.environ.get("G_CORE_PLUGINS") == "off"
    return Catalog(rows, core_version, disabled=disabled)


def _declared(path: Sequence[str] | None) -> list[tuple[Installed, tuple[str, ...] | None]]:
    """Returns the declared plugins, in the order of the path.

    With each are the requirements of its distribution on the core's; None: it is the core's.

    A distribution that occurs twice counts once. Its plugins get a note on a second copy that lies
    in another place or has another version.
    """
    plugins_of: dict[str, tuple[list[Installed], Distribution, tuple[str, ...] | None]] = {}
    for distribution in _with_group(path):
        metadata = distribution.metadata  # parsed at each use
        name = _normal(metadata["Name"] or "(nameless)")
        version = metadata["Version"] or ""
        place = str(distribution.locate_file(""))
        if name in plugins_of:
            rows, first, _ = plugins_of[name]
            if (version, place) != (first.version, str(first.locate_file(""))):
                note = f"a second copy, {version} in {place}, is ignored"
                rows[:] = [replace(row, notes=(*row.notes, note)) for row in rows]
            continue
        entries = {
            entry.name: entry.value for entry in distribution.entry_points if entry.group == GROUP
        }
        plugins = [
            Installed(name=entry, distribution=name, version=version, module=value)
            for entry, value in entries.items()
        ]
        lines = metadata.get_all("Requires-Dist") or distribution.requires or ()
        requires = None if name == _CORE_DISTRIBUTION else _on_the_core(lines)
        plugins_of[name] = plugins, distribution, requires
    return [(plugin, requires) for rows, _, requires in plugins_of.values() for plugin in rows]


def _with_group(path: Sequence[str] | None) -> Iterator[Distribution]:
    """Yields the distributions that have an entry point in the group ``gcore``.

    The METADATA of all others, which is slow to parse, is never read.
    """
    all_of_them = distributions() if path is None else distributions(path=list(path))
    for distribution in all_of_them:
        if f"[{GROUP}]" in (distribution.read_text("entry_points.txt") or ""):
            yield distribution


def _on_the_core(requirements: Sequence[str]) -> tuple[str, ...]:
    """Returns the requirements that begin with gcore-core's name, in any spelling of it."""
    return tuple(
        line
        for line in requirements
        if (name := _NAME.match(line)) and _normal(name[0]) == _CORE_DISTRIBUTION
    )


def _compatibility(requirements: Sequence[str], core_version: str) -> tuple[str, str, str]:
    """Returns (state, reason, requirement) from a distribution's requirements on gcore-core."""
    # Extras ask for more than the core, and of no other version of it.
    if requirements and _EXTRAS.sub("", requirements[0], 1) in _known_to_admit(core_version):
        return "ok", "", requirements[0]
    from packaging.requirements import InvalidRequirement, Requirement

    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            return "undeclared", f"its requirement {line!r} cannot be read", ""
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        without_marker = line.partition(";")[0].strip()
        if not requirement.specifier.contains(core_version, prereleases=True):
            return (
                "incompatible",
                f"needs {without_marker}, but this is {core_version}",
                without_marker,
            )
        return "ok", "", without_marker
    return "undeclared", f"its metadata requires no {_CORE_DISTRIBUTION}", ""


def usual_requirement(core_version: str) -> str:
    """Returns the requirement that `g-core new` writes.

    It admits this minor version of the core, and no later one.
    """
    major, minor = core_version.split(".")[:2]
    return f"{_CORE_DISTRIBUTION}>={major}.{minor},<{major}.{int(minor) + 1}"


def _known_to_admit(core_version: str) -> tuple[str, ...]:
    """Returns requirements that are known to admit this core without a look into `packaging`.

    They are `usual_requirement` with its bounds in either order, since it admits the version that
    it is made of. Nearly every plugin has it, so that `packaging`, which takes 20 ms to import, is
    needed for the others only. A pre-release has none, since it comes before the lower bound.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", core_version):
        return ()
    usual = usual_requirement(core_version)
    least, below = usual.removeprefix(_CORE_DISTRIBUTION).split(",")
    return usual, f"{_CORE_DISTRIBUTION}{below},{least}"


def _check_pin(plugin: Installed, where: str, pin: str) -> None:
    """Raises when the plugin's version does not meet the pin; an empty pin or "*" always holds."""
    if not pin.strip() or pin.strip() == "*":
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        met = SpecifierSet(pin).contains(plugin.version, prereleases=True)
    except InvalidSpecifier as error:
        raise ConfigError(
            f"{pin!r} is not a version specifier such as '>=0.3,<0.4'.", where=where
        ) from error
    if not met:
        raise PluginIncompatible(
            f"the run asks for {plugin.name}{pin}, but {plugin.owner} is installed.",
            where=where,
            todo=f"install {plugin.distribution}{pin}, or change the pin",
        )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


#: States of plugins whose files may be used.
_USABLE = ("ok", "undeclared")


def package_folder(plugin: Installed, name: str) -> Path | None:
    """Returns the folder of a name in a plugin's package; None where it has none.

    Several plugins may share a distribution, each with a package of its own in that of the
    distribution: the plugin's own comes first. A folder of modules is none of files.
    """
    top, *inner = plugin.module.split(".")
    spec = find_spec(top)
    # A plugin that is a single module has no folders.
    roots = (spec.submodule_search_locations or ()) if spec else ()
    packages = [Path(root, *inner[:depth]) for root in roots for depth in range(len(inner), -1, -1)]
    places = [package / name for package in packages]
    return next((p for p in places if p.is_dir() and not (p / "__init__.py").exists()), None)


def package_folders(name: str) -> Iterator[tuple[str, Path]]:
    """Yields (plugin, folder) of every plugin that may be used and brings such a folder.

    Where several plugins share a folder, the first one has it.
    """
    seen = set()
    for plugin in scan().plugins:
        folder = package_folder(plugin, name) if plugin.state in _USABLE else None
        if folder is not None and folder not in seen:
            seen.add(folder)
            yield plugin.name, folder
