"""Endpoints: each name is one constant, and nobody names one by a string."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import msgspec

from gcore_core.contract.launching import ALIVE, Endpoint, StreamEndpoint
from gcore_core.runtime import messages
from gcore_core.runtime.messages import RelayedEndpoint

REPOSITORY = Path(__file__).parents[3]
#: Where the first argument is an endpoint, and where the second one is.
FIRST, SECOND = ("call", "stream"), ("insist",)


def endpoints() -> list[Endpoint | StreamEndpoint]:  # type: ignore[type-arg]
    found = [ALIVE]
    for value in vars(messages).values():
        if isinstance(value, RelayedEndpoint):
            found += [value.of_relay, value.of_rank]
        elif isinstance(value, (Endpoint, StreamEndpoint)):
            found.append(value)
    return found


def test_every_endpoint_has_a_name_of_its_own() -> None:
    """Else a service would serve one in place of the other."""
    names = Counter(endpoint.name for endpoint in endpoints())
    assert len(names) > 30
    assert {name for name, count in names.items() if count > 1} == set()


def test_every_request_and_answer_can_be_decoded() -> None:
    """Decoders are made on first use: a type that cannot be decoded would fail in a run."""
    for endpoint in endpoints():
        answer = endpoint.item if isinstance(endpoint, StreamEndpoint) else endpoint.reply
        for kind in (endpoint.request, answer):
            msgspec.msgpack.Decoder(kind)


def test_an_endpoint_keeps_its_decoders() -> None:
    for endpoint in endpoints():
        assert endpoint.request_decoder is endpoint.request_decoder


def named_by_string(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        places = {**dict.fromkeys(FIRST, 0), **dict.fromkeys(SECOND, 1)}
        if name not in places or len(node.args) <= places[name]:
            continue
        if isinstance(node.args[places[name]], (ast.Constant, ast.JoinedStr)):
            found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)[:60]}")
    return found


def test_no_call_in_the_core_names_its_endpoint_by_a_string() -> None:
    paths = sorted((REPOSITORY / "gcore_core").rglob("*.py"))
    assert len(paths) > 100
    assert [line for path in paths for line in named_by_string(path)] == []
