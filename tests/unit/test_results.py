"""Results of benchmarks: what is kept, what is measured again, and what pages say of them."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
IN_GIT = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")


class Scripts(NamedTuple):
    measured: ModuleType
    page: ModuleType
    report: ModuleType
    run_all: ModuleType


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripts]:
    monkeypatch.syspath_prepend(BENCHMARKS)  # each imports others that lie beside it
    yield Scripts(*(importlib.import_module(name) for name in Scripts._fields))
    for name in Scripts._fields:
        del sys.modules[name]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a benchmark that measures ``code.py``."""
    root = tmp_path / "checkout"
    (root / "benchmarks").mkdir(parents=True)
    (root / "code.py").write_text("speed = 1\n")
    (root / "benchmarks" / "speed.py").write_text(
        "import json, pathlib, sys\n"
        "content = {'benchmark': 'speed', 'commit': 'abc', 'date': '2026-01-01', 'claims': []}\n"
        "pathlib.Path(sys.argv[2]).write_text(json.dumps(content))\n"
    )
    commit(root)
    return root


def commit(root: Path) -> None:
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-q", "-m", "Change"]):
        subprocess.run(["git", *words], cwd=root, check=True)


@pytest.fixture
def benchmark(scripts: Scripts, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(scripts.measured, "RESULTS", checkout / "results")
    (checkout / "results").mkdir()
    return scripts.run_all.Benchmark(name="speed", measures=("code.py",))


def test_a_result_is_kept_until_a_file_that_it_measures_changes(
    scripts: Scripts, checkout: Path, benchmark: Any
) -> None:
    run_all = scripts.run_all
    assert not run_all.is_fresh(benchmark, checkout)
    assert run_all.run_benchmark(benchmark, checkout) == ""
    assert run_all.is_fresh(benchmark, checkout)
    (checkout / "other.py").write_text("beside = True\n")
    commit(checkout)
    assert run_all.is_fresh(benchmark, checkout)
    (checkout / "code.py").write_text("speed = 2\n")
    assert not run_all.is_fresh(benchmark, checkout)


def test_a_comment_or_a_docstring_makes_no_result_stale(
    scripts: Scripts, checkout: Path, benchmark: Any
) -> None:
    assert scripts.run_all.run_benchmark(benchmark, checkout) == ""
    (checkout / "code.py").write_text('"""Says how fast."""\n\n# in rows\nspeed = (\n    1\n)\n')
    assert scripts.run_all.is_fresh(benchmark, checkout)
    (checkout / "code.py").write_text('"""Says how fast."""\n\nspeed = "1"\n')
    assert not scripts.run_all.is_fresh(benchmark, checkout)


def test_what_runs_is_all_of_a_source_but_its_texts(scripts: Scripts) -> None:
    def what_runs(source: str) -> str:
        return str(scripts.measured.what_runs(source.encode()).decode())

    assert what_runs('def f():\n    """Nothing."""\n') == "def f():\n    pass"
    assert (
        what_runs('if a:\n    "b"\nelse:\n    c = "d"\n') == "if a:\n    pass\nelse:\n    c = 'd'"
    )
    assert what_runs("lambda: 'kept'") == "lambda: 'kept'"
    assert what_runs("no python (") == "no python ("


def test_what_is_not_committed_is_not_measured(
    scripts: Scripts, checkout: Path, benchmark: Any
) -> None:
    (checkout / "code.py").write_text("speed = 2\n")
    reason = scripts.run_all.run_benchmark(benchmark, checkout)
    assert reason.startswith("code.py is not committed")
    assert not benchmark.result.exists()


def test_a_benchmark_that_fails_keeps_its_old_result(
    scripts: Scripts, checkout: Path, benchmark: Any
) -> None:
    assert scripts.run_all.run_benchmark(benchmark, checkout) == ""
    before = benchmark.result.read_text()
    (checkout / "benchmarks" / "speed.py").write_text("raise SystemExit(3)\n")
    commit(checkout)
    reason = scripts.run_all.run_benchmark(benchmark, checkout)
    assert reason.startswith("exit code 3")
    assert benchmark.result.read_text() == before


def test_others_go_on_when_one_fails_and_the_exit_code_tells(
    scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmarks = [scripts.run_all.Benchmark(name=name, measures=()) for name in ("a", "b", "c")]
    ran = []

    def run(benchmark: Any) -> str:
        ran.append(benchmark.name)
        return "no reason" if benchmark.name == "b" else ""

    def can_keep(benchmark: Any) -> bool:
        return bool(benchmark.name == "a")

    assert scripts.run_all.run_all(benchmarks, fresh=False, run=run, can_keep=can_keep) == 1
    assert ran == ["b", "c"]
    assert "a: kept\nb: FAILED, no reason\nc: measured\n" in capsys.readouterr().out
    assert scripts.run_all.run_all(benchmarks[::2], fresh=True, run=run, can_keep=can_keep) == 0
    assert ran == ["b", "c", "a", "c"]


def test_the_quickest_comes_first_and_none_starts_that_would_not_be_over_in_time(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.measured, "RESULTS", Path("/nowhere"))
    of_minutes = {"long": 9, "short": 1, "middle": 4}
    benchmarks = [
        scripts.run_all.Benchmark(name=name, measures=(), minutes=minutes)
        for name, minutes in of_minutes.items()
    ]
    clock = {"s": 0.0}
    ran = []

    def run(benchmark: Any) -> str:
        ran.append(benchmark.name)
        clock["s"] += benchmark.minutes * 60
        return ""

    exit_code = scripts.run_all.run_all(
        benchmarks, fresh=True, minutes=10, run=run, now_s=lambda: clock["s"]
    )
    assert exit_code == 0
    assert ran == ["short", "middle"]
    assert "long: not started, it takes about 9 min\n" in capsys.readouterr().out


def test_only_what_is_not_timed_runs_beside_another(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.measured, "RESULTS", Path("/nowhere"))
    benchmarks = [
        scripts.run_all.Benchmark(name=name, measures=(), timed=name.startswith("timed"))
        for name in ("timed-a", "b", "timed-c", "d")
    ]
    both_run = threading.Barrier(2, timeout=60)  # opens for two at once only
    running: set[str] = set()

    def run(benchmark: Any) -> str:
        running.add(benchmark.name)
        if benchmark.timed:
            assert running == {benchmark.name}
        else:
            both_run.wait()
        running.discard(benchmark.name)
        return ""

    assert scripts.run_all.run_all(benchmarks, fresh=True, at_once=2, run=run) == 0


def test_a_result_says_how_long_it_took_and_the_next_plan_goes_by_that(
    scripts: Scripts, checkout: Path, benchmark: Any
) -> None:
    assert benchmark.last_s is None
    assert benchmark.expected_s == benchmark.minutes * 60
    result = {"benchmark": "speed", "commit": "abc", "date": "2026-01-01", "claims": []}
    scripts.run_all.write_result(benchmark.result, result, "code", 1234.4)
    assert benchmark.last_s == benchmark.expected_s == 1234
    assert scripts.run_all.duration(benchmark) == "21 min"
    assert scripts.run_all.listing([benchmark]) == [
        "stale  speed: takes 21 min",
        "1 of 1 are stale: 21 min",
    ]


def test_every_script_that_publishes_a_result_is_known(scripts: Scripts) -> None:
    """``parts`` publishes for scripts, and ``decode_real`` is a part of real_model."""
    names = {benchmark.script for benchmark in scripts.measured.BENCHMARKS}
    publishing = {
        path.stem
        for path in BENCHMARKS.glob("*.py")
        if any(call in path.read_text() for call in ("add_options(parser)", "import run_parts"))
    }
    assert publishing - names == {"decode_real", "parts"}
    assert {"asynchronous", "large", "roles"} <= publishing


def test_what_needs_a_gpu_is_left_out_where_there_is_none(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--list"])
    for there_is in (False, True):
        monkeypatch.setattr(scripts.run_all, "has_gpu", lambda found=there_is: found)
        assert scripts.run_all.main() == 0
        assert ("  gpu:" in capsys.readouterr().out) == there_is


def test_every_result_has_a_benchmark_that_says_what_it_measures(scripts: Scripts) -> None:
    names = {benchmark.name for benchmark in scripts.measured.BENCHMARKS}
    claims = {
        path.stem
        for path in scripts.measured.RESULTS.glob("*.json")
        if "claims" in json.loads(path.read_text())
    }
    assert claims <= names
    for benchmark in scripts.measured.BENCHMARKS:
        for path in benchmark.paths:
            assert (ROOT / path).exists(), f"{benchmark.name}: {path}"


def test_an_interval_holds_the_statistic_and_narrows_with_more_rounds(scripts: Scripts) -> None:
    rounds = [(10.0 + i % 5, 5.0 + i % 3) for i in range(60)]
    few = scripts.report.interval(rounds[:6], scripts.report.median_ratio)
    many = scripts.report.interval(rounds, scripts.report.median_ratio)
    assert many[0] <= scripts.report.median_ratio(rounds) <= many[1]
    assert many[1] - many[0] < few[1] - few[0]
    assert scripts.report.interval(rounds[:2], scripts.report.median_ratio) is None


def test_a_result_names_its_commit_and_only_repeated_claims_have_an_interval(
    scripts: Scripts, tmp_path: Path
) -> None:
    report = scripts.report
    claims = [report.Claim("once", 1.0, "s"), report.Claim("often", 1.0, "s", interval=(0.5, 2))]
    args = argparse.Namespace(json=False, check=False, out=tmp_path / "result.json")
    assert report.publish("sample", claims, args, []) == 0
    result = json.loads(args.out.read_text())
    assert result["commit"] == report.commit()
    assert set(result) == {"benchmark", "commit", "date", "machine", "versions", "claims"}
    assert result["claims"] == [
        {"name": "once", "value": 1.0, "unit": "s", "bar": None, "op": ">="},
        {"name": "often", "value": 1.0, "unit": "s", "bar": None, "op": ">=", "interval": [0.5, 2]},
    ]


@IN_GIT
def test_the_page_of_results_is_what_the_results_make(scripts: Scripts) -> None:
    """A change of code makes a result stale, which the page says: it must be written anew."""
    if scripts.page.PAGE.read_text() != scripts.page.render():
        stale = ", ".join(scripts.page.stale_names()) or "none"
        pytest.fail(
            "docs/reference/benchmarks.md is not what the results and this code make "
            f"(stale: {stale}). Nothing needs to be measured; run this and commit the page:\n\n"
            "    python benchmarks/page.py\n",
            pytrace=False,
        )


@IN_GIT
def test_what_the_test_of_the_page_asks_for_mends_it(scripts: Scripts, tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("of other results\n")
    scripts.page.PAGE = page
    with pytest.raises(pytest.fail.Exception, match="    python benchmarks/page.py\n"):
        test_the_page_of_results_is_what_the_results_make(scripts)
    scripts.page.write()
    test_the_page_of_results_is_what_the_results_make(scripts)


def test_figures_of_all_pages_are_those_of_the_results(scripts: Scripts) -> None:
    value_of = scripts.page.values(scripts.page.results())
    wrong = {
        str(path.relative_to(ROOT)): lines
        for path in scripts.page.pages()
        if (lines := scripts.page.wrong_figures(path.read_text(), value_of))
    }
    assert not wrong


def test_a_figure_that_is_not_the_result_s_is_told(scripts: Scripts) -> None:
    value_of = {"a.ratio": 1.7459, "a.share": 0.0267, "a.mib": 1331.2, "a.count": 11661.0}
    right = (
        "1.75<!-- result: a.ratio --> times, 2.7%<!-- result: a.share -->, "
        "1.3 GiB<!-- result: a.mib / 1024 -->, 11,661<!-- result: a.count --> groups"
    )
    assert scripts.page.wrong_figures(right, value_of) == []
    wrong = "1.74<!-- result: a.ratio -->, 2.6%<!-- result: a.share -->, 1<!-- result: b.c -->"
    assert scripts.page.wrong_figures(wrong, value_of) == [
        "1.74: a.ratio is 1.7459",
        "2.6: a.share is 2.67",
        "1: no result has a claim b.c",
    ]
    with pytest.raises(ValueError, match="1 comments name a result, 0 of a number"):
        scripts.page.wrong_figures("many<!-- result: a.ratio -->", value_of)


def test_a_row_says_whether_its_bar_is_met(scripts: Scripts) -> None:
    claim = {"name": "speed", "value": 0.5, "unit": "ratio", "bar": 1.0, "op": ">="}
    assert scripts.page.row(claim) == "| `speed` | 0.5 |  | ratio | >= 1 | **missed** |"
    claim |= {"value": 1234.5, "interval": [1000, 2000]}
    assert scripts.page.row(claim) == ("| `speed` | 1,234 | 1,000 to 2,000 | ratio | >= 1 | met |")


def test_a_result_that_is_older_than_what_it_measures_is_marked(scripts: Scripts) -> None:
    result = {
        "benchmark": "speed",
        "commit": "abc",
        "date": "2026-01-01",
        "machine": {"cores": 2, "processor": "P", "memory_gib": 1, "load_1min": 0.1},
        "claims": [],
    }
    assert "**stale**" in scripts.page.section(result, stale=True)
    assert "**stale**" not in scripts.page.section(result, stale=False)
