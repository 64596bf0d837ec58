"""Writes conversations of one shape by rendering the chat template for the shape alone.

A chat template is a program, and rendering is most of what a turn costs. Of conversations that have
the same roles, names and tools, most templates write the same text around other contents. Such a
*mould* is made by rendering the shape twice, with probes in place of contents and of the ids of
calls; it is one where both show the same pieces around their probes. It is filled with contents on
which the template cannot decide anything. Which those are, the template's source says: all texts
that it looks for are constants in it. Where it may look at a content in another way, or where a
content has such a text, the template is rendered as ever. And a mould is compared with the template
at its first, second, fourth, eighth use, and so on: one that differs is told and never used again.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes

from .templates import Message, RefusedByTemplate, Template

log = logging.getLogger(__name__)

#: What may be done with a content without looking at it otherwise than for constants. Case and
#: escapes show in the probes.
_FILTERS = frozenset(
    ["capitalize", "count", "default", "dictsort", "items", "join", "length", "list", "lower"]
    + ["map", "reject", "replace", "safe", "selectattr", "string", "tojson", "trim", "upper"]
)
_METHODS = frozenset(
    ["endswith", "get", "items", "lstrip", "replace", "rsplit", "rstrip", "split", "startswith"]
    + ["strip"]
)
_TESTS = frozenset(
    ["boolean", "defined", "false", "iterable", "mapping", "none", "sequence", "string", "true"]
    + ["undefined"]
)
#: Of these the template may take parts by number.
_LISTS = frozenset(["loop_messages", "messages", "tool_calls", "tools", "type"])
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_KEYS = frozenset(["content", "name", "role", "tool_call_id"])
_PROBE = "aZ%dq\"'\\<&>{}%%\n \t\x01é漢🙂zA"
_LONG = 4000
#: Moulds that are kept.
_MOST = 256


@dataclass(frozen=True)
class Looks:
    """What a template may find in a content.

    within: matches where a content has a text that the template looks for.
    equal: texts with which it may compare a content.
    """

    within: re.Pattern[str]
    equal: frozenset[str]

    def are_blind(self, text: str, is_id: bool) -> bool:
        """Whether the template cannot tell a content, or the id of a call, from a probe."""
        if is_id and not _ID.fullmatch(text):
            return False
        is_whole = bool(text) and text == text.strip() and len(text) <= _LONG
        return is_whole and text not in self.equal and not self.within.search(text)


def looks_of(source: str) -> Looks | None:
    """Returns what a chat template may find in a content; None where that cannot be told."""
    try:
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        tree = environment.parse(_GENERATION.sub("", source))
    except jinja2.TemplateError:
        return None
    sought: list[nodes.Node] = []
    kinds = (nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem)
    for node in tree.find_all((*kinds, nodes.Compare, nodes.Assign, nodes.For)):
        if not _is_known(node):
            return None
        if isinstance(node, nodes.Compare):
            sought += _sought(node)
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            if not (node.node.attr.endswith("strip") and _are_spaces(node.args)):
                sought += node.args
        elif isinstance(node, nodes.Filter) and node.name == "replace":
            sought += node.args
        elif isinstance(node, nodes.Assign | nodes.For):
            value = node.node if isinstance(node, nodes.Assign) else node.iter
            if isinstance(value, nodes.Const | nodes.List | nodes.Tuple | nodes.Dict):
                sought.append(value)
    words = {word for node in sought for word in _constants(node)} - {""}
    pattern = "|".join(map(re.escape, sorted(words))) or r"(?!)"
    return Looks(re.compile(pattern), frozenset(_constants(tree)))


def _is_known(node: nodes.Node) -> bool:
    """Whether an operation looks at a content for constants alone."""
    if isinstance(node, nodes.Filter):
        return node.name in _FILTERS
    if isinstance(node, nodes.Test):
        return node.name in _TESTS
    if isinstance(node, nodes.Call):
        if isinstance(node.node, nodes.Getattr):
            return node.node.attr in _METHODS
        return _name(node.node) != "strftime_now"  # it writes another text tomorrow
    if isinstance(node, nodes.Getitem):
        by_number = isinstance(node.arg, nodes.Slice) or _number(node.arg) is not None
        return not by_number or isinstance(node.node, nodes.Call) or _name(node.node) in _LISTS
    if isinstance(node, nodes.Compare):
        return not _counts(node)
    return True


def _counts(node: nodes.Compare) -> bool:
    """Whether it is asked how long something is, that may be a content."""
    sides = [node.expr, *(one.expr for one in node.ops)]
    lengths = [
        side.node
        for side in sides
        if isinstance(side, nodes.Filter) and side.name in ("count", "length")
    ]
    others = {"id", "tool_call_id", *_LISTS}
    counted = [one for one in lengths if _name(one) not in others]
    return bool(counted) and not any(_number(side) in (0, 1) for side in sides)


def _sought(node: nodes.Compare) -> list[nodes.Node]:
    """Returns what a comparison may look for within a content. A name is compared as a whole."""
    if any(one.op in ("in", "notin") for one in node.ops):
        return [node.expr]
    sides: list[nodes.Node] = [node.expr, *(one.expr for one in node.ops)]
    return [side for side in sides if not all(word.isidentifier() for word in _constants(side))]


def _constants(node: nodes.Node) -> list[str]:
    found = [*node.find_all(nodes.Const), *([node] if isinstance(node, nodes.Const) else [])]
    return [one.value for one in found if isinstance(one.value, str)]


def _are_spaces(arguments: Sequence[nodes.Node]) -> bool:
    return all(isinstance(one, nodes.Const) and not str(one.value).strip() for one in arguments)


def _number(node: nodes.Node) -> int | None:
    return node.value if isinstance(node, nodes.Const) and type(node.value) is int else None


def _name(node: nodes.Node | None) -> str:
    """Returns the name of a variable or of a field; "" for anything else."""
    if isinstance(node, nodes.Getitem):
        return str(node.arg.value) if isinstance(node.arg, nodes.Const) else ""
    return str(getattr(node, "attr", "") or getattr(node, "name", ""))


class Moulds:
    """Writes conversations with one set of tools.

    template: that is rendered.
    looks: of its source; None: it is rendered each time.
    """

    def __init__(self, template: Template, looks: Looks | None, tools: Sequence[Any]) -> None:
        self._template = template
        self._looks = looks
        self._tools = tools
        self._made: dict[str, list[str | int] | None] = {}
        self._uses = Counter[str]()

    def write(
        self, asked: Sequence[Message], new: Sequence[Message] = (), *, opens: bool = True
    ) -> str:
        """Returns what ``Template.write`` returns of all messages, and raises what it raises.

        asked: the first messages, of which there are few, except for the ids of calls.
        new: those behind them.
        """
        if any(not message.keys() <= _KEYS for message in new):
            return self._template.write([*asked, *new], self._tools, opens=opens)
        said: dict[str, bool] = {}  # text -> whether it is the id of a call

        def number(text: str, is_id: bool) -> str:
            said.setdefault(text, is_id)
            return f"\0{list(said).index(text)}{is_id}"

        shape = repr((opens, _filled(asked, new, number)))
        if shape not in self._made:
            if len(self._made) >= _MOST:
                self._made.clear()
                self._uses.clear()
            self._made[shape] = self._mould(asked, new, said, opens)
        mould, looks = self._made[shape], self._looks
        if mould is None or not all(looks and looks.are_blind(*one) for one in said.items()):
            return self._template.write([*asked, *new], self._tools, opens=opens)
        texts = list(said)
        written = "".join([part if isinstance(part, str) else texts[part] for part in mould])
        if not self._is_compared(shape):
            return written
        rendered = self._template.write([*asked, *new], self._tools, opens=opens)
        if rendered != written:
            self._made[shape] = None
            log.warning(
                "the chat template writes a conversation otherwise than others of its shape; it is "
                "rendered each time from now on. Before, %d were written as: %.200r",
                self._uses[shape] - 1,
                written,
            )
        return rendered

    def _is_compared(self, shape: str) -> bool:
        """Counts a use of a mould; returns whether it is the first, second, fourth, eighth ..."""
        self._uses[shape] += 1
        return self._uses[shape].bit_count() == 1

    def _mould(
        self, asked: Sequence[Message], new: Sequence[Message], said: dict[str, bool], opens: bool
    ) -> list[str | int] | None:
        """Returns the pieces of what is written, and numbers where what was said stands."""
        if not said:
            return self._pieces(asked, new, {}, opens)
        moulds = []
        for size in (1, 50):
            probes = {
                text: f"Zq{size:02}{place:05}" if is_id else _PROBE % place * size
                for place, (text, is_id) in enumerate(said.items())
            }
            looks, kinds = self._looks, said.values()
            if looks is None or not all(map(looks.are_blind, probes.values(), kinds)):
                return None
            moulds.append(self._pieces(asked, new, probes, opens))
        return moulds[0] if moulds[0] == moulds[1] else None

    def _pieces(
        self, asked: Sequence[Message], new: Sequence[Message], probes: dict[str, str], opens: bool
    ) -> list[str | int] | None:
        """Returns the pieces with probes in place of what was said; None where it is refused."""
        filled = _filled(asked, new, lambda text, is_id: probes[text])
        try:
            text = self._template.write(filled, self._tools, opens=opens)
        except RefusedByTemplate:
            return None
        numbers = {probe: number for number, probe in enumerate(probes.values())}
        pattern = "|".join(map(re.escape, numbers)) or r"(?!)"
        parts = re.split(f"({pattern})", text)
        return [numbers[part] if place % 2 else part for place, part in enumerate(parts)]


def _filled(
    asked: Sequence[Message], new: Sequence[Message], fill: Callable[[str, bool], str]
) -> list[dict[str, Any]]:
    """Returns messages with other contents of the new ones, and other ids of calls."""
    filled = [dict(message) for message in (*asked, *new)]
    for place, message in enumerate(filled):
        if place >= len(asked) and isinstance(message.get("content"), str):
            message["content"] = fill(message["content"], False)
        if isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = fill(message["tool_call_id"], True)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{**each, "id": fill(each["id"], True)} for each in calls]
    return filled
