"""openai 2.54, unchanged, as an agent."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support import peers
from tests.support.scripted_policy import ScriptedPolicy

CALLS = '<call>["add", {"a": 1, "b": 2}]</call><call>["add", {"a": 3, "b": 4}]</call>'


def test_the_openai_client_acts_over_turns_without_a_fork() -> None:
    python = peers.interpreter("openai", "openai==2.54.0")
    with ScriptedPolicy(CALLS, CALLS, "3 and 7", CALLS, "seven", drift="error") as policy:
        key = policy.endpoint.key((0, 0))
        script = Path(__file__).parent / "openai_agent.py"
        found = json.loads(peers.run(python, script, policy.endpoint.url, key))
    (book,) = policy.books.values()
    assert found["models"] == ["policy"]
    assert found["finish"] == ["tool_calls", "tool_calls", "stop"]
    assert found["said"] == "3 and 7"
    sequence = book.sequences[0].ids
    for turn in found["turns"]:
        whole = turn["prompt"] + turn["ids"]
        assert sequence[: len(whole)] == whole
    assert found["key"][:2] == [401, "invalid_api_key"]
    assert found["temperature"][:2] == [400, "unsupported_value"]
    assert "temperature: 0.0 is not how the policy is sampled" in found["temperature"][2]
    assert found["responses"] == ["function_call", "function_call"]
    assert found["stream"] == ["response.created", "response.completed", "seven"]
    assert dict(book.forks) == {"parallel": 2}  # the two other conversations
