"""What is drawn: sound values of any message, plain msgpack values, and bytes that were sound
before.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

from gcore_core.wire.service import encode

_INTEGERS = st.one_of(
    st.integers(0, 8),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([-1, 2**31, 2**63 - 1, 2**63]),
)
_TEXTS = st.one_of(
    st.sampled_from(["", "..", "/etc/passwd", "a\0b", "policy.0", "<f4"]), st.text(max_size=8)
)
_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: _INTEGERS,
    float: st.floats(),
    str: _TEXTS,
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
    type(None): st.none(),
}
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.one_of(*_LEAVES.values()),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_TEXTS | _INTEGERS, inner, max_size=4)
    ),
    max_leaves=12,
)

#: Headers that promise more than follows, numbers at the edge, no UTF-8, what msgpack reserves.
_HEADS = [
    *(bytes([first]) + b"\xff" * 4 for first in (0xDD, 0xDF, 0xC6, 0xDB, 0xC9)),
    *(b"\xdc\xff\xff", b"\xde\xff\xff", b"\xc1", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7)),
    *(
        b"\xcb\x7f\xf0" + bytes(6),
        b"\xcb\x7f\xf8" + bytes(6),
        b"\xa3\xed\xa0\x80",
        b"\xd6\xff\xff\xff\xff\xff",
    ),
    *(
        b"\x91" * 50_000,
        b"\x81\xa0" * 50_000,
        b"\x91" * 50_000,
        b"\xcf" + b"\x7f" * 8,
        b"\xc0",
        b"\x90",
        b"\x80",
    ),
]


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Sound values of a type as msgspec reads it."""
    if kind is Any:
        return PLAIN
    if kind is msgspec.Raw:
        return PLAIN.map(encode).map(msgspec.Raw)
    if kind in _LEAVES:
        return _LEAVES[kind]
    if isinstance(kind, type) and (names := _field_names(kind)) is not None:
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: values(hints[name]) for name in names})
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return st.lists(values(of[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(of[0]), values(of[1]), max_size=3)
    if origin is tuple and of[-1] is ...:
        return st.lists(values(of[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, of))
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, of))
    raise TypeError(f"nothing is drawn for {kind}")


def _field_names(kind: type) -> list[str] | None:
    """Of a class that msgspec reads field by field; None of another."""
    if issubclass(kind, msgspec.Struct):
        return [field.name for field in msgspec.structs.fields(kind)]
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return None


@st.composite
def mutated(draw: st.DrawFn, sound: st.SearchStrategy[bytes]) -> bytes:
    """Sound bytes after one to four changes."""
    raw = draw(sound)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        match draw(st.sampled_from(["flip", "put", "drop", "cut", "repeat", "head", "over"])):
            case "flip" if at < len(raw):
                raw = raw[:at] + bytes([raw[at] ^ 1 << draw(st.integers(0, 7))]) + raw[at + 1 :]
            case "put":
                raw = raw[:at] + draw(st.binary(min_size=1, max_size=9)) + raw[at:]
            case "drop":
                raw = raw[:at] + raw[at + draw(st.integers(1, 9)) :]
            case "cut":
                raw = raw[:at]
            case "repeat":
                raw = raw[:at] + raw[draw(st.integers(0, at)) :]
            case "head":
                raw = raw[:at] + draw(st.sampled_from(_HEADS)) + raw[at:]
            case "over":
                raw = raw[:at] + draw(st.sampled_from(_HEADS)) + raw[at + 1 :]
    return raw


def hostile(sound: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Bytes for a reader of msgpack: mutated, of another type, or none at all."""
    return st.one_of(mutated(sound), mutated(sound), PLAIN.map(encode), st.binary(max_size=64))
