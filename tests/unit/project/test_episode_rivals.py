"""benchmarks/episode_rivals.py: both sides must have played the same, and a rival may be absent."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MODULES = ("episode_rivals", "episode_rounds", "scripted_episodes", "report", "figures")


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)  # each imports others that lie beside it
    yield importlib.import_module("episode_rivals")
    for name in MODULES:
        sys.modules.pop(name, None)


def episodes(rivals: ModuleType, *, prompt: int = 2, said: int = 7, turns: int = 0) -> list[object]:
    """As many as a round has, of turns with one id each, between which one id is given."""
    turns = turns or rivals.rounds.TURNS
    ids = [5] * prompt + [said, 9] * turns
    sampled = [0] * prompt + [1, 0] * turns
    return [rivals.Episode(ids=ids, sampled=sampled)] * rivals.rounds.EPISODES


def test_sides_that_say_and_are_told_the_same_may_have_other_prompts(rivals: ModuleType) -> None:
    assert rivals.difference_of(episodes(rivals), episodes(rivals, prompt=5)) == ""


def test_an_episode_or_a_turn_too_few_or_another_id_or_mark_is_a_difference(
    rivals: ModuleType,
) -> None:
    whole = episodes(rivals)
    assert "theirs are 15 episodes, not 16" in rivals.difference_of(whole[1:], whole)
    few = episodes(rivals, turns=29)
    assert "ours have [29] turns, not 30" in rivals.difference_of(whole, few)
    other = [*whole[1:], episodes(rivals, said=8)[0]]
    assert rivals.difference_of(whole, other).startswith("episode 15: ")
    ids, sampled = whole[0].ids, list(whole[0].sampled)
    sampled[-1] = 1
    trained = [rivals.Episode(ids=ids, sampled=sampled), *whole[1:]]
    assert rivals.difference_of(whole, trained).startswith("episode 0: ")


def test_a_rival_without_an_interpreter_is_told_and_left_out(
    rivals: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(rivals, "TOX", tmp_path / "tox")
    monkeypatch.setenv("G_CORE_PEERS", str(tmp_path / "peers"))
    parser = argparse.ArgumentParser()
    rivals.add_rival_options(parser)
    args = parser.parse_args(["--trl-python", "/no/python"])
    assert rivals.rivals(args, tmp_path) == []
    verifiers, trl = capsys.readouterr().err.splitlines()
    assert verifiers == (
        f"verifiers is not measured: there is no {tmp_path}/tox/bench-verifiers/bin/python and no "
        f"{tmp_path}/peers/verifiers/bin/python. `tox run -e bench-verifiers --notest` makes one "
        "with verifiers==0.4.0 renderers==0.1.12; another is given by --verifiers-python."
    )
    assert trl.startswith("trl is not measured: there is no /no/python.")


def test_an_interpreter_among_the_peers_is_found(
    rivals: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "trl/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(rivals, "TOX", tmp_path / "tox")
    monkeypatch.setenv("G_CORE_PEERS", str(tmp_path))
    assert rivals._python_of(rivals.SIDES[1], None) == python


def test_a_rival_plays_when_it_is_asked_whatever_its_libraries_print(
    rivals: ModuleType, tmp_path: Path
) -> None:
    script = tmp_path / "rival.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.append({str(BENCHMARKS)!r})
        import episode_rounds as rounds
        print("a library greets")

        def play():
            print("a library is busy")
            episode = {{"ids": [1, 2], "sampled": [0, 1]}}
            return {{"cpu_s": 2.5, "errors": [], "episodes": [episode]}}

        rounds.serve(play)
        """)
    )
    rival = rivals._Rival([sys.executable, script], tmp_path / "log")
    try:
        for _ in range(2):
            assert rival.play() == (2.5, [rivals.Episode(ids=[1, 2], sampled=[0, 1])])
    finally:
        rival.close()
    assert (tmp_path / "log").read_text().count("a library is busy") == 2


def test_a_rival_that_fails_ends_the_benchmark_with_its_own_words(
    rivals: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="no such package"):
        rivals._Rival(
            [sys.executable, "-c", "raise SystemExit('no such package')"], tmp_path / "log"
        )


def test_the_clock_counts_a_child_that_runs_and_one_that_has_ended(rivals: ModuleType) -> None:
    spends = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before_s = rivals.rounds.cpu_s()
    with subprocess.Popen(
        [sys.executable, "-c", spends], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running_s = rivals.rounds.cpu_s()
        assert running_s - before_s >= 0.3
        child.communicate(os.linesep.encode())
    assert rivals.rounds.cpu_s() >= running_s - 0.02  # ended children are counted in ticks
