"""The nightly run: it goes on where it stopped, and one failure does not end it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import learning, nightly
from tests.nightly import PARTS, Part

ROOT = nightly.ROOT


def part(name: str, command: str = "true", budget_min: float = 1) -> Part:
    return Part(name=name, budget_min=budget_min, command=command)


def outcomes(state: Path) -> dict[str, str]:
    parts = json.loads(state.read_text())["parts"]
    return {name: known["outcome"] for name, known in parts.items()}


def test_a_part_that_fails_does_not_end_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state.json"
    parts = [part("a"), part("b", "false"), part("c")]
    assert nightly.run_parts(parts, state, "one", fresh=False) == 1
    assert outcomes(state) == {"a": "passed", "b": "exit code 1", "c": "passed"}
    printed = capfd.readouterr().out
    assert "b: exit code 1, 0 min of 1 min" in printed


def test_a_second_call_runs_only_what_has_not_passed(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    log = tmp_path / "log"
    append = f"sh -c 'echo {{}} >> {log}'"
    parts = [part("a", append.replace("{}", "a")), part("b", f"test -e {tmp_path / 'mended'}")]
    assert nightly.run_parts(parts, state, "one", fresh=False) == 1
    (tmp_path / "mended").touch()
    assert nightly.run_parts(parts, state, "one", fresh=False) == 0
    assert log.read_text() == "a\n"
    assert nightly.run_parts(parts, state, "one", fresh=True) == 0
    assert log.read_text() == "a\na\n"


def test_what_passed_at_another_commit_is_run_again(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    assert nightly.run_parts([part("a"), part("b")], state, "one", fresh=False) == 0
    assert nightly.run_parts([part("b", "false")], state, "two", fresh=False) == 1
    assert outcomes(state) == {"b": "exit code 1"}


def test_a_part_that_was_cut_off_keeps_what_was_over_before(tmp_path: Path) -> None:
    """The state is written after each part, not at the end."""
    state = tmp_path / "state.json"
    seen = tmp_path / "seen.json"
    assert (
        nightly.run_parts([part("a"), part("b", f"cp {state} {seen}")], state, "one", fresh=False)
        == 0
    )
    assert outcomes(seen) == {"a": "passed"}


def test_a_part_that_takes_twice_its_budget_is_ended(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    slow = part("slow", "sleep 60", budget_min=0.25 / 60)
    assert nightly.run_parts([slow], state, "one", fresh=False) == 1
    assert outcomes(state)["slow"].startswith("took 2 times its budget")


def test_the_list_has_every_part_and_runs_none(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tests/nightly.py", "--list", "--state", str(tmp_path / "state.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [p.name for p in PARTS]
    assert not (tmp_path / "state.json").exists()


def test_all_pairs_all_recipes_and_all_files_of_commands_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import engine_pairs

    assert set(nightly.PAIRS) == set(engine_pairs.ALL)
    assert len(PARTS) == len({p.name for p in PARTS})
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert set(nightly.RECIPES) == recipes == set(learning.BARS)
    for p in PARTS:
        for word in p.words():
            if word.startswith(("tests/", "benchmarks/")):
                file, _, test = word.partition("::")
                assert (ROOT / file).exists(), word
                assert test.partition("[")[0] in (ROOT / file).read_text() if test else True


@pytest.mark.parametrize("recipe", nightly.RECIPES)
def test_a_seed_is_written_to_keys_that_a_recipe_has(recipe: str) -> None:
    job = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text())
    for key in learning.BARS[recipe].seeds:
        node = job
        for name in key.split("."):
            node = node[name]
        assert isinstance(node, int), key


def test_learning_is_told_apart_from_holding_still() -> None:
    bar = learning.Bar(metric="greedy/exact", least=0.9, seeds=())
    assert learning.shortfall({"greedy/exact": 0.2}, {"greedy/exact": 0.95}, bar) == ""
    assert "the bar is 0.9" in learning.shortfall({"greedy/exact": 0.2}, {"greedy/exact": 0.8}, bar)
    assert "nothing was learned" in learning.shortfall(
        {"greedy/exact": 0.95}, {"greedy/exact": 0.95}, bar
    )
