"""verifiers 0.4, unchanged, with its train client: it renders, and sends prompts by ids."""

from __future__ import annotations

import json
from pathlib import Path

from gcore_environments.testing import CHATML

from tests.support import peers
from tests.support.scripted_policy import of_tokenizer, qwen_tokenizer

HERE = Path(__file__).parent


def test_the_branches_of_verifiers_are_our_sequences(tmp_path: Path) -> None:
    python = peers.interpreter("verifiers", "verifiers==0.4.0 and renderers==0.1.12")
    tokenizer = qwen_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with of_tokenizer(tokenizer, [end], "[5] I say", "[9]", "[3]") as policy:
        variables = {"EPISODE_KEY": policy.endpoint.key((0, 0)), "PYTHONPATH": str(HERE)}
        url, script = policy.endpoint.url, HERE / "verifiers_rollout.py"
        output = peers.run(python, script, url, str(tmp_path), **variables)
        found = json.loads(output.splitlines()[-1])
    assert found["ok"], found
    assert found["errors"] == []
    assert found["rewards"] == {"right": 1.0}
    (book,) = policy.books.values()
    assert all(one.kind == "ids" for one in policy.seen)
    assert len(policy.seen) == 3
    theirs = sorted(tuple(one["ids"]) for one in found["branches"])
    assert theirs == sorted(tuple(one.ids) for one in book.sequences)
    trained = sum(sum(one["mask"]) for one in found["branches"])
    assert trained >= book.actions
