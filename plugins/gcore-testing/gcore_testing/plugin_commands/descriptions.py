"""Describes what a plugin offers, as plain data and as text.

That is its providers, their settings with help, and the engines that they need.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from gcore_core.config import catalog
from gcore_core.config.interpreters import Interpreter
from gcore_core.config.plugins import Provided, local_plugin
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.traits import Traits, traits_of

_FIELD_LINE = re.compile(r"(\w+(?:, \w+)*): (.+)")


def find(name: str, *, where: str) -> catalog.Installed:
    """Finds an installed plugin by its name, or a project's own file by its path."""
    if name.endswith(".py"):
        return local_plugin(Path(name), where)
    return catalog.scan().get(name, where=where)


def described(item: Provided, interpreter: Interpreter) -> dict[str, Any]:
    """Describes one provider as plain data.

    ``needs`` says whether the interpreter meets each requirement. ``traits`` is None where they
    depend on a setting without a default.
    """
    unmet = dict(interpreter.unmet(item.spec.needs))
    traits = default_traits(item.spec.config)
    return {
        "kind": item.kind,
        "name": item.reference,
        "summary": item.spec.summary,
        "factory": item.spec.factory,
        "traits": None if traits is None else set_traits(traits),
        "needs": [
            {"requirement": need, "met": need not in unmet, "found": unmet.get(need)}
            for need in item.spec.needs
        ],
        "config": list(settings(item.spec.config)) if item.spec.config else [],
    }


def default_traits(config: type | None) -> Traits | None:
    """Returns the traits under default settings; None where they depend on one without a default.

    The defaults are not checked: a job need not keep them.
    """
    if config is None:
        return Traits()
    made: Any = object.__new__(config)
    for field in dataclasses.fields(config):
        default = _default_of(field)
        if default is not dataclasses.MISSING:
            object.__setattr__(made, field.name, default)
    try:
        return traits_of(made)
    except GcoreError:
        return None


def _default_of(field: dataclasses.Field[Any]) -> Any:
    """Returns a field's default; MISSING where it must be given."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def set_traits(traits: Traits) -> dict[str, Any]:
    """Returns the fields that say what a provider has, as plain values."""
    nothing = Traits()
    found = {field.name: getattr(traits, field.name) for field in dataclasses.fields(Traits)}
    return {
        name: sorted(value) if isinstance(value, Set) else value
        for name, value in found.items()
        if value != getattr(nothing, name)
    }


def text(item: dict[str, Any]) -> Iterator[str]:
    """Writes lines for a person."""
    yield f"{item['kind']} {item['name']}: {item['summary']}"
    if item["factory"]:
        yield f"  factory: {item['factory']}"
    if item["traits"] is None:
        yield "  traits: depend on a setting without a default"
    elif item["traits"]:
        words = [
            name if value is True else f"{name}={value}" for name, value in item["traits"].items()
        ]
        yield f"  traits: {', '.join(words)}"
    for need in item["needs"]:
        state = "met" if need["met"] else f"NOT met: found {need['found'] or 'none'}"
        yield f"  needs {need['requirement']} ({state})"
    for setting in item["config"]:
        default = " (must be given)" if setting["required"] else f" = {setting['default']!r}"
        yield f"  config.{setting['name']}: {setting['type']}{default}"
        yield from textwrap.wrap(
            setting["help"], 110, initial_indent=" " * 6, subsequent_indent=" " * 6
        )


def settings(config: Any, prefix: str = "") -> Iterator[dict[str, Any]]:
    """Yields every field with type, default and help.

    Fields of a nested dataclass come by dotted name.
    """
    types = typing.get_type_hints(config)
    help_texts = field_help(config)
    for field in dataclasses.fields(config):
        name = prefix + field.name
        if dataclasses.is_dataclass(types[field.name]):
            yield from settings(types[field.name], f"{name}.")
            continue
        default = _default_of(field)
        required = default is dataclasses.MISSING
        yield {
            "name": name,
            "type": _type_name(field.type),
            "default": None if required else default,
            "required": required,
            "help": help_texts.get(field.name, ""),
        }


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, str):  # under ``from __future__ import annotations``
        return annotation
    return str(getattr(annotation, "__name__", annotation))


def field_help(config: type) -> dict[str, str]:
    """Returns the help of each field that has some.

    It is the string under the field, or the line ``name: text`` in the docstring of the class. A
    subclass's help wins over that of the class it inherits from.
    """
    help_texts: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        if dataclasses.is_dataclass(cls):
            help_texts |= _lines_of_docstring(cls)
            help_texts |= _strings_under_fields(cls)
    return help_texts


def _lines_of_docstring(cls: type) -> dict[str, str]:
    """Returns the help that the docstring gives: lines ``name: text`` or ``name, name: text``.

    A text goes on in lines that are indented.
    """
    help_texts: dict[str, str] = {}
    names: list[str] = []  # fields that the last line was about
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        match = _FIELD_LINE.fullmatch(line)
        if match and set(match[1].split(", ")) <= set(cls.__dataclass_fields__):  # type: ignore[attr-defined]
            names = match[1].split(", ")
            help_texts |= dict.fromkeys(names, match[2].strip())
        elif line.startswith(" ") and names:  # it goes on, indented
            help_texts |= {name: f"{help_texts[name]} {line.strip()}" for name in names}
        else:
            names = []
    return help_texts


def _strings_under_fields(cls: type) -> dict[str, str]:
    """Returns the help that stands in strings under fields; none where there is no source."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, SyntaxError):
        return {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        field.target.id: " ".join(under.value.value.split())
        for field, under in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(under, ast.Expr)
        and isinstance(under.value, ast.Constant)
        and isinstance(under.value.value, str)
    }
