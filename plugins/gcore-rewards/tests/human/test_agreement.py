"""Agreement against examples of the literature, a library and a page of plain Python."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gcore_rewards.human.agreement import agreement
from gcore_rewards.human.commands import agreement as command
from gcore_rewards.human.judgements import Judgement
from gcore_rewards.human.places import places, table_of
from sklearn.metrics import cohen_kappa_score

from gcore_core.contract.errors import DataError

Table = dict[str, dict[str, str]]
#: A sum of a few dozen quotients in float64 is off by some 1e-15.
EXACT = 1e-12


def table_from(*raters: str) -> Table:
    """One text of values a rater, ``.`` where there is none."""
    table: Table = {}
    for rater, values in enumerate(raters):
        for unit, value in enumerate(values.split()):
            if value != ".":
                table.setdefault(f"u{unit}", {})[f"r{rater}"] = value
    return table


def drawn_table(seed: int, raters: int, units: int, missing: float) -> Table:
    rng = np.random.default_rng(seed)
    table: Table = {}
    for unit in range(units):
        truth = rng.integers(3)
        for rater in range(raters):
            if rng.random() >= missing:
                value = truth if rng.random() < 0.6 else rng.integers(3)
                table.setdefault(f"u{unit}", {})[f"r{rater}"] = "abc"[value]
    return table


def plain_alpha(table: Table) -> float:
    """Krippendorff's alpha by its definition: disagreement within units over that of all pairs."""
    units = [list(said.values()) for said in table.values() if len(said) > 1]
    values = [value for unit in units for value in unit]
    n = len(values)
    observed = sum(
        sum(a != b for a, b in itertools.permutations(unit, 2)) / (len(unit) - 1) for unit in units
    )
    expected = sum(a != b for a, b in itertools.permutations(values, 2)) / (n - 1)
    return 1 - observed / expected


def test_alpha_is_that_of_krippendorffs_own_examples() -> None:
    """Computing Krippendorff's Alpha-Reliability, 2011: examples A (binary) and C (nominal)."""
    binary = table_from("0 1 0 0 0 0 0 0 1 0", "1 1 1 0 0 1 0 0 0 0")
    assert agreement(binary).alpha.value == pytest.approx(0.095, abs=5e-4)  # as printed there
    nominal = table_from(
        "1 2 3 3 2 1 4 1 2 . . .",
        "1 2 3 3 2 2 4 1 2 5 . 3",
        ". 3 3 3 2 3 4 2 2 5 1 .",
        "1 2 3 3 2 4 4 1 2 5 1 .",
    )
    measured = agreement(nominal)
    assert measured.alpha.value == pytest.approx(0.743, abs=5e-4)
    assert (measured.raters, measured.units, measured.kappa) == (4, 11, None)


@pytest.mark.parametrize("seed", range(5))
def test_alpha_is_that_of_its_definition_with_values_missing(seed: int) -> None:
    table = drawn_table(seed, raters=4, units=30, missing=0.3)
    assert agreement(table, samples=2).alpha.value == pytest.approx(plain_alpha(table), abs=EXACT)


def test_kappa_is_that_of_a_worked_example() -> None:
    """50 grants: 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no; p_o = 0.7, p_e = 0.5."""
    cells = {("y", "y"): 20, ("y", "n"): 5, ("n", "y"): 10, ("n", "n"): 15}
    pairs = [pair for pair, count in cells.items() for _ in range(count)]
    table = {str(i): {"a": one, "b": other} for i, (one, other) in enumerate(pairs)}
    measured = agreement(table)
    assert measured.kappa is not None
    assert measured.kappa.value == pytest.approx(0.4, abs=EXACT)
    assert measured.equal.value == pytest.approx(0.7, abs=EXACT)


@pytest.mark.parametrize("seed", range(5))
def test_kappa_is_that_of_scikit_learn(seed: int) -> None:
    table = drawn_table(seed, raters=2, units=40, missing=0.0)
    first, second = ([said[rater] for said in table.values()] for rater in ("r0", "r1"))
    expected = cohen_kappa_score(first, second)
    kappa = agreement(table, samples=2).kappa
    assert kappa is not None and kappa.value == pytest.approx(expected, abs=EXACT)


def test_the_share_of_equal_judgements_is_over_pairs_of_raters() -> None:
    table = table_from("a a a", "a b .", "b b b")
    # Of three pairs in the first unit one is equal, of three in the second one, of one none.
    assert agreement(table).equal.value == pytest.approx(2 / 7, abs=EXACT)


def test_intervals_hold_what_many_other_samples_of_pairs_show() -> None:
    """The interval of one sample is as wide as the spread over 300 samples, within a third."""
    values = [
        agreement(drawn_table(seed, raters=3, units=60, missing=0.0), samples=2).alpha.value
        for seed in range(300)
    ]
    spread = float(np.diff(np.percentile(values, [2.5, 97.5]))[0])
    widths = []
    for seed in range(10):
        measured = agreement(drawn_table(seed, raters=3, units=60, missing=0.0)).alpha
        assert measured.low < measured.value < measured.high
        widths.append(measured.high - measured.low)
    assert np.mean(widths) == pytest.approx(spread, rel=1 / 3)


def test_what_is_undefined_is_no_number() -> None:
    alike = agreement(table_from("a a a", "a a a"))
    assert alike.equal.value == 1.0
    assert alike.kappa is not None
    assert math.isnan(alike.alpha.value) and math.isnan(alike.kappa.value)
    nobody = agreement(table_from("a b c"))
    assert nobody.units == 0 and math.isnan(nobody.alpha.value)


def said(rater: str, verdict: str, left: str = "x", pair: str = "p", number: int = 1) -> Judgement:
    right = "y" if left == "x" else "x"
    chosen = {"left": left, "right": right}.get(verdict)
    return Judgement(
        number=number,
        pair=pair,
        prompt="q",
        verdict="better" if chosen else verdict,  # type: ignore[arg-type]
        chosen=chosen,
        rejected=({"x", "y"} - {chosen}).pop() if chosen else None,
        tie=verdict in ("tie", "bad"),
        answers=(left, right),
        origins=("", ""),
        rater=rater,
        seconds=1.0,
        time_unix_s=0.0,
    )


def test_two_who_prefer_the_same_answer_agree_whatever_its_side() -> None:
    lines = [said("a", "left", left="x"), said("b", "right", left="y"), said("c", "skip")]
    assert table_of(lines) == {"p": {"a": "first", "b": "first"}}


def test_a_habit_of_a_side_and_a_second_look_are_told() -> None:
    lines = [said("a", "left", left="x"), said("a", "left", left="y"), said("b", "tie")]
    assert places(lines) == {"left_preferred": 1.0, "equal_in_both_orders": 0.0}
    assert places([said("a", "tie")]) == {}
    assert table_of(lines)["p"] == {"a": "first", "b": "tie"}
    assert places([said("a", "left", left="x"), said("a", "right", left="y")]) == {
        "left_preferred": 0.5,
        "equal_in_both_orders": 1.0,
    }


def test_the_command_prints_and_refuses_a_file_with_one_rater(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "j.jsonl"
    lines = [
        said(rater, "left" if number % 3 else other, pair=f"p{number}", number=2 * number + i)
        for number in range(9)
        for i, (rater, other) in enumerate((("a", "right"), ("b", "tie")))
    ]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert command([str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["equal"]["value"] == pytest.approx(6 / 9)
    assert printed["kappa"]["low"] <= printed["kappa"]["value"]
    assert command([str(path)]) == 0
    assert "Cohen's kappa" in capsys.readouterr().out
    path.write_bytes(msgspec.json.encode(lines[0]) + b"\n")
    with pytest.raises(DataError, match="no pair was judged by two raters"):
        command([str(path)])
    with pytest.raises(DataError, match="no such file"):
        command([str(tmp_path / "none")])


def test_a_seed_below_zero_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command([str(tmp_path / "none"), "--seed", "-1"])
    assert "--seed: must be at least 0, is -1" in capsys.readouterr().err
