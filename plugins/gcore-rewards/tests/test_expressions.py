"""``rewards/math``: expressions that are equal are 1, others 0, and none can hold a scorer up."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gcore_rewards import expressions, math_child
from gcore_rewards.config import MathConfig
from gcore_rewards.expressions import Comparer, MathReward, Stuck, Verdict
from gcore_testing.contracts.scorer import scored_record

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.scorer import Score, ScoredRecord

pytest.importorskip("math_verify", reason="needs gcore-rewards[math]")

pytestmark = pytest.mark.rest

CONTEXT = WorkerContext(role="scorer")
#: Expressions that sympy would compute for longer than anybody waits.
ENDLESS = (r"\boxed{9^{9^{9^{9^9}}}}", "so it is 9**9**9**9**9")
#: An answer whose grammar alone takes longer than 0.05 s of CPU time.
SLOWLY_READ = "+".join([r"\frac{x^{2}}{y}"] * 500)


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    made = MathReward(MathConfig(), CONTEXT)
    yield made
    made.close()


def record(text: str, **fields: Any) -> ScoredRecord:
    return scored_record(5, text, fields)


def value(reward: MathReward, text: str, answer: Any) -> float | None:
    return reward.score([record(text, answer=answer)])[0].value


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so it is $\frac{1}{2}$.", "1/2"),
        (r"so it is $\frac{1}{2}$.", r"\frac{1}{2}"),
        ("0.5", r"$\frac12$"),
        (r"\boxed{2}", r"\sqrt{4}"),
        (r"\boxed{(1, 2)}", "(1,2)"),
        (r"$x = 1, y = 2$", "x=1, y=2"),
        (r"\boxed{1 + 2x}", "2x+1"),
        (r"$4:30$", "4:30"),
        ("1234", "1,234"),
        ("31", 31),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}"),
        (r"it is $3$, no: \boxed{4}, as $5$ shows", 4),
    ],
)
def test_equal_expressions_are_1(reward: MathReward, text: str, answer: Any) -> None:
    assert value(reward, text, answer) == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", 31),
        ("I do not know", 31),
        ("30", 31),
        ("$7/2$", "1/2"),
        ("2", "1/2"),
        ("$5:30$", "4:30"),
        ("$(5,2)$", "(1,2)"),
        ("2", "(1, 2)"),
        ("$x = 5, y = 2$", "x=1, y=2"),
        ("2", "x=1, y=2"),
        (r"\boxed{4}", r"\sqrt{4}"),
        (r"\boxed{2x}", "2x+1"),
        ("2", "2x+1"),
    ],
)
def test_other_expressions_are_0(reward: MathReward, text: str, answer: Any) -> None:
    assert value(reward, text, answer) == 0


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        # of several boxes the last one counts, unless the answer is a list
        ("11", "\\boxed{10}\n\\boxed{11}", True),
        ("11", r"It is \boxed{10}, no: \boxed{11}", True),
        ("10", "\\boxed{10}\n\\boxed{11}", False),
        (r"\frac{\pi}{2}", r"\boxed{\pi}, no: \boxed{\frac{\pi}{2}}", True),
        (r"\pi", "\\boxed{\\pi}\n\\boxed{\\frac{\\pi}{2}}", False),
        ("1, 2", r"\boxed{1}, \boxed{2}", True),
        (r"\{1, 2\}", r"\boxed{2} and \boxed{1}", True),
        # boxes that hold nothing, are never closed, or are in boxes
        ("5", r"\boxed{}", False),
        ("5", r"\boxed{5", False),
        ("5", r"\boxed{5} so \boxed{51", False),
        ("5", r"\boxed{\boxed{5}}", True),
        ("3", r"\fbox{3}", True),
        # exponents
        (1e-07, r"\boxed{0.0000001}", True),
        (1e-07, r"\boxed{0}", False),
        ("1e-07", "so it is 1e-07", True),
        ("1e3", r"\boxed{1000}", True),
        ("0.001", "$1e-3$", True),
        ("e-3", r"\boxed{1e-3}", False),
        ("e-3", r"\boxed{e-3}", True),
        ("(1e-3, 2)", r"\boxed{(0.001, 2)}", True),
        ("1.5", "1.5e3", False),
        # mixed numbers, separators, signs, percentages, units
        ("2.5", r"\boxed{2 1/2}", True),
        ("1.5", r"\boxed{2 1/2}", False),
        ("1", "so it is 2 1/2", False),
        (r"(\frac{5}{2}, 1)", r"\boxed{(2½, 1)}", True),
        ("1234", r"\boxed{1 234}", True),
        ("235", r"\boxed{1 234}", False),
        ("1234", r"\boxed{(1,234)}", False),
        ("1", r"\boxed{1_000}", False),
        ("-5", "\u22125", True),
        ("5", "so it is \u2013 5", False),
        ("0.5", r"\boxed{50\%}", True),
        ("50", r"\boxed{50}\%", True),
        ("20", r"\boxed{20\text{ cm}^2}", True),
        ("5", r"\boxed{5 apples}", True),
        ("5", r"\boxed{5\text{ million}}", False),
        ("1.5", "about 1.5 million", False),
        ("1.5", r"$1.5$ million people", False),
        # what is one number, and what is none
        ("4", r"\boxed{\sqrt{16}}", True),
        ("6", r"\boxed{2 \cdot 3}", True),
        ("6", r"\boxed{3!}", True),
        ("5", r"\boxed{x = 5}", True),
        ("x = 5", r"\boxed{5}", True),
        ("x = 5", r"\boxed{y = 5}", False),
        (r"\frac{9}{4}\pi", r"\boxed{\frac94\pi}", True),
        (r"2^{10}", r"\boxed{1024}", True),
        (r"2^{10}", r"\boxed{1024 \text{ million}}", False),
        ("5", r"\boxed{x = 5, y = 6}", False),
        ("6", r"\boxed{x = 5, y = 6}", False),
        ("5", r"\boxed{x \ne 5}", False),
        ("5", r"\boxed{5 or 6}", False),
        ("3", r"\boxed{7 \bmod 3}", False),
        ("3", "7 mod 3", False),
        ("16", "so sqrt(16)", False),
        ("2", "so 2x", False),
        ("12", "12:30", False),
        ("0.4", r"\boxed{12:30}", False),
        ("1.2", "1.2.3", False),
        ("0", r"\boxed{0x1F}", False),
        ("3.14", r"\boxed{3.14\ldots}", False),
        ("204", r"\boxed{204_5}", False),
        ("5", "not 5", False),
        ("5", "The answer is 5. I took 3 steps.", True),
        ("3", "The answer is 5. I took 3 steps.", False),
        ("5", "<answer>5</answer>", True),
        # exact numbers are compared exactly, others to six places
        ("1/3", r"\boxed{0.333333}", True),
        ("1/2016", r"\boxed{1/2017}", False),
        # words are no products of letters
        ("blue", r"\boxed{lube}", False),
        ("blue", r"\boxed{\text{Blue}}", True),
        # the same letters are the same
        ("12:00", r"\boxed{12:00}", True),
        ("1,2", r"\boxed{1,2}", True),
        ("1,2", r"\boxed{2,1}", True),
        (r"1-\frac{1}{\mathrm{e}}", r"\boxed{1+\frac{1}{\mathrm{e}}}", False),
    ],
)
def test_what_math_verify_would_read_as_something_else_is_read_as_what_it_says(
    reward: MathReward, answer: Any, text: str, right: bool
) -> None:
    assert value(reward, text, answer) == right


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (r"x \equiv 3 \pmod 7", r"x \equiv 4 \pmod 7"),
        (r"n \equiv 3 \pmod{7}", r"n \equiv 3 \pmod{5}"),
        (r"n \equiv 3 \pmod{7}", "3"),
        ("2516_8", "2516"),
        ("2516_8", "2516_9"),
        ("101_2", "101_3"),
        ("0x1F", "0x2F"),
        ("0x1F", "0"),
        ("f'(x)", "f(x)"),
        ("f'(x) = 2x", "f(x) = 2x"),
        ("x'", "x"),
        (r"1\text{ ft } 6 \text{ in}", r"1\text{ ft } 8 \text{ in}"),
        (r"1 \text{ hour } 30 \text{ minutes}", r"1 \text{ hour } 20 \text{ minutes}"),
        ("2024-01-05", "2018"),
        ("10-12", "-2"),
        ("3-5", "-2"),
        ("1/2/2024", r"\frac{1}{4048}"),
        ("12:30", "0.4"),
        ("a=1,b=2", "2,1"),
        ("IV", "VI"),
        ("XL", "LX"),
        ("CO", "OC"),
        ("1F", "F1"),
        ("no", "on"),
        ("Co", "CO"),
        ("m", "M"),
        ("f", "F"),
        (r"25^\circ\text{C}", r"25^\circ\text{F}"),
        (r"5\text{ cm}", r"5\text{ km}"),
        ("2 hours", "2 minutes"),
        ("5m", "5cm"),
        (r"90^\circ", r"90\text{ radians}"),
    ],
)
def test_what_math_verify_leaves_out_of_an_answer_must_be_right_too(
    reward: MathReward, answer: str, content: str
) -> None:
    assert value(reward, rf"\boxed{{{answer}}}", answer) == 1
    assert value(reward, rf"\boxed{{{content}}}", answer) == 0
    assert value(reward, f"The answer is ${content}$.", answer) == 0


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (r"n \equiv 3 \pmod{7}", r"n \equiv 3 \pmod 7"),
        ("2516_8", "2516_{8}"),
        ("0x1F", "0x1f"),
        ("f'(x) = 2x", "2x"),
        (r"1\text{ ft } 6 \text{ in}", "1 ft 6 in"),
        ("10-12", "10--12"),
        ("a=1,b=2", "b=2,a=1"),
        ("a=1,b=2", "(1,2)"),
        (r"x=1 \text{ or } x=2", "2, 1"),
        ("no", "No"),
        ("xy", "yx"),
        (r"25^\circ\text{C}", r"25^\circ C"),
        (r"5\text{ cm}", "5"),
        (r"5\text{ cm}", r"5.0\,\text{cm}"),
        (r"5\text{ cm}", r"5\text{ centimeters}"),
        (r"24\pi\text{ cm}^2", r"24\pi"),
        (r"90^\circ", r"90\text{ degrees}"),
        (r"x \in [-2,7]", "[-2,7]"),
        (r"\binom{5}{2}", "10"),
        (r"\frac13", r"0.\overline{3}"),
        (r"\frac{7}{6}", r"1.1\overline{6}"),
        (r"0.\overline{3}", r"\frac13"),
        (r"e^{i\pi}", "-1"),
    ],
)
def test_answers_that_math_verify_does_not_read_whole_may_be_written_in_several_ways(
    reward: MathReward, answer: str, content: str
) -> None:
    assert value(reward, rf"\boxed{{{content}}}", answer) == 1


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("A", "The answer is (A).", True),
        ("A", "The answer is B, not A.", False),
        ("2516_8", "The answer is $2516_8$.", True),
        ("5 cm", "It is 5 cm.", True),
        ("5 cm", "It is 5 km.", False),
        ("5 cm", "It is $5$ km.", False),
        ("Blue", "The answer is blue.", True),
    ],
)
def test_answers_of_letters_and_units_are_found_without_a_box(
    reward: MathReward, answer: str, text: str, right: bool
) -> None:
    assert value(reward, text, answer) == right


@pytest.mark.slow  # 700 comparisons
def test_no_spelling_that_is_no_number_is_rewarded_as_a_part_of_it(reward: MathReward) -> None:
    """Each digit group of the text, as the row's answer: 16 of ``sqrt(16)``."""
    path = Path(__file__).with_name("number_spellings.jsonl")
    spellings = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    plain = [s["text"] for s in spellings if s["right"] is None and "box" not in s["text"]]
    records = [
        record(text, answer=part)
        for text in plain
        for part in sorted(set(re.findall(r"[0-9]+", text)))
    ]
    rewarded = [
        (r.text, r.prompt.fields["answer"])
        for r, score in zip(records, reward.score(records), strict=True)
        if score.value != 0
    ]
    assert rewarded == []


@pytest.mark.parametrize("text", ENDLESS)
def test_an_expression_without_end_is_0_and_the_next_is_compared(text: str) -> None:
    comparer = Comparer(MathConfig(time_s=0.5))
    assert comparer.find(["2"], text).verdict is Verdict.EXCEEDED
    comparer.close()
    reward = MathReward(MathConfig(time_s=0.5), CONTEXT)
    began_s = time.monotonic()
    scores = reward.score([record("2", answer=2), record(text, answer=2), record("3", answer=3)])
    took_s = time.monotonic() - began_s
    reward.close()
    assert [score.value for score in scores] == [1, 0, 1]
    assert took_s < 60


def test_limits_hold_outside_of_the_main_thread() -> None:
    """A scorer calls rewards in the main thread; who calls one elsewhere can set no alarm there."""
    scores: list[Score] = []

    def score() -> None:
        reward = MathReward(MathConfig(time_s=0.5), CONTEXT)
        scores.extend(reward.score([record(ENDLESS[0], answer=2), record("2", answer=2)]))
        reward.close()

    thread = threading.Thread(target=score)
    thread.start()
    thread.join(60)
    assert [score.value for score in scores] == [0, 1]


@pytest.mark.parametrize(("answer", "time_s"), [("", 5.0), ("$$", 5.0), (SLOWLY_READ, 0.05)])
def test_a_row_whose_answer_cannot_be_compared_is_refused(answer: str, time_s: float) -> None:
    """It holds nothing, or it cannot be read in time."""
    reward = MathReward(MathConfig(time_s=time_s), CONTEXT)
    with pytest.raises(DataError) as caught:
        reward.score([record("1", answer=answer)])
    reward.close()
    assert caught.value.where == "row 5 of the dataset"
    shown = answer if len(answer) <= 60 else f"{answer[:60]}..."
    assert caught.value.what == f"field 'answer' is no expression that can be compared: {shown}"
    assert "rewards/exact-match" in caught.value.todo


@pytest.mark.parametrize(
    "answer",
    [None, True, [1], {"a": 1}, float("nan"), "1.5 million", "1_000", "1.2.3", r"7 \bmod 3"],
)
def test_a_row_whose_answer_would_be_read_as_something_else_is_refused(
    reward: MathReward, answer: Any
) -> None:
    with pytest.raises(DataError, match="row 5 of the dataset") as caught:
        value(reward, r"\boxed{1}", answer)
    assert "no expression that can be compared" in caught.value.what


def test_whether_a_rows_answer_can_be_read_is_known_before_there_is_a_completion(
    reward: MathReward,
) -> None:
    for answer in ("1/2", 3.0, r"\sqrt{2}", "x = 1, y = 2", "12:00"):
        reward.read_answer(record("", answer=answer).prompt)
    for fields in ({"answer": "$$"}, {"answer": None}, {"solution": "1"}):
        with pytest.raises(DataError, match="row 5 of the dataset"):
            reward.read_answer(record("", **fields).prompt)


def test_what_is_compared_is_what_the_library_itself_would_read() -> None:
    """Its ``parse`` does not say where it has found what it gives, so its search is done again."""
    path = Path(__file__).parents[3] / "benchmarks/math_verify_cases.json"
    cases = json.loads(path.read_text())
    comparison = math_child.Comparison(6)
    for case in cases["cases"]:
        values, _ = comparison.find(case["answer"])
        assert list(map(str, values)) == list(map(str, comparison.read(case["answer"])))


def test_a_row_without_an_answer_is_a_failure(reward: MathReward) -> None:
    (score,) = reward.score([record("1", solution="1")])
    assert (score.value, score.status) == (None, "failed")
    assert score.reason == "row 5 has no field 'answer'; it has: solution"


def test_a_pattern_says_where_the_answer_is() -> None:
    reward = MathReward(MathConfig(pattern=r"<answer>(.*?)</answer>"), CONTEXT)
    texts = ["<answer>$2$</answer> of $3$", "$2$"]
    scores = reward.score([record(text, answer=2) for text in texts])
    reward.close()
    assert [score.value for score in scores] == [1, 0]


def test_several_processes_give_the_same_scores_in_order() -> None:
    reward = MathReward(MathConfig(parallel=2), CONTEXT)
    texts = ["1", "2", "$3$", "4", r"\boxed{2}", "5"]
    scores = reward.score([record(text, answer=2) for text in texts])
    reward.close()
    assert [score.value for score in scores] == [0, 1, 0, 0, 1, 0]


def test_a_process_that_others_end_is_a_failure_and_not_a_score() -> None:
    comparer = Comparer(MathConfig(time_s=60.0))
    comparer.start()
    process = comparer._process
    assert process is not None
    killer = threading.Timer(1.0, os.kill, (process.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(Stuck, match="ended with -9"):
        comparer.find(["2"], ENDLESS[0])
    killer.join()
    assert comparer.find(["2"], "2").verdict is Verdict.EQUAL
    comparer.close()


def test_a_process_is_replaced_before_its_caches_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "_MOST_COMPARISONS", 2)
    comparer = Comparer(MathConfig())
    pids = []
    for answer in ("1", "2", "3"):
        assert comparer.find(["2"], answer).verdict is (
            Verdict.EQUAL if answer == "2" else Verdict.DIFFERENT
        )
        assert comparer._process is not None
        pids.append(comparer._process.pid)
    comparer.close()
    assert pids[0] == pids[1] != pids[2]


def test_memory_is_limited() -> None:
    comparer = Comparer(MathConfig(memory_mib=1500))
    comparer.start()
    assert comparer._process is not None
    limits = resource.prlimit(comparer._process.pid, resource.RLIMIT_AS)
    assert limits == (1500 << 20, 1500 << 20)
    comparer.close()


def test_a_process_ends_with_the_one_that_started_it() -> None:
    """Also while it computes: its CPU time is limited by the kernel."""
    script = (
        "import sys\n"
        "from gcore_rewards.config import MathConfig\n"
        "from gcore_rewards.expressions import Comparer\n"
        "comparer = Comparer(MathConfig(time_s=1.0))\n"
        "comparer.start()\n"
        "print(comparer._process.pid, flush=True)\n"
        f"comparer.find(['2'], {ENDLESS[0]!r}) if sys.argv[1:] else input()\n"
    )
    for words in ([], ["busy"]):
        parent = subprocess.Popen(
            [sys.executable, "-c", script, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        parent.kill()
        parent.communicate()
        deadline = time.monotonic() + 30
        while _is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_where_math_verify_is_missing_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "math_verify"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('no math here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="expressions cannot be compared here") as caught:
        MathReward(MathConfig(), CONTEXT)
    assert caught.value.why == "ImportError: no math here"
    assert "gcore-rewards[math]" in caught.value.todo


def test_the_process_answers_line_by_line_and_imports_nothing_of_the_project() -> None:
    lines = [
        json.dumps({"path": sys.path, "memory_mib": 2048, "digits": 6, "time_s": 5}),
        json.dumps({"expected": ["1/2"], "completion": "$0.5$"}),
    ]
    done = subprocess.run(
        [sys.executable, "-I", math_child.__file__],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers == [
        {"ready": True},
        {"readable": True},
        {"equal": True, "span": [1, 4], "is_latex": True},
    ]
    assert "gcore" not in Path(math_child.__file__).read_text()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pattern": "("}, "not a regular expression"),
        ({"time_s": 0}, "must be positive"),
        ({"time_s": float("inf")}, "must be positive"),
        ({"memory_mib": 0}, "must be at least 1"),
        ({"parallel": 0}, "must be at least 1"),
    ],
)
def test_a_bad_setting_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MathConfig(**wrong)
