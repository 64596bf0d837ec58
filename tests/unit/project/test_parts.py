"""Long test runs, part by part: they go on where they stopped; one failure does not end them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import learning, nightly, parts, real
from tests import recipes as recipes_of_real_models
from tests.engines import every_test
from tests.parts import Part

ROOT = Path(__file__).parents[3]


class Parts:
    """Parts of a checkout whose code is the file ``code.py``, and their result."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.result = root / "results" / "nightly.json"
        self.log = root / "log"
        self.change("speed = 1")

    def change(self, code: str) -> None:
        (self.root / "code.py").write_text(code)
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "code.py"], [*author, "commit", "-qm", "Change"]):
            subprocess.run(["git", *words], cwd=self.root, check=True)

    def part(self, name: str, command: str = "true", budget_min: float = 1) -> Part:
        return Part(name=name, budget_min=budget_min, command=command, runs=("code.py",))

    def logged(self, name: str) -> Part:
        return self.part(name, f"sh -c 'echo {name} >> {self.log}'")

    def run(self, *names: Part, fresh: bool = False) -> int:
        return parts.run_parts(names, self.result, fresh=fresh)

    def outcomes(self) -> dict[str, str]:
        return {name: entry["outcome"] for name, entry in parts.read_parts(self.result).items()}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    return Parts(tmp_path)


def test_a_part_that_fails_does_not_end_the_others(
    checkout: Parts, capfd: pytest.CaptureFixture[str]
) -> None:
    assert checkout.run(checkout.part("a"), checkout.part("b", "false"), checkout.part("c"))
    assert checkout.outcomes() == {"a": "passed", "b": "exit code 1", "c": "passed"}
    assert "b: exit code 1, 0 min of 1 min" in capfd.readouterr().out


def test_a_second_call_runs_only_what_has_not_passed(checkout: Parts) -> None:
    mended = checkout.root / "mended"
    both = (checkout.logged("a"), checkout.part("b", f"test -e {mended}"))
    assert checkout.run(*both) == 1
    mended.touch()
    assert checkout.run(*both) == 0
    assert checkout.log.read_text() == "a\n"
    assert checkout.run(*both, fresh=True) == 0
    assert checkout.log.read_text() == "a\na\n"


def test_what_passed_on_other_code_is_run_again(checkout: Parts) -> None:
    """And is told as older until then."""
    both = (checkout.logged("a"), checkout.logged("b"))
    assert checkout.run(*both) == 0
    (checkout.root / "page.md").write_text("a page is not code")
    assert checkout.run(*both) == 0
    assert checkout.log.read_text() == "a\nb\n"
    checkout.change("speed = 2")
    assert checkout.run(checkout.logged("b")) == 0
    assert checkout.log.read_text() == "a\nb\nb\n"
    known = parts.read_parts(checkout.result)
    assert parts.line_of(both[0], known).endswith(", on older code")
    assert not parts.line_of(both[1], known).endswith(", on older code")


def test_a_part_that_was_cut_off_keeps_what_was_over_before(checkout: Parts) -> None:
    """The result is written after each part, not at the end."""
    seen = checkout.root / "seen.json"
    copy = checkout.part("b", f"cp {checkout.result} {seen}")
    assert checkout.run(checkout.part("a"), copy) == 0
    assert list(parts.read_parts(seen)) == ["a"]


def test_a_part_that_takes_four_times_its_budget_is_ended(checkout: Parts) -> None:
    assert checkout.run(checkout.part("slow", "sleep 60", budget_min=0.25 / 60)) == 1
    assert checkout.outcomes()["slow"].startswith("took 4 times its budget")


@pytest.mark.parametrize(
    ("script", "listed"),
    [
        ("tests/nightly.py", nightly.PARTS),
        ("tests/real.py", real.PARTS),
        ("tests/engines/every_test.py", every_test.PARTS),
    ],
)
def test_the_list_has_every_part_and_runs_none(
    script: str, listed: tuple[Part, ...], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, script, "--list", "--result", str(tmp_path / "result.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [p.name for p in listed]
    assert not (tmp_path / "result.json").exists()


def test_each_file_with_tests_of_an_engine_is_a_part() -> None:
    files = {
        str(file.relative_to(ROOT))
        for file in ROOT.glob("plugins/*/tests/**/test_*.py")
        if "mark.engine" in file.read_text()
    }
    assert {word for p in every_test.PARTS for word in p.words() if word in files} == files


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")
@pytest.mark.parametrize("long", [nightly.PARTS, real.PARTS, every_test.PARTS])
def test_what_a_part_runs_is_in_the_checkout(long: tuple[Part, ...]) -> None:
    for pattern in {pattern for p in long for pattern in p.runs}:
        found = subprocess.run(
            ["git", "ls-files", "--", pattern], cwd=ROOT, capture_output=True, check=True
        )
        assert found.stdout, pattern


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")
def test_a_change_of_any_room_of_the_core_runs_a_part_again() -> None:
    command = ["git", "ls-files", "--"]
    tracked, run = (
        set(subprocess.run([*command, *paths], cwd=ROOT, capture_output=True).stdout.splitlines())
        for paths in (["gcore_core"], parts.SHARED)
    )
    assert tracked - run == set()


def test_the_committed_result_has_no_part_that_no_script_has() -> None:
    long = (nightly.PARTS, every_test.PARTS, real.PARTS, recipes_of_real_models.PARTS)
    assert parts.read_parts(parts.RESULT).keys() <= {
        part.name for listed in long for part in listed
    }


def test_what_a_part_runs_holds_what_its_distributions_require_and_no_others() -> None:
    own = set(parts.code_of("torch")) - set(parts.SHARED)
    folders = {path for path in own if path.startswith("plugins/")}
    names = ("gcore-torch", "gcore-language")
    assert folders == {f"plugins/{name}/{name.replace('-', '_')}" for name in names}


def test_all_pairs_all_recipes_and_all_files_of_commands_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import engine_pairs

    assert {part.command.split()[-1] for part in every_test.PAIRS} == set(engine_pairs.ALL)
    for long in (nightly.PARTS, every_test.PARTS, real.PARTS, recipes_of_real_models.PARTS):
        assert len(long) == len({p.name for p in long})
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert {*nightly.RECIPES, *real.RECIPES} == set(learning.BARS)
    known = {p.name: p for p in nightly.PARTS}
    assert all(known.get(p.name, p) == p for p in real.PARTS), "one name, two parts"
    assert {n for n in learning.BARS if "/" not in n} == set(recipes_of_real_models.TOYS)
    assert recipes == {*recipes_of_real_models.TOYS, *recipes_of_real_models.NAMES}
    for p in (*nightly.PARTS, *real.PARTS, *every_test.PARTS):
        for word in p.words():
            if word.startswith(("tests/", "benchmarks/")):
                file, _, test = word.partition("::")
                assert (ROOT / file).exists(), word
                assert test.partition("[")[0] in (ROOT / file).read_text() if test else True


@pytest.mark.parametrize("recipe", learning.BARS)
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


def test_a_stage_is_trained_after_those_that_it_begins_with_and_says_what_was_learned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(recipe: str, seed: int, folder: Path, *overrides: str) -> int:
        assert (folder / "recipes" / f"{recipe}.yaml").exists()
        ran.append(recipe.removeprefix("smollm2/feedback_"))
        return 0

    rows = [
        {"evaluation": evaluation}
        for evaluation in ({"greedy/kept": 0.2}, {}, {"greedy/kept": 0.7})
    ]
    monkeypatch.setattr(learning, "run_recipe", run)
    monkeypatch.setattr(learning, "read_metrics", lambda directory: rows)
    monkeypatch.setattr(sys, "argv", ["learning.py", "smollm2/feedback_ppo", "--seed", "2"])
    assert learning.main() == 0
    assert ran == ["sft", "reward_model", "ppo"]
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["recipe"], said["seed"]) == ("smollm2/feedback_ppo", 2)
    assert said["evaluations"] == [0.2, 0.7]
