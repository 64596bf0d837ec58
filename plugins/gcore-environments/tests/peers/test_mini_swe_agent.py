"""mini-swe-agent 2.4.6, unchanged, as an agent that edits a file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support import peers
from tests.support.scripted_policy import of_family


def bash(command: str) -> str:
    call = {"name": "bash", "arguments": {"command": command}}
    return f"I do it.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_three_turns_edit_a_file_in_one_sequence(tmp_path: Path) -> None:
    python = peers.interpreter("swe", "mini-swe-agent==2.4.6")
    (tmp_path / "number").write_text("three <|im_end|>\n", encoding="utf-8")
    turns = [
        bash("cat number"),
        bash("sed -i s/three/four/ number && cat number"),
        bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat number"),
    ]
    script = Path(__file__).parent / "mini_swe_agent.py"
    with of_family("chatml", *turns, drift="error") as policy:
        key = policy.endpoint.key((0, 0))
        silent = {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        output = peers.run(python, script, policy.endpoint.url, key, str(tmp_path), **silent)
        found = json.loads(output.splitlines()[-1])
    assert (tmp_path / "number").read_text(encoding="utf-8") == "four <|im_end|>\n"
    assert found == {
        "ended": {"exit_status": "Submitted", "submission": "four <|im_end|>\n"},
        "calls": 3,
    }
    (book,) = policy.books.values()
    (only,) = book.sequences
    sampled = [only.ids[begin:end] for begin, end, _, _ in only.spans]
    assert sampled == [[*policy.encode(turn), policy.end] for turn in turns]
