"""mini-swe-agent 2.4.6, unchanged, as an agent that edits a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gcore_environments import sandbox
from gcore_environments.hosts import Hosts, HostSettings

from tests.support import peers
from tests.support.scripted_policy import ScriptedPolicy, of_family

PATIENCE_S = 240.0


def bash(command: str) -> str:
    call = {"name": "bash", "arguments": {"command": command}}
    return f"I do it.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


TURNS = [
    bash("cat number"),
    bash("sed -i s/three/four/ number && cat number"),
    bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat number"),
]
SILENT = {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def test_three_turns_edit_a_file_in_one_sequence(tmp_path: Path) -> None:
    python = peers.interpreter("swe", "mini-swe-agent==2.4.6")
    (tmp_path / "number").write_text("three <|im_end|>\n", encoding="utf-8")
    script = Path(__file__).parent / "mini_swe_agent.py"
    with of_family("chatml", *TURNS, drift="error") as policy:
        key = policy.endpoint.key((0, 0))
        output = peers.run(python, script, policy.endpoint.url, key, str(tmp_path), **SILENT)
        found = json.loads(output.splitlines()[-1])
    assert (tmp_path / "number").read_text(encoding="utf-8") == "four <|im_end|>\n"
    assert found == {
        "ended": {"exit_status": "Submitted", "submission": "four <|im_end|>\n"},
        "calls": 3,
    }
    require_exact_ids(policy)


def test_it_edits_a_file_confined_with_no_network_but_the_endpoint() -> None:
    python = peers.interpreter("swe", "mini-swe-agent==2.4.6")
    if why := sandbox.problem("confine", str(python)):
        pytest.skip(why)
    with of_family("chatml", *TURNS, drift="error") as policy:
        hosts = Hosts(
            HostSettings(
                environment=f"{Path(__file__).parent}/mini_swe_program.py:Editor",
                python=str(python),
                sandbox="confine",
                variables=SILENT,
            )
        )
        try:
            host, message = hosts.replies.get(timeout=PATIENCE_S)
            assert message.get("ready"), message
            assert host.door is not None
            policy.endpoint.listen(host.door)
            endpoint = {"base_url": policy.endpoint.url, "api_key": policy.endpoint.key((0, 0))}
            host.send(op="open", id=[0, 0], seed=0, row={}, endpoint=endpoint)
            _, message = hosts.replies.get(timeout=PATIENCE_S)
        finally:
            hosts.close()
    assert message.get("rewards") == {"edited": 1.0, "calls": 3.0}, message
    require_exact_ids(policy)


def require_exact_ids(policy: ScriptedPolicy) -> None:
    """What was said is one sequence, token for token."""
    (book,) = policy.books.values()
    (only,) = book.sequences
    sampled = [only.ids[begin:end] for begin, end, _, _ in only.spans]
    assert sampled == [[*policy.encode(turn), policy.end] for turn in TURNS]
