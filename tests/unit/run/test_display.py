from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gcore_core.contract.records import StepReport
from gcore_core.contract.run_files import stage_seconds
from gcore_core.run.display import LiveDisplay, PlainDisplay, duration, open_display, step_parts

METRICS = {
    "reward/exact": 0.5,
    "reward": 0.5,
    "length": 5.25,
    "kl": 0.00312,
    "entropy": 0.8123,
    "logprob_gap_max": 2.1e-6,
    "actions_per_s": 8431.0,
    "seconds/push": 0.02,
    "seconds/rollout": 0.31,
    "seconds/prepare": 0.05,
    "seconds/train": 0.22,
    "seconds/step": 0.61,
    "groups/kept": 16.0,
}


def _report(step: int, evaluation: dict[str, float] | None = None, **metrics: float) -> StepReport:
    return StepReport(step=step, version=step, metrics=metrics, evaluation=evaluation or {})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Advances by ten seconds whenever it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now += 10.0


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    yield Terminal()


def test_a_line_says_everything_in_the_order_of_a_step() -> None:
    parts = step_parts(
        _report(7, {"greedy/exact": 0.48, "sampled/exact": 0.4, "greedy/length": 5.0}, **METRICS),
        60,
    )
    assert "  ".join(f"{label} {value}" for label, value in parts) == (
        "step  7/60  reward 0.500  held-out 0.480  kl 3.1e-03  entropy 0.812  length 5.2  gap "
        "2.1e-06"
        "  actions/s 8,431  rollout 0.31s  preparation 0.05s  training 0.22s  push 0.02s"
    )


def test_missing_metrics_are_left_out() -> None:
    assert step_parts(_report(1, length=4.0), 5) == [("step", "1/5"), ("length", "4.0")]


def test_several_rewards_are_shown_by_name_beside_their_weighted_sum() -> None:
    parts = dict(step_parts(_report(1, **{"reward/a": 0.25, "reward/b": 1.0, "reward": 0.625}), 5))
    assert parts == {"step": "1/5", "reward": "0.625", "a": "0.250", "b": "1.000"}


@pytest.mark.parametrize(
    ("evaluation", "part"),
    [
        ({"sampled/a": 0.1, "greedy/a": 0.2}, ("held-out", "0.200")),
        ({"greedy/a": 0.1, "greedy/b": 0.2}, ("held-out a", "0.100")),
        ({"greedy/a": 0.1, "sampled/reward": 0.2, "greedy/reward": 0.3}, ("held-out", "0.300")),
        ({"sampled/a": 0.1}, ("held-out sampled", "0.100")),
    ],
)
def test_held_out_reward_is_greedy_and_weighted_or_labelled_otherwise(
    evaluation: dict[str, float], part: tuple[str, str]
) -> None:
    assert step_parts(_report(1, evaluation), 5)[1:] == [part]


def test_the_time_of_an_evaluation_is_shown_where_there_was_one() -> None:
    seconds = {"seconds/push": 0.5, "seconds/evaluation": 2.0, "seconds/step": 0.5}
    assert dict(step_parts(_report(1, **seconds), 5)) == {"step": "1/5", "push": "0.50s"}
    evaluated = dict(step_parts(_report(1, {"greedy/a": 0.5}, **seconds), 5))
    assert evaluated.pop("held-out") == "0.500"
    assert evaluated == {"step": "1/5", "push": "0.50s", "evaluation": "2.00s"}


def test_an_unknown_stage_is_shown_under_its_own_name_after_the_known_ones() -> None:
    assert list(
        stage_seconds({"seconds/save": 1.0, "seconds/train": 2.0, "seconds/step": 3.0})
    ) == ["training", "save"]


def test_durations_read_like_a_clock() -> None:
    assert [duration(seconds) for seconds in (7.4, 759.6, 11100)] == ["0:07", "12:40", "3:05:00"]


# -- plain -----------------------------------------------------------------------------------------


def test_plain_lines_show_an_evaluation_once_and_the_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(4, stream, clock)
    display.phase("starting 7 processes")
    clock.tick()
    display.step(_report(0, {"greedy/exact": 0.25}))
    for step in (1, 2, 4):
        clock.tick()
        display.step(_report(step, length=5.0))
    display.finish(["weights: runs/digits/001/weights"])
    assert stream.getvalue().splitlines() == [
        "starting 7 processes",
        "step 0/4  held-out 0.250",
        "step 1/4  length 5.0",
        "step 2/4  length 5.0  left 0:20",
        "step 4/4  length 5.0  left 0:00",
        "weights: runs/digits/001/weights",
    ]


@pytest.mark.parametrize("kind", [PlainDisplay, LiveDisplay])
def test_an_evaluation_is_shown_with_the_step_whose_weights_it_measured(
    kind: type[PlainDisplay | LiveDisplay],
) -> None:
    stream = io.StringIO()
    display = kind(2, stream, Clock())
    display.step(_report(0, {"greedy/exact": 0.25}))
    display.step(_report(1, reward=0.5))
    display.step(_report(2, {"greedy/exact": 0.75}, reward=0.5))
    display.finish()
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert ["held-out" in line for line in lines] == [True, False, True]


def test_the_time_left_of_a_resumed_run_counts_its_own_steps_only() -> None:
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(100, stream, clock)
    display.step(_report(90))  # where it was resumed; not evaluated, so there is nothing to tell
    clock.tick()
    display.step(_report(91, length=5.0))
    assert stream.getvalue() == "step  91/100  length 5.0  left 1:30\n"


def test_a_phase_makes_few_plain_lines_however_often_it_reports() -> None:
    stream = io.StringIO()
    display = PlainDisplay(4, stream)
    for percent in range(101):
        display.phase("making the model", percent / 100)
    assert stream.getvalue().splitlines() == [
        f"making the model {share}%" for share in (0, 25, 50, 75, 100)
    ]


def test_a_closed_pipe_does_not_end_the_run() -> None:
    program = (
        "import sys; from gcore_core.run.display import open_display; display = open_display(3, "
        "sys.stdout)\n"
        "sys.stdin.read()\n"  # by now the reader of stdout has left
        "for _ in range(1000): display.note('x' * 100)\n"
        "print('went on', file=sys.stderr)"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as child:
        assert child.stdin and child.stdout and child.stderr
        child.stdout.close()
        child.stdin.close()
        assert "went on" in child.stderr.read()


@pytest.mark.parametrize("live", [True, False])
def test_a_character_that_the_terminal_cannot_spell_is_shown_as_an_escape(
    live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old(io.TextIOWrapper):
        def isatty(self) -> bool:
            return live

    monkeypatch.setenv("TERM", "xterm")
    written = io.BytesIO()
    display = open_display(3, Old(written, encoding="latin-1"))
    display.note("node \u5317 is lost")
    display.finish()
    assert b"node \\u5317 is lost" in written.getvalue()


def test_plain_output_never_imports_rich() -> None:
    program = (
        "import sys; from gcore_core.run.display import open_display; from "
        "gcore_core.contract.records "
        "import StepReport\n"
        "display = open_display(3, sys.stdout); display.phase('p', .5); display.finish(['end'])\n"
        "display.step(StepReport(step=1, version=1, metrics={}))\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('rich', 'numpy', 'torch')])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[-1] == "[]"


# -- live ------------------------------------------------------------------------------------------


def test_a_terminal_gets_the_live_display_and_a_dumb_one_plain_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = open_display(3, terminal)
    live.finish()
    assert isinstance(live, LiveDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_display(3, terminal), PlainDisplay)
    assert isinstance(open_display(3, io.StringIO()), PlainDisplay)


def test_live_lines_carry_what_plain_lines_carry_broken_between_parts(terminal: Terminal) -> None:
    display = LiveDisplay(60, terminal)
    report = _report(7, {"greedy/exact": 0.48}, **METRICS)
    display.step(report)
    display.finish(["summary: [runs]/digits/001/summary.md"])
    display.finish()
    lines = (
        re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()).replace("\r", "\n").split("\n")
    )
    start = next(i for i, line in enumerate(lines) if "step  7/60" in line)
    shown = lines[start : start + 3]
    parts = [f"{label} {value}" for label, value in step_parts(report, 60)]
    assert "  ".join(line.strip() for line in shown).startswith("  ".join(parts))
    assert all(len(line) <= 80 for line in shown)
    assert any("summary: [runs]/digits/001/summary.md" in line for line in lines)


def test_the_bar_shows_the_phase_then_the_step_and_the_time_left(terminal: Terminal) -> None:
    clock = Clock()
    display = LiveDisplay(4, terminal, clock)
    display.phase("making the model", 0.4)
    display._progress.refresh()
    display.step(_report(0))
    clock.tick()
    display.step(_report(1))
    clock.tick()
    display.step(_report(2))
    display._progress.refresh()
    display.finish()
    shown = terminal.getvalue()
    assert "making the model" in shown and "40%" in shown
    assert "step 2/4" in shown and "50%  0:20 left" in shown
    assert shown.count("\x1b[?25h") >= shown.count("\x1b[?25l") > 0  # the cursor is back
