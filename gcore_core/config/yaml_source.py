"""Reads a YAML file and its overrides, and records where each value came from."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcore_core.config import venvs, yaml12
from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.contract.job_settings import JobSettings
from gcore_core.contract.run_files import LATEST

_OVERRIDE = re.compile(r"[^\s.=\[\]]+(\.[^\s.=\[\]]+)*")
#: The origin of a value that an override on the command line has set begins with this.
OVERRIDE = "override "
_FILE_SUFFIX = re.compile(r"\.[A-Za-z]\w{0,9}")
#: A name in a Python file, such as games.py:Maze.
_IN_FILE = re.compile(r".+\.py:[A-Za-z_]\w*")
#: What OmegaConf takes for the beginning of a reference, and the backslashes before it.
_LITERAL = re.compile(r"(\\*)\$\{")


@dataclass(frozen=True, kw_only=True)
class Word:
    """Holds an override whose value is no plain value, but a mapping, a list or no YAML at all.

    text: the value as it was written, without spaces around it; a key whose type is text takes it.
    error: for every other key; None where it is YAML.
    """

    text: str
    error: ConfigError | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """Holds what the user wrote, with the place of every value.

    file: the YAML file.
    tree: the file with the overrides merged over it; interpolations are not yet replaced.
    texts: the same mappings and lists, in which every other value is the text that was written.
    words: dotted key -> an override that only a key whose type is text takes as it was written.
    origins: dotted key -> where it was set: a line of the file, or an override.
    """

    file: Path
    tree: dict[str, Any]
    texts: dict[str, Any]
    words: Mapping[str, Word]
    origins: Mapping[str, str]


def read_source(file: Path, overrides: Sequence[str] = ()) -> Source:
    """Reads the file and merges the overrides ``a.b=value`` over it. The last override wins."""
    node = _node(file)
    tree, texts = _created(node, str(file))
    origins = {key: f"{file.name}, line {line}" for key, line in _lines(node, "")}
    words: dict[str, Word] = {}
    for override in overrides:
        key, value, text, word = _override(override)
        try:
            tree = _merged(tree, key, value)
            texts = _merged(texts, key, text)
        except OmegaConfBaseException as error:
            raise _unreadable(error, key) from error
        except TypeError as error:
            raise ConfigError(
                f"override {override!r} does not fit: it has a list where the file has a mapping, "
                "or the other way round.",
                where=str(file),
                todo="write a list as [a, b] and a mapping as {a: 1}, as the file has it",
            ) from error
        # Neither what it replaces nor what it becomes a part of is as it was written.
        words = {other: one for other, one in words.items() if not _overlap(other, key)}
        words |= {key: word} if word else {}
        origins |= dict.fromkeys(flat(value, key), f"{OVERRIDE}{override!r}")
    return Source(
        file=file, tree=_plain(tree, file), texts=_plain(texts, file), words=words, origins=origins
    )


def _node(file: Path) -> yaml.Node | None:
    """Returns the root of a file, a mapping; None for an empty file. Raises ConfigError."""
    try:
        node = yaml12.compose(_text(file))
        yaml12.values(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(
            f"not valid YAML: {error.problem or error.context}.",
            where=f"{file}, line {line}",
            todo="indent with spaces; quote strings that hold ': ', '#', '{' or '['",
            line=line,
        ) from error
    except yaml.YAMLError as error:  # a character that no YAML has
        first = str(error).splitlines()[0]
        raise ConfigError(f"not valid YAML: {first}.", where=str(file)) from error
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise ConfigError("the file must hold a mapping of keys to values.", where=str(file))
    return node


def _created(node: yaml.Node | None, where: str) -> tuple[Any, Any]:
    """Returns the values of a document and its texts, as OmegaConf has them."""
    try:
        return (
            OmegaConf.create(yaml12.values(node) or {}),
            OmegaConf.create(yaml12.texts(node) or {}),
        )
    except OmegaConfBaseException as error:
        raise _unreadable(error, where) from error


def _merged(tree: Any, key: str, value: Any) -> Any:
    if value == {}:  # merged, it would leave all that is there
        OmegaConf.update(tree, key, value, merge=False)
        return tree
    override = OmegaConf.create()
    OmegaConf.update(override, key, value)
    return OmegaConf.unsafe_merge(tree, override)


def _overlap(one: str, other: str) -> bool:
    """Says whether one dotted key is the other, or stands above or below it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _plain(tree: Any, file: Path) -> dict[str, Any]:
    merged = OmegaConf.to_container(tree)
    if not isinstance(merged, dict):
        raise ConfigError("the file must hold a mapping of keys to values.", where=str(file))
    return {str(key): value for key, value in merged.items()}


def written(config: Mapping[str, Any]) -> str:
    """Returns the YAML of resolved settings, which reads as they are: no ``${`` is a reference."""
    return yaml12.dump(_escaped(dict(config)))


def read_written(file: Path) -> dict[str, Any]:
    """Returns the settings of a file that holds what ``written`` gave, as plain values.

    Raises OSError where there is no such file, and ConfigError for one that is broken.
    """
    try:
        loaded = yaml12.load(file.read_text(encoding="utf-8"))
        if not isinstance(loaded, dict):
            return {}
        tree = OmegaConf.to_container(OmegaConf.create(loaded), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(
            "the run's configuration cannot be read.",
            where=str(file),
            why=str(error).splitlines()[0],
            todo="name a run that G-Core has written",
        ) from error
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return _LITERAL.sub(r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: _escaped(one) for key, one in value.items()}
    return [_escaped(one) for one in value] if isinstance(value, list) else value


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Returns dotted key -> value for every value that is no mapping, or an empty mapping."""
    if not (isinstance(tree, Mapping) and tree):
        return {prefix: tree} if prefix else {}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return values


def resolve_paths(settings: JobSettings, base: Path) -> None:
    """Makes the relative paths of a resolved configuration absolute, in place.

    base: the directory of the YAML file, which they are relative to.
    """
    settings.local = [str(anchored(name, base)) for name in settings.local]
    nodes = {
        "data": settings.data,
        "evaluation.data": settings.evaluation.data,
        **{f"rewards.{name}": node for name, node in settings.rewards.items()},
        **{f"observers.{name}": node for name, node in settings.observers.items()},
    }
    for where, node in nodes.items():
        if node is not None:
            _resolve(node.config, base, hub=False)
            _resolve_python(node.config, base, where=f"{where}.config.python")
    for reward in settings.rewards.values():
        if reward.known:
            reward.known = str(anchored(reward.known, base))
    for name, role in settings.roles.items():
        if role.python:
            role.python = _interpreter(
                venvs.resolve(role.python, where=f"roles.{name}.python"), base
            )
        _resolve(role.model, base, hub=True)
        _resolve_role(role.config, base)
        if isinstance(role.model.get("make"), MutableMapping):
            _resolve(role.model["make"], base, hub=False)
    if settings.environment is not None:
        _resolve_environment(settings.environment.config, base)


def _resolve_environment(config: MutableMapping[str, Any], base: Path) -> None:
    """Makes what an environment opens absolute: paths, ``file.py:NAME``, and its ``python``."""
    _resolve_role(config, base)
    for key, value in list(config.items()):
        if isinstance(value, str) and _IN_FILE.fullmatch(value):
            file, _, name = value.rpartition(":")
            config[key] = f"{anchored(file, base)}:{name}"
    _resolve_python(config, base, where="environment.config.python")


def _resolve_python(config: MutableMapping[str, Any], base: Path, *, where: str) -> None:
    """Makes the ``python`` of one mapping the path of an interpreter."""
    if isinstance(python := config.get("python"), str) and python:
        config["python"] = _interpreter(venvs.resolve(python, where=where), base)


def _resolve_role(config: MutableMapping[str, Any], base: Path) -> None:
    """Makes the paths that a backend opens absolute, at any depth: ``path`` and ``..._path``."""
    for key, value in list(config.items()):
        if isinstance(value, MutableMapping):
            _resolve_role(value, base)
        elif key == "path" or str(key).endswith("_path"):
            _resolve(config, base, hub=True, key=key)


def anchored(name: str, base: Path) -> Path:
    """Returns ``name`` as a path below ``base``, unless it is absolute or starts with ``~``."""
    return Path(os.path.normpath(base.absolute() / Path(name).expanduser()))


def _interpreter(name: str, base: Path) -> str:
    """Returns the path of an interpreter; a bare name such as python3.12 is looked up in PATH."""
    if "/" not in name and (path := shutil.which(name)):
        return path
    return str(anchored(name, base))


def _resolve(node: MutableMapping[str, Any], base: Path, *, hub: bool, key: str = "path") -> None:
    """Makes the ``path`` of one mapping absolute where it means a local path.

    key: another key of it that is meant.
    hub: whether a name may mean a model of the hub. Such a name (org/name) stays as it is unless it
        exists here.
    """
    name = node.get(key)
    if not isinstance(name, str) or not name:
        return
    place = anchored(name, base)
    explicit = name.startswith((".", "~", "/")) or name.count("/") > 1
    if explicit or place.exists() or (not hub and _FILE_SUFFIX.fullmatch(place.suffix)):
        node[key] = str(pinned(place))


def pinned(place: Path) -> Path:
    """Returns a path with the run itself for a link ``latest``, which goes on to the next run."""
    for link in (place, *place.parents):
        if link.name == LATEST and os.path.islink(link):
            return link.parent / os.readlink(link) / place.relative_to(link)
    return place


def _text(file: Path) -> str:
    """Returns the text of a file. Raises ConfigError when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        folder = file.parent
        names = [p.name for p in folder.iterdir() if p.is_file()] if folder.is_dir() else []
        raise ConfigError(
            f"no such file{did_you_mean(file.name, names)}.",
            where=str(file),
            why=f"looked in {Path.cwd()}",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot be read as text: {reason}.", where=str(file)) from error


def _override(override: str) -> tuple[str, Any, Any, Word | None]:
    """Returns key, value and text of an override, and its Word where the value is no plain one.

    Raises ConfigError when it is not of the form key=value.
    """
    key, equals, text = override.partition("=")
    text = text.strip()
    if not equals or not _OVERRIDE.fullmatch(key):
        raise ConfigError(
            f"override {override!r} is not of the form key=value.",
            todo="example: run.steps=10; quote what the shell would split",
        )
    try:
        node = yaml12.compose(text)
        value, written = yaml12.values(node), yaml12.texts(node)
    except yaml.YAMLError as error:
        problem = ConfigError(f"the value of override {override!r} is not valid YAML.", where=key)
        problem.__cause__ = error
        return key, None, text, Word(text=text, error=problem)
    if isinstance(value, dict | list):
        return key, value, written, Word(text=text)
    is_bare = node is None or (node.style is None and not text.startswith("!"))
    return key, value, text if is_bare else written, None


def _unreadable(error: OmegaConfBaseException, where: str) -> ConfigError:
    """Returns our error for a value, mostly a reference, that OmegaConf cannot resolve."""
    return ConfigError(
        f"what is set cannot be read: {str(error).splitlines()[0].rstrip('.')}.",
        where=where,
        todo=r"where ${ begins no reference but is text, write \${",
    )


def _lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """Yields (dotted key, line) for every key of the document; the first line is 1.

    Keys that come from a merged anchor (``<<``) have the line on which they were written.
    """
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            yield from _lines(value, prefix)
            continue
        name = f"{prefix}.{key.value}" if prefix else str(key.value)
        yield name, key.start_mark.line + 1
        yield from _lines(value, name)
