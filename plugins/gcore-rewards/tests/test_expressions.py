"""``rewards/math``: expressions that are equal are 1, others 0, and none can hold a scorer up."""

from __future__ import annotations

import json
import os
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

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_core.testing.contracts.scorer import scored_record

pytest.importorskip("math_verify", reason="needs gcore-rewards[math]")

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


@pytest.mark.parametrize("text", ENDLESS)
def test_an_expression_without_end_is_0_and_the_next_is_compared(text: str) -> None:
    comparer = Comparer(MathConfig(time_s=0.5))
    assert comparer.compare("2", text) is Verdict.EXCEEDED
    comparer.close()
    reward = MathReward(MathConfig(time_s=0.5), CONTEXT)
    began_s = time.monotonic()
    scores = reward.score([record("2", answer=2), record(text, answer=2), record("3", answer=3)])
    took_s = time.monotonic() - began_s
    reward.close()
    assert [score.value for score in scores] == [1, 0, 1]
    assert took_s < 60


def test_limits_hold_outside_of_the_main_thread() -> None:
    """A scorer calls rewards in a thread, where no alarm can be set."""
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
        comparer.compare("2", ENDLESS[0])
    killer.join()
    assert comparer.compare("2", "2") is Verdict.EQUAL
    comparer.close()


def test_a_process_is_replaced_before_its_caches_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "_MOST_COMPARISONS", 2)
    comparer = Comparer(MathConfig())
    pids = []
    for answer in ("1", "2", "3"):
        assert comparer.compare("2", answer) is (
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
        f"comparer.compare('2', {ENDLESS[0]!r}) if sys.argv[1:] else input()\n"
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
        json.dumps({"expected": "1/2", "completion": "0.5"}),
    ]
    done = subprocess.run(
        [sys.executable, "-I", math_child.__file__],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers == [{"ready": True}, {"readable": True}, {"equal": True}]
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
