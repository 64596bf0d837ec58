"""OpenEnv 0.10, unchanged: its checks of our exports, and its capture in front of our endpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from gcore_environments.traces import trace_of

from tests.support import peers
from tests.support.random_episodes import FAULTS, random_book, record_of
from tests.support.scripted_policy import ScriptedPolicy

HERE = Path(__file__).parent
PACKAGES = "openenv==0.10.0"
CALLS = '<call>["add", {"a": 1}]</call><call>["add", {"a": 3}]</call>'


def test_openenv_accepts_what_we_export_and_finds_each_planted_fault(tmp_path: Path) -> None:
    python = peers.interpreter("openenv", PACKAGES)
    good = [trace_of(record_of(random_book(seed))) for seed in range(2000)]
    bad = {}
    for name, plant in FAULTS.items():
        trace = copy.deepcopy(good[7])
        plant(trace)
        bad[name] = trace
    for name, what in {"good": good, "bad": bad}.items():
        (tmp_path / name).write_text(json.dumps(what), encoding="utf-8")
    script = HERE / "openenv_oracle.py"
    found = json.loads(peers.run(python, script, str(tmp_path / "good"), str(tmp_path / "bad")))
    assert found["turns"] == sum(len(one["turns"]) for one in good)
    assert found["findings"] == []
    assert len(found["faults"]) == 10
    wrong = {name: said for name, said in found["faults"].items() if said != "FATAL"}
    # strict types of pydantic find these before the checks do
    assert set(wrong) <= {"a mask of flags", "an id that is no number"}
    assert all("valid integer" in said for said in wrong.values())


def test_openenvs_capture_in_front_of_the_endpoint_sees_one_sequence() -> None:
    python = peers.interpreter("openenv", PACKAGES)
    with ScriptedPolicy(CALLS, "yes", "no", drift="error") as policy:
        key = policy.endpoint.key((0, 0))
        output = peers.run(python, HERE / "openenv_capture.py", policy.endpoint.url, key)
        found = json.loads(output.splitlines()[-1])
    (book,) = policy.books.values()
    assert not book.forks
    (sequence,) = found["sequences"]
    assert sequence["input_ids"] == book.sequences[0].ids
    assert sum(sequence["loss_mask"]) == book.actions
    assert found["findings"] == []
