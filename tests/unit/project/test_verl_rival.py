"""benchmarks/verl_rival.py: who takes turns, and what is claimed of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PYTHON = Path("python")


@pytest.fixture
def rival(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)  # it imports report.py, which lies beside it
    yield importlib.import_module("verl_rival")
    for name in ("verl_rival", "report"):
        del sys.modules[name]


def measured(step_s: float) -> dict[str, float]:
    return {"step_s": step_s, "memory_mib": 50.0}


def test_sides_take_turns_and_every_second_round_goes_backwards(rival: ModuleType) -> None:
    turns: list[str] = []

    def side(name: str) -> object:
        def run() -> dict[str, float]:
            turns.append(name)
            return measured(1.0)

        return run

    sides = {name: side(name) for name in ("ours", "verl_v1", "verl_old")}
    results = rival.measure_readers(sides, 3, lambda line: None)
    assert turns == [*sides, *reversed(sides), *sides]
    assert [len(results[name]) for name in sides] == [3, 3, 3]


def test_claims_are_ratios_of_medians_with_intervals_from_three_rounds_on(
    rival: ModuleType,
) -> None:
    results = {
        "ours": [measured(s) for s in (0.2, 0.25, 0.3)],
        "inline_single": [measured(s) for s in (2.0, 2.5, 3.0)],
        "verl_v1": [measured(s) for s in (1.0, 2.0, 3.0)],
    }
    claims = {claim.name: claim for claim in rival.readers_claims(results, "1GB")}
    assert claims["time_1GB_read_inline_single_over_ours"].value == pytest.approx(10)
    v1 = claims["verl_v1_time_1GB_read_over_ours"]
    assert v1.value == pytest.approx(8)
    assert v1.missed  # it is held to 10
    assert v1.interval is not None
    assert v1.interval[0] < 8 < v1.interval[1]
    two = {name: rounds[:2] for name, rounds in results.items()}
    assert all(claim.interval is None for claim in rival.readers_claims(two, "1GB"))


def test_a_side_without_memory_is_left_out(
    rival: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rival, "fits", lambda nbytes, needs: False)
    sides = {"ours": lambda: measured(1.0), **rival.verl_sides(PYTHON, 10**9, 256)}
    assert set(sides) == {"ours", *rival.V1, *rival.OLD}
    results = rival.measure_readers(sides, 1, lambda line: None)
    assert set(results) == {"ours"}
    names = {claim.name for claim in rival.readers_claims(results, "1GB")}
    assert names == {"step_s_ours_read_1GB", "peak_mib_ours_read_1GB"}


def test_each_path_of_verl_is_run_by_its_own_python_with_its_own_settings(
    rival: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[list[str], dict[str, str]]] = []

    def last_line(command: list[str], settings: dict[str, str]) -> dict[str, float]:
        ran.append((command, settings))
        return measured(1.0)

    monkeypatch.setattr(rival, "fits", lambda nbytes, needs: True)
    monkeypatch.setattr(rival, "last_line", last_line)
    for side in rival.verl_sides(PYTHON, 1000, 4).values():
        side()
    scripts = [Path(command[1]).name for command, _ in ran]
    assert scripts == ["verl_transferqueue.py"] * 2 + ["verl_controller.py"] * 2
    assert [command[-1] for command, _ in ran] == ["default", "tuned", "1", "1"]
    assert all((BENCHMARKS / script).exists() for script in scripts)
    assert ran[3][1] == {"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"}


def test_a_process_that_fails_ends_the_benchmark_with_what_it_said(rival: ModuleType) -> None:
    program = "import sys; sys.exit('no such tensor')"
    with pytest.raises(SystemExit, match="no such tensor"):
        rival.last_line([sys.executable, "-c", program], {})
