"""Writes the distribution of a new plugin from templates, with a contract test and lines
marked FILL IN.

A template is a folder of files whose names end in ``.tmpl``, rendered by ``string.Template``;
``module/`` becomes the package. ``templates/shared`` belongs to every kind. A plugin brings
templates for its own kinds in a folder ``templates/<kind>/`` of its package; they are asked for as
``--kind <plugin>/<kind>``, and the plugin is not imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from gcore_core import __version__
from gcore_core.config import catalog
from gcore_core.config.catalog import package_folder
from gcore_core.contract.errors import ConfigError, PluginClash, did_you_mean

_TEMPLATES = Path(__file__).parent / "templates"
_SHARED = "shared"
_SUFFIX = ".tmpl"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
MARK = "FILL IN"


@dataclass(frozen=True)
class Written:
    """Describes a distribution that was written.

    next_steps: text to print: the lines to fill in and the commands that follow.
    """

    directory: Path
    files: tuple[Path, ...]
    next_steps: str


def kinds() -> list[str]:
    """Returns the kinds that there is a template for here."""
    return sorted(
        folder.name for folder in _TEMPLATES.iterdir() if folder.is_dir() and folder.name != _SHARED
    )


def write(name: str, kind: str, to: Path | None = None) -> Written:
    """Writes the distribution gcore-<name>; nothing that exists is overwritten.

    Raises ConfigError for a name, kind or directory that cannot be used, PluginClash for a name
    that an installed plugin has.

    to: its directory; by default ``gcore-<name>`` in the current one.
    """
    where = "g-core new"
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"a plugin's name is lower case words joined by dashes, not {name!r}.", where=where
        )
    template = _template(kind, where)
    namesakes = [row for row in catalog.scan().plugins if row.name == name]
    if namesakes:
        raise PluginClash(
            f"a plugin named {name!r} is installed ({namesakes[0].owner}).",
            where=where,
            todo="a name cannot be shared",
        )
    directory = to or Path(f"gcore-{name}")
    values = _values(name, kind)
    # A kind's own file wins over the shared one of the same path.
    rendered = [*_rendered(_TEMPLATES / _SHARED, values), *_rendered(template, values)]
    files = {directory / path: text for path, text in rendered}
    present = sorted(str(path) for path in files if path.exists())
    if present:
        raise ConfigError(
            f"{present[0]} exists; nothing was written.",
            where=where,
            todo="name another directory: --to DIR",
        )
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be written: {error.strerror}.",
            where=where,
            todo="name another directory: --to DIR",
        ) from error
    return Written(directory, tuple(files), _next_steps(name, directory, files))


def _next_steps(name: str, directory: Path, files: dict[Path, str]) -> str:
    marked_lines = []
    for path, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            if f"# {MARK}:" in line:
                marked_lines.append(f"  {path}:{number}: {line.strip().removeprefix('# ')}")
    marked = "\n".join(marked_lines)
    return (
        f"{directory}: {len(files)} files\n\n"
        f"lines to fill in:\n{marked}\n\n"
        "next:\n"
        f"  cd {directory}\n"
        "  pip install -e '.[test]'\n"
        "  pytest                    fails until the lines are filled in\n"
        f"  g-core plugins check {name}"
    )


def _template(kind: str, where: str) -> Path:
    """Returns the folder of a kind's template: our own, or for ``plugin/kind`` the plugin's."""
    plugin, slash, kind_name = kind.rpartition("/")
    templates = _folder_of(plugin, where) if slash else _TEMPLATES
    folder = templates / kind_name
    if folder.is_dir() and kind_name and kind_name != _SHARED:
        return folder
    if not slash:
        choices = kinds()
    elif templates.is_dir():
        choices = sorted(f"{plugin}/{path.name}" for path in templates.iterdir() if path.is_dir())
    else:
        choices = []
    if kind:
        problem = f"there is no template for {kind!r}{did_you_mean(kind, choices)}."
    else:
        problem = "the kind of the plugin is missing; add --kind KIND."
    raise ConfigError(
        problem, where=where, todo=f"kinds: {', '.join(choices) or 'none'}", choices=choices
    )


def _folder_of(plugin: str, where: str) -> Path:
    """Returns ``templates`` of a plugin's package, found without importing it."""
    folder = package_folder(catalog.scan().get(plugin, where=where), "templates")
    return folder or Path("/nowhere")


def _values(name: str, kind: str) -> dict[str, str]:
    return {
        "plugin": name,
        "kind": kind.rpartition("/")[2],
        "distribution": f"gcore-{name}",
        "module": f"gcore_{name.replace('-', '_')}",
        "Class": "".join(word.capitalize() for word in name.split("-")),
        "core": catalog.usual_requirement(__version__),
    }


def _rendered(template: Path, values: dict[str, str]) -> list[tuple[str, str]]:
    """Returns (path in the distribution, text) of every file of a template."""
    files = []
    for file in sorted(template.rglob(f"*{_SUFFIX}")):
        path = file.relative_to(template).as_posix().removesuffix(_SUFFIX)
        if path.startswith("module/"):
            path = values["module"] + path.removeprefix("module")
        text = Template(file.read_text(encoding="utf-8")).substitute(values)
        files.append((path, text))
    return files
