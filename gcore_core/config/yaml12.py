"""Reads and writes YAML by the rules of YAML 1.2; PyYAML alone has the rules of 1.1.

By them ``0012`` is 12 and ``1e3`` is 1000.0. A text are ``yes``, ``12:30``, ``1_000`` and
``2026-11-28``. See https://yaml.org/spec/1.2.2/#103-core-schema.

Text is read in two forms, which have the same mappings and lists: as values, and as what was
written. A key whose type is text takes the second, so that ``0012`` stays ``0012``
(``gcore_core.config.schema``). Keys of mappings are texts in both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import yaml  # type: ignore[import-untyped]

_TAG = "tag:yaml.org,2002:"
_STR, _SEQ, _MAP, _MERGE = (_TAG + name for name in ("str", "seq", "map", "merge"))
_WIDTH = 100
#: More values than any job has: aliases of aliases make more of a short text.
_MOST = 1_000_000

#: Words for null that are written without quotes.
NULLS = ("", "~", "null", "Null", "NULL")
#: type -> (pattern of the text, first characters of such texts)
_PLAIN = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}


#: Line breaks of YAML 1.1 that texts hold unseen.
_BREAKS = re.compile("[\x85\u2028\u2029]")


class _Resolver(yaml.resolver.BaseResolver):  # type: ignore[misc]
    """Says which type a text without quotes has."""


class _Composer(
    yaml.reader.Reader,  # type: ignore[misc]
    yaml.scanner.Scanner,  # type: ignore[misc]
    yaml.parser.Parser,  # type: ignore[misc]
    yaml.composer.Composer,  # type: ignore[misc]
    _Resolver,
):
    """Makes nodes of a text."""

    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)
        _Resolver.__init__(self)


class _Written(str):
    """A text that is written without quotes, whatever it means."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes what YAML 1.1 or 1.2 would take for something else than a text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        # In single quotes these line breaks would be read as spaces.
        style = '"' if _BREAKS.search(text) else None
        return self.represent_scalar(_STR, text, style=style)

    def represent_plain(self, text: str) -> yaml.Node:
        return self.represent_scalar(self.resolve(yaml.ScalarNode, text, (True, False)), str(text))


for _name, (_pattern, _firsts) in _PLAIN.items():
    for _class in (_Resolver, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})\\Z"), _firsts)
_Dumper.yaml_representers = {
    cls: yaml.SafeDumper.yaml_representers[cls]
    for cls in (type(None), str, bool, int, float, list, tuple, dict)
}
_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(_Written, _Dumper.represent_plain)
_Dumper.add_representer(None, yaml.representer.SafeRepresenter.represent_undefined)


def compose(text: str) -> yaml.Node | None:
    """Returns the root of a text with one document; None for an empty one.

    Raises yaml.YAMLError; most say the place of what is wrong.
    """
    return _Composer(text).get_single_node()


def values(node: yaml.Node | None) -> Any:
    """Returns what a node means: mappings, lists, texts, numbers, bools and None.

    Raises yaml.MarkedYAMLError for what YAML's core does not have: other tags, keys that are no
    texts, and a key that is there twice.
    """
    return None if node is None else _Construction(_value_of).make(node)


def texts(node: yaml.Node | None) -> Any:
    """Returns mappings and lists as ``values`` does, and every other value as it was written.

    Nothing between a key and the next is None, and so is what has the tag ``!!null``.
    """
    return None if node is None else _Construction(_text_of).make(node)


def load(text: str) -> Any:
    """Returns what a text means. Raises yaml.YAMLError."""
    return values(compose(text))


def scalar(text: str) -> Any:
    """Returns what a word without quotes means: a number, a bool, None or the text itself."""
    tag = _Resolver().resolve(yaml.ScalarNode, text, (True, False))
    return _value_of(yaml.ScalarNode(tag, text))


def dump(value: Any, written: Any = None) -> str:
    """Returns YAML that ``load``, and readers of YAML 1.1, read as the same value.

    Raises yaml.YAMLError for a value for which YAML's core has no word.

    written: what ``texts`` gave for the same tree. A value that it still means is written so again,
        since 0012 may be meant as a text.
    """
    again = _as_written(value, written)
    return str(yaml.dump(again, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH))


def _as_written(value: Any, text: Any) -> Any:
    if isinstance(value, dict):
        texts = text if isinstance(text, dict) else {}
        return {key: _as_written(one, texts.get(key)) for key, one in value.items()}
    if isinstance(value, list):
        is_same = isinstance(text, list) and len(text) == len(value)
        pairs = zip(value, text if is_same else [None] * len(value), strict=True)
        return [_as_written(one, its_text) for one, its_text in pairs]
    if not isinstance(text, str) or isinstance(value, str):
        return value
    meant = scalar(text)
    is_meant = type(meant) is type(value) and (meant == value or meant != meant)
    return _Written(text) if is_meant else value


class _Construction:
    """Makes plain values of nodes."""

    def __init__(self, of_scalar: Callable[[yaml.ScalarNode], Any]) -> None:
        self._of_scalar = of_scalar
        self._open: set[int] = set()
        self._left = _MOST

    def make(self, node: yaml.Node) -> Any:
        self._left -= 1
        if self._left < 0:
            raise _error("aliases make too many values of it", node)
        if isinstance(node, yaml.ScalarNode):
            return self._of_scalar(node)
        if id(node) in self._open:
            raise _error("an alias lies within what it stands for", node)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node)
            if node.tag != _SEQ:
                raise _error(f"the tag {node.tag} is not known", node)
            return [self.make(item) for item in node.value]
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        if node.tag != _MAP:
            raise _error(f"the tag {node.tag} is not known", node)
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error("a key is a mapping or a list", key)
            if key.tag == _MERGE:
                merged = {**self._merged(value), **merged}
            elif key.value in own:
                raise _error(f"found duplicate key {key.value}", key)
            else:
                own[key.value] = self.make(value)
        return {**merged, **own}

    def _merged(self, node: yaml.Node) -> dict[str, Any]:
        """Returns what ``<<: *one`` or ``<<: [*one, *other]`` adds; of several the first wins."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for one in nodes:
            if not isinstance(one, yaml.MappingNode):
                raise _error("what << merges must be a mapping", one)
            merged = {**self.make(one), **merged}
        return merged


def _value_of(node: yaml.ScalarNode) -> Any:
    text = node.value
    try:
        match node.tag.removeprefix(_TAG):
            case "str" | "merge":
                return text
            case "null":
                return None
            case "bool":
                return {"true": True, "false": False}[text.lower()]
            case "int":
                base = {"0o": 8, "0x": 16}.get(text[:2], 10)
                return int(text[2:] if base != 10 else text, base)
            case "float":
                return _float(text.lower())
    except (KeyError, ValueError):
        raise _error(f"{text!r} is no {node.tag.removeprefix(_TAG)}", node) from None
    raise _error(f"the tag {node.tag} is not known", node)


def _float(text: str) -> float:
    if text.endswith(".inf"):
        return -math.inf if text.startswith("-") else math.inf
    return math.nan if text == ".nan" else float(text)


def _text_of(node: yaml.ScalarNode) -> str | None:
    is_empty = node.style is None and not node.value
    is_tagged_null = node.tag == f"{_TAG}null" and node.value not in NULLS[1:]
    return None if is_empty or is_tagged_null else str(node.value)


def _error(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
