"""The page of a run: what it shows, what it leaves out, and that texts of a run stay texts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gcore_report
import numpy as np
import pytest
from gcore_report.commands import report as report_command
from gcore_report.page import limits
from gcore_report.page.answers import answers, halving, plain
from gcore_report.page.configuration import configuration
from gcore_report.page.curves import curves, group_of, thinned
from gcore_report.page.document import PANELS, report
from gcore_report.page.pictures import pictures
from gcore_report.page.placement import placement
from gcore_report.page.processes import balance, memory
from gcore_report.page.runs import Run, open_runs
from gcore_report.page.timeline import covered, timeline, united
from gcore_report.page.tokens import tokens
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gcore_core.config.yaml_source import written
from gcore_core.contract import run_files
from gcore_core.contract.errors import ConfigError, DataError
from tests.support.page_runs import EVIL, write_run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "job" / "001")


@pytest.fixture
def run(directory: Path) -> Run:
    return open_runs([directory])[0]


def the_chart(groups: list[dict[str, Any]], key: str) -> Mapping[str, Any]:
    charts = [chart for group in groups for chart in group["charts"] if chart["key"] == key]
    assert len(charts) == 1
    return charts[0]


# -- curves ----------------------------------------------------------------------------------------


def test_a_thinned_curve_keeps_its_ends_and_every_spike() -> None:
    steps = np.arange(100_000)
    values = np.sin(steps / 1000)
    values[[1234, 77_777]] = 9.0, -9.0
    x, y = thinned(steps, values, 2000)
    assert len(x) <= 2000 and (np.diff(x) > 0).all()
    assert (x[0], x[-1]) == (0, 99_999)
    assert (values[x] == y).all()
    assert {1234, 77_777} <= set(x.tolist())


def test_a_short_curve_is_drawn_as_it_is() -> None:
    steps, values = np.arange(10), np.arange(10.0)
    x, y = thinned(steps, values, 10)
    assert x is steps and y is values


def test_every_metric_of_a_run_has_one_line(run: Run) -> None:
    charts = [chart for group in curves([run]) for chart in group["charts"]]
    plain_charts = [chart for chart in charts if not chart.get("stacked")]
    keys = [line["key"] for chart in plain_charts for line in chart["lines"]]
    metrics = {key for row in run.rows for key in row["metrics"]}
    evaluation = {f"evaluation:{key}" for row in run.rows for key in row["evaluation"]}
    assert sorted(keys) == sorted(metrics | evaluation)


def test_runs_share_a_chart_and_ways_of_sampling_a_line_each(run: Run) -> None:
    groups = curves([run, run])
    chart = the_chart(groups, "evaluation:exact")
    assert [(line["run"], line["name"]) for line in chart["lines"]] == [
        (0, "greedy"),
        (0, "sampled"),
        (1, "greedy"),
        (1, "sampled"),
    ]
    assert group_of("evaluation:greedy/exact") == "Held-out"


def test_charts_of_zeros_stand_at_the_end_and_closed_but_those_of_rewards(run: Run) -> None:
    zeros = {"masked_share": 0.0, "stale_share": 0.0, "reward": 0.0, "loss": 0.0, "kept": 0.1}
    rows = [{**row, "metrics": zeros, "evaluation": {"greedy/exact": 0.0}} for row in run.rows]
    run.rows[:] = rows
    groups = curves([run])
    assert [chart["key"] for chart in groups[-1]["charts"]] == ["masked_share", "stale_share"]
    assert groups[-1]["closed"]
    assert the_chart(groups[:-1], "evaluation:exact") and the_chart(groups[:-1], "reward")
    run.rows[0] = {**rows[0], "metrics": zeros | {"masked_share": 0.5}}
    groups = curves([run])
    assert [chart["key"] for chart in groups[-1]["charts"]] == ["stale_share"]


def test_stages_lie_on_top_of_each_other_and_sum_to_the_step(run: Run) -> None:
    chart = the_chart(curves([run]), f"seconds of a step, by stage ({run.label})")
    assert chart["stacked"]
    assert [line["key"] for line in chart["lines"]] == [
        f"seconds/{stage}" for stage in ("rollout", "prepare", "train", "push")
    ]
    whole = sum(np.array(line["y"]) for line in chart["lines"])
    rows = [row["metrics"] for row in run.rows if row["metrics"]]
    stages = [sum(run_files.stage_seconds(row).values()) for row in rows]
    np.testing.assert_allclose(whole, stages, rtol=1e-4)


# -- answers ---------------------------------------------------------------------------------------


def test_whoever_stops_early_has_steps_of_the_whole_run() -> None:
    order = list(halving(range(1001)))
    assert sorted(order) == list(range(1001))
    assert order[:5] == [0, 1000, 500, 250, 750]
    assert list(halving([])) == [] and list(halving([7])) == [7]


def test_all_answers_are_shown_of_a_run_that_has_few(run: Run) -> None:
    data = answers([run])
    written = [
        row for step in run.sampled_steps() for row in run_files.read_samples(run.directory, step)
    ]
    assert data["shown"] == data["total"] == len(written)
    shown = {(row[1], row[2], data["texts"][row[3]], data["texts"][row[4]]) for row in data["rows"]}
    assert any(EVIL in text for _, _, _, text in shown)
    assert {text for _, _, _, text in shown} == {row["text"] for row in written}


def test_of_many_answers_the_first_and_last_evaluations_stay(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ANSWERS", 18)
    data = answers([run])
    assert data["shown"] == 18 < data["total"]
    assert {row[1] for row in data["rows"]} == {0, 20, 40}


def test_a_chat_is_shown_with_its_roles_and_a_long_text_is_cut() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image"}]
    assert plain([{"role": "user", "content": parts}]) == "[user] look <image>"
    assert len(plain("x" * 100_000)) < limits.TEXT_CHARACTERS + 10


# -- timeline --------------------------------------------------------------------------------------


def test_idle_time_is_what_is_left_of_each_stage(run: Run) -> None:
    """The trace: 40 steps of 20 s, of which the generator draws 10 and the trainer works 8."""
    own = timeline([run])["runs"][0]
    assert own["busy_s"] == pytest.approx({"rollout.0": 400, "scorers": 80, "policy": 320})
    idle = own["idle"]["rollout.0"]
    assert idle["waits in the rollout"] == pytest.approx(80)
    assert idle["while the policy is trained"] == pytest.approx(240)
    assert idle["between steps"] == 0
    for name, causes in own["idle"].items():
        assert sum(causes.values()) + own["busy_s"][name] == pytest.approx(800)


def test_spans_are_united_and_cut_at_a_window() -> None:
    spans = united([(4, 5), (0, 2), (1, 3), (2, 3)])
    assert spans == [(0, 3), (4, 5)]
    assert covered(spans, (2.0, 4.5)) == 1.5


def test_of_a_long_trace_the_end_is_read_with_its_clock(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TRACE_BYTES", 6000)
    own = timeline([run])["runs"][0]
    assert 0 < own["steps"] < 40
    assert own["bars"][-1][2] == 39
    assert max(bar[4] for bar in own["bars"]) < 20 * limits.TIMELINE_STEPS


# -- processes and placement -----------------------------------------------------------------------


def test_work_is_what_a_process_used_in_a_step(run: Run) -> None:
    own = balance([run])["runs"][0]
    assert own["y"].index("policy.0") + 1 == own["y"].index("policy.1")
    assert own["z"][own["y"].index("policy.1")] == [5.0] * 39
    assert memory([run])["runs"][0]["mib"] == [100.0 * (i + 1) for i in range(6)]


def test_placement_shows_who_was_awake_where(run: Run) -> None:
    own = placement([run])["runs"][0]
    rollout, judge = own["roles"].index("rollout"), own["roles"].index("judge")
    assert own["z"][2] == [rollout] * 20 + [judge] * 20
    assert own["seconds"]["waited"] == [1.5] * 40


def test_a_run_that_moves_nothing_shows_its_processes(tmp_path: Path) -> None:
    (still,) = open_runs([write_run(tmp_path / "still", moves=False)])
    own = placement([still])["runs"][0]
    assert not own["moves"]
    assert ["policy.0", 1, 40] in own["lives"]


# -- tokens and pictures ---------------------------------------------------------------------------


def test_tokens_of_the_first_and_last_steps_stay_of_many(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokens([run])["shown"] == 16
    monkeypatch.setattr(limits, "TOKEN_RECORDS", 8)
    data = tokens([run])
    assert (data["shown"], data["total"]) == (8, 16)
    assert [record["step"] for record in data["records"]] == [0] * 4 + [30] * 4
    record = data["records"][1]
    assert record["advantage"] == -1.0 and record["masked"] == [19]
    assert record["trainer"][3] - record["rollout"][3] == pytest.approx(-0.01)


def test_tokens_have_the_texts_that_the_runs_tokenizer_gives(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=10)
    assert tokens(open_runs([directory]))["texts"] == [{}]
    vocabulary = {f"w{i}": i for i in range(20)} | {"[UNK]": 20}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    (directory / run_files.WEIGHTS).mkdir()
    tokenizer.save(str(directory / run_files.WEIGHTS / "tokenizer.json"))
    (texts,) = tokens(open_runs([directory]))["texts"]
    assert texts == {i: f"w{i}" for i in range(20)}


def test_pictures_are_data_of_the_page_and_none_of_another_directory(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=10)
    data = pictures(open_runs([directory]))
    assert data["shown"] == data["total"] == 11
    assert all(row[6].startswith("data:image/webp;base64,") for row in data["pictures"])
    secret = tmp_path / "secret.npy"
    np.save(secret, np.zeros((4, 4, 3), np.uint8))
    path = run_files.samples_path(directory, 0)
    path.write_text(path.read_text().replace("step_000000/0-picture.npy", "../../secret.npy"))
    data = pictures(open_runs([directory]))
    assert (data["shown"], data["total"]) == (10, 11)


# -- configuration ---------------------------------------------------------------------------------


def test_each_value_stands_with_its_origin(run: Run) -> None:
    rows = {key: (values, origins) for key, values, origins in configuration([run])["rows"]}
    assert rows["run.steps"] == (["40"], ["override 'run.steps=40'"])
    assert json.loads(rows["run.name"][0][0]) == EVIL


def test_a_value_stands_as_it_was_set_and_not_as_it_was_written(tmp_path: Path) -> None:
    """What is written escapes the ``${`` of a text, which would be looked up when it is read."""
    directory = write_run(tmp_path / "run")
    template = "${x} and \\${y}"
    config = written({"run": {"steps": 4}, "rewards": {"r": {"config": {"template": template}}}})
    (directory / run_files.CONFIG).write_text(config)
    (run,) = open_runs([directory])
    rows = {key: values for key, values, _ in configuration([run])["rows"]}
    assert json.loads(rows["rewards.r.config.template"][0]) == template
    assert run.steps == 4


def test_a_run_of_an_earlier_version_says_that_origins_are_not_recorded(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "old")
    (directory / run_files.ORIGINS).unlink()
    rows = configuration(open_runs([directory]))["rows"]
    assert {origin for _, _, origins in rows for origin in origins} == {"not recorded"}


# -- the file --------------------------------------------------------------------------------------


def test_no_text_of_a_run_is_markup_in_the_page(run: Run) -> None:
    page = report([Run(run.directory, f"label {EVIL}")])
    assert "<img" not in page and "document.title='owned'</script>" not in page
    assert page.count("</script>") == page.count("<script")


def test_only_the_pages_own_scripts_may_run(run: Run) -> None:
    page = report([run])
    policy = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)[0].replace(
        "&#39;", "'"
    )
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    assert re.findall(r"'sha256-([^']+)'", policy) == [
        base64.b64encode(d).decode() for d in digests
    ]
    assert "default-src 'none'" in policy and "script-src 'sha256" in policy


def test_the_page_names_no_address_that_it_would_load(run: Run) -> None:
    page = re.sub(r"<script>.*?</script>", "", report([run]), flags=re.DOTALL)
    assert re.findall(r"(?:src|href)=(.{7})", page) == ['"data:,']


def test_the_command_writes_beside_the_first_run(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_command([str(directory), "--to", str(tmp_path / "page.html")]) == 0
    assert f"{tmp_path}/page.html: " in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert all(f'id="panel-{name}"' in page for name in PANELS)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no run here"):
        report_command([str(tmp_path)])


def test_a_page_that_cannot_be_written_is_an_error_that_says_what_to_do(directory: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        report_command([str(directory), "--to", str(directory / "no" / "page.html")])


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / side / "job" / "001", steps=2) for side in "ab"]
    assert [run.label for run in open_runs(paths)] == [str(path) for path in paths]


def test_the_command_is_the_plugins_own() -> None:
    assert [spec.name for spec in gcore_report.gcore_commands()] == ["default"]
