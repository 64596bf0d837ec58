"""Says how a distribution is installed, in errors that ask for one.

None of this project is published. What is installed here is installed elsewhere in the same way;
what is not comes from where the core came from: a checkout, or a folder of wheels.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_CORE = "gcore-core"
_OURS = "gcore-"
_REQUIREMENT = re.compile(r"(?P<name>[^\[=<>!~; ]+)(\[(?P<extras>[^\]]*)\])?")
_EXTRA = re.compile(r"""extra\s*==\s*["'](?P<name>[^"']*)["']""")
#: Stands for the folder of wheels where nobody knows it.
_WHEELS = "WHEELS"


def install_command(*requirements: str, python: str = sys.executable) -> str:
    """Returns the command that installs distributions into an interpreter.

    requirements: such as ``gcore-vllm``, ``gcore-rewards[math]`` or ``gcore-core==0.3.0``. A
        version is left out where there is only one.
    python: path of the interpreter.
    """
    arguments = [group for requirement in requirements for group in _arguments(requirement)]
    words = [word for group in dict.fromkeys(arguments) for word in group]
    return shlex.join([python, "-m", "pip", "install", *words])


def install_words(
    name: str,
    extras: Sequence[str] = (),
    version: str = "",
) -> tuple[str, ...]:
    """Returns pip's arguments for one distribution.

    extras: of the distribution, such as ``("math",)``.
    version: a specifier, for pip to choose by where there are several versions.
    """
    brackets = f"[{','.join(extras)}]" if extras else ""
    requirement = f"{name}{brackets}"
    if (here := find_installed(name)) and (direct := _direct_url(here)):
        return _from_url(requirement, brackets, direct)
    place = _source()
    file = _file(name, place) if place else None
    if file is not None and file.suffix == ".whl":
        # By its file: on an index, anybody may take a name that is not published there.
        return "--find-links", str(file.parent), f"{file}{brackets}"
    if file is not None:
        return "-e", f"{file}{brackets}"
    return (f"{requirement}{version}",)


def find_installed(name: str) -> Distribution | None:
    """Returns the distribution that is installed here; None where there is none.

    Of several copies it is the one that says where it came from.
    """
    copies = list(distributions(name=name))
    return next((copy for copy in copies if _direct_url(copy)), copies[0] if copies else None)


def is_offered(name: str) -> bool:
    """Says whether a distribution lies where the core was installed from."""
    place = _source()
    return place is not None and _file(name, place) is not None


def _arguments(requirement: str) -> Iterator[tuple[str, ...]]:
    """Yields pip's arguments for what a requirement needs that pip would not find, and for itself.

    Each comes as the words of one option, or of one distribution.
    """
    found = _REQUIREMENT.match(requirement)
    assert found, requirement
    extras = found["extras"].split(",") if found["extras"] else ()
    for name in _missing(found["name"], extras):
        yield from _split(install_words(name))
    words = install_words(found["name"], extras, requirement[found.end() :])
    if words == (requirement,) and requirement.startswith(_OURS) and _source() is None:
        yield "--find-links", _WHEELS
    yield from _split(words)


def _split(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the place where pip is to look, where words of ``install_words`` name one, apart."""
    if words[0] == "--find-links":
        yield words[:2]
        words = words[2:]
    yield words


def _missing(name: str, extras: Sequence[str] = ()) -> Iterator[str]:
    """Yields what a distribution of this project requires of the others and is not installed here.

    extras: of the distribution; what they require counts.
    """
    place = _source()
    file = _file(name, place) if place else None
    if file is None:
        return
    lines = _of_project(file, extras) if file.is_dir() else _of_wheel(file, extras)
    for line in lines:
        found = _REQUIREMENT.match(line)
        if found and found["name"].startswith(_OURS) and not find_installed(found["name"]):
            yield from _missing(found["name"])
            yield found["name"]


def _of_project(folder: Path, extras: Sequence[str]) -> list[str]:
    """Returns the requirements of a project of the checkout, with some extras'."""
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    optional = project.get("optional-dependencies", {})
    return [*project["dependencies"], *(line for e in extras for line in optional.get(e, ()))]


def _of_wheel(wheel: Path, extras: Sequence[str]) -> list[str]:
    """Returns the requirements of a wheel, with some extras'."""
    lines = [
        line
        for inside in Distribution.discover(path=[str(wheel)])
        for line in inside.requires or ()
    ]
    return [line for line in lines if not (extra := _EXTRA.search(line)) or extra["name"] in extras]


def _source() -> Path | None:
    """Returns the checkout, or the folder of wheels, from which the core was installed.

    None where it was installed by its name, or is imported from elsewhere.
    """
    checkout = Path(__file__).parents[2]
    if (checkout / "plugins").is_dir():
        return checkout
    core = find_installed(_CORE)
    direct = _direct_url(core) if core else None
    if not direct or not str(direct["url"]).startswith("file:"):
        return None
    place = Path(unquote(urlsplit(direct["url"]).path))
    return place.parent if place.suffix == ".whl" else place


def _file(name: str, place: Path) -> Path | None:
    """Returns the folder or the wheel of a distribution in a place; None where it has none."""
    if (place / "plugins").is_dir():
        folders = (
            (place,) if name == _CORE else (place / "plugins" / name, place / "contrib" / name)
        )
        return next((f for f in folders if (f / "pyproject.toml").is_file()), None)
    return max(place.glob(f"{name.replace('-', '_')}-*.whl"), default=None)


def _direct_url(distribution: Distribution) -> dict[str, Any] | None:
    """Returns what pip wrote about where a distribution came from (PEP 610)."""
    text = distribution.read_text("direct_url.json")
    return dict(json.loads(text)) if text else None


def _from_url(requirement: str, brackets: str, direct: dict[str, Any]) -> tuple[str, ...]:
    """Returns pip's arguments for what was installed from a directory, archive or repository."""
    url = str(direct["url"])
    if direct.get("dir_info", {}).get("editable"):
        return "-e", unquote(urlsplit(url).path) + brackets
    if vcs := direct.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    if direct.get("subdirectory"):
        url += f"#subdirectory={direct['subdirectory']}"
    return (f"{requirement} @ {url}",)
