from __future__ import annotations

from pathlib import Path

import pytest

from gcore_core.contract import run_files
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import RunFacts, StepReport
from gcore_core.run import directory as d
from gcore_core.run import summary

BEFORE = {
    "greedy/exact": 0.25,
    "greedy/worked": 0.5,
    "sampled/exact": 0.125,
    "sampled/worked": 0.25,
}
AFTER = {"greedy/exact": 0.75, "greedy/worked": 1.0, "sampled/exact": 0.5, "sampled/worked": 0.125}


def _sample(prompt: str, text: str, mode: str = "greedy") -> dict[str, object]:
    return {"prompt": prompt, "text": text, "rewards": {"exact": 1.0}, "mode": mode}


@pytest.fixture
def run(tmp_path: Path) -> RunFacts:
    run_dir = d.create(tmp_path, "digits")
    d.write_lock(run_dir, {"core": {"version": "0.1.0"}, "torch": {"version": "0.2.0"}})
    metrics = d.MetricsFile(run_dir)
    times = {"seconds/rollout": 0.5, "seconds/train": 0.25, "seconds/step": 1.0}
    metrics.append(StepReport(step=0, version=0, metrics={}, evaluation=BEFORE))
    metrics.append(StepReport(step=1, version=1, metrics={"length": 10.0, "reward": 0.2, **times}))
    evaluated = {"seconds/evaluation": 3.0}  # beside the step, not a part of it
    metrics.append(
        StepReport(
            step=2,
            version=2,
            metrics={"length": 12.5, "reward": 0.8, **times, **evaluated},
            evaluation=AFTER,
        )
    )
    metrics.close()
    return RunFacts(name="digits", directory=str(run_dir), steps=2, config={})


def test_the_table_compares_the_first_with_the_last_evaluation(run: RunFacts) -> None:
    assert summary.table(run_files.read_metrics(Path(run.directory))).splitlines() == [
        "                  before (step 0)  after (step 2)  change",
        "exact, greedy               0.250           0.750  +0.500",
        "exact, sampled              0.125           0.500  +0.375",
        "worked, greedy              0.500           1.000  +0.500",
        "worked, sampled             0.250           0.125  -0.125",
        "length, training             10.0            12.5    +2.5",
    ]


def test_an_evaluated_length_replaces_the_training_length(run: RunFacts) -> None:
    metrics = run_files.read_metrics(Path(run.directory))
    for row in metrics:
        row["evaluation"] = row["evaluation"] and {"greedy/length": 3.0, **row["evaluation"]}
    last = summary.table(metrics).splitlines()[-1]
    assert last.split() == ["length,", "greedy", "3.0", "3.0", "+0.0"]


def test_one_evaluation_has_a_before_and_no_after(run: RunFacts) -> None:
    lines = summary.table(run_files.read_metrics(Path(run.directory))[:2]).splitlines()
    assert lines[1].split() == ["exact,", "greedy", "0.250", "-"]


def test_without_evaluation_there_is_no_table() -> None:
    assert summary.table([]) == ""
    row = {"step": 1, "metrics": {"length": 1.0}, "evaluation": {}}
    assert summary.table([row]) == ""


def test_the_summary_names_the_run_its_changes_and_its_files(run: RunFacts) -> None:
    run_dir = Path(run.directory)
    (run_dir / run_files.CURVES).touch()
    path = summary.write(run, wall_s=75.2, cpu_s=130.4)
    text = path.read_text()
    assert path == run_dir / "summary.md"
    assert text.startswith(
        "# digits\n\n- 2 steps\n- 1:15 wall time, 130 CPU seconds\n"
        "- mean reward of the answers trained on: 0.200 in step 1, 0.800 in step 2\n"
        "- plugins: core 0.1.0, torch 0.2.0\n"
    )
    assert "| exact, greedy | 0.250 | 0.750 | +0.500 |" in text
    assert (
        "| rollout | 1.0 | 0.500 | 50% |" in text and "| whole step | 2.0 | 1.000 | 100% |" in text
    )
    assert "| evaluation | 3.0 | - | - |" in text
    assert "`metrics.jsonl`" in text and "`weights`" not in text  # only what is there
    assert text.endswith("![curves](curves.png)\n")


def test_sections_that_observers_wrote_are_in_the_summary_once(run: RunFacts) -> None:
    Path(run.directory, "placement.md").write_text("## Devices\n\nall idle\n")
    summary.write(run, 1.0, 1.0)
    assert summary.write(run, 1.0, 1.0).read_text().count("## Devices\n\nall idle\n") == 1


def test_the_summary_says_if_a_run_ended_early_or_was_resumed(run: RunFacts) -> None:
    longer = RunFacts(name="digits", directory=run.directory, steps=60, config={}, resumed_from=1)
    assert (
        "- ended at step 2 of 60, resumed from step 1\n"
        "- 1:15 wall time, 130 CPU seconds since then\n"
        in summary.write(longer, 75.0, 130.0).read_text()
    )


def test_shown_answers_are_to_the_first_common_prompts_before_and_after(run: RunFacts) -> None:
    run_dir = Path(run.directory)
    prompts = ["p0", "p1", "p2", "p3", "p4"]
    d.write_samples(
        run_dir,
        0,
        [_sample("p1", "sampled", "sampled"), *(_sample(p, f"old {p}") for p in prompts)],
    )
    d.write_samples(run_dir, 2, [_sample(p, f"new {p}") for p in reversed(prompts[1:])])
    text = summary.write(run, 1.0, 1.0).read_text()
    shown = [word for word in text.split() if word in prompts]
    assert shown == [
        "p1",
        "p1",
        "p1",
        "p2",
        "p2",
        "p2",
        "p3",
        "p3",
        "p3",
    ]  # prompt, old, new; p0 has no after
    assert text.index("old p1") < text.index("new p1") and "Step 2: exact 1" in text


def test_a_single_evaluation_shows_its_answers_once(run: RunFacts) -> None:
    d.write_samples(Path(run.directory), 0, [_sample("p0", "only")])
    assert summary.write(run, 1.0, 1.0).read_text().count("only\n") == 1


def test_an_answer_cannot_close_its_code_block_and_a_long_one_is_cut(run: RunFacts) -> None:
    d.write_samples(
        Path(run.directory),
        0,
        [_sample("p0", "```\n# not a heading\n````"), _sample("p1", "x" * 5000)],
    )
    text = summary.write(run, 1.0, 1.0).read_text()
    assert "`````text\n```\n# not a heading\n````\n`````\n" in text
    assert (
        "x" * summary.ANSWER_LIMIT + " [...]" in text
        and "x" * (summary.ANSWER_LIMIT + 1) not in text
    )


def test_a_run_that_never_made_a_step_still_gets_a_summary(tmp_path: Path) -> None:
    run = RunFacts(name="digits", directory=str(tmp_path), steps=3, config={})
    assert "ended at step 0 of 3" in summary.write(run, 1.0, 0.5).read_text()


def test_a_summary_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    run = RunFacts(name="digits", directory=str(tmp_path / "gone"), steps=3, config={})
    with pytest.raises(ConfigError, match=r"summary\.md cannot be made or written"):
        summary.write(run, 1.0, 0.5)
