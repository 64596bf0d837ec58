"""Where two runs part, of runs that were really made: ``g-core diff``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gcore_report import comparison
from gcore_report.comparison import Comparison, compare

from gcore_core.cli import main
from gcore_core.contract import run_files
from gcore_core.run.saved_weights import weights_sha256
from tests.support import runs

REWARD = "def score(record):\n    return float(record.text.count('a'))\n"


def train(
    directory: Path, *overrides: str, reward: str = REWARD, rows: int = 40, **changes: Any
) -> Path:
    """Trains the fakes in one process; the reward and the data are files."""
    directory.mkdir()
    (directory / "reward.py").write_text(reward)
    lines = [json.dumps({"prompt": f"prompt {row % rows}"}) for row in range(40)]
    (directory / "data.jsonl").write_text("\n".join(lines) + "\n")
    sections: dict[str, Mapping[str, Any]] = {
        "launcher": {"use": "core/inline"},
        "run": {"deterministic": True, "name": "fake"},
        "data": {"use": "core/jsonl", "config": {"path": "data.jsonl"}},
        "rewards": {
            "letters": {"use": "core/function", "config": {"path": "reward.py", "name": "score"}}
        },
    }
    code, run = runs.finish(directory, runs.job(**sections, **changes), *overrides)
    assert code == 0, run.output
    return run.path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("plain") / "run")


def differ(plain: Path, other: Path) -> Comparison:
    found = compare(plain, other)
    assert not found.same and found.cause is not None
    return found


@pytest.mark.protects
def test_equal_runs_are_the_same_for_any_number_of_controllers(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = train(tmp_path / "run", "controller.shards=3")
    assert main(["diff", str(plain), str(other)]) == 0
    assert capsys.readouterr().out.startswith("same: every stage of all 3 steps\n")
    assert main(["diff", "--json", str(plain), str(other)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["same"] and told["weights_sha256"] == [weights_sha256(plain / "weights")] * 2
    assert [one["what"] for one in told["differences"]] == ["controller.shards"]


def test_another_seed_parts_in_the_first_records(plain: Path, tmp_path: Path) -> None:
    found = differ(plain, train(tmp_path / "run", "run.seed=4"))
    assert (found.step, found.stage) == (0, "generation")
    assert found.record is not None and (found.record.ordinal, found.record.sample) == (0, 0)
    assert found.cause == comparison.Difference(kind="seed", what="run.seed", values=("3", "4"))


def test_a_changed_reward_file_parts_in_rewarding(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = train(tmp_path / "run", reward=REWARD.replace("'a'", "'b'"))
    found = differ(plain, other)
    assert (found.step, found.stage) == (0, "rewarding")
    assert found.details[0].startswith("reward letters: ")
    assert found.cause is not None
    assert (found.cause.kind, found.cause.what) == (
        "code",
        "the file of rewards.letters.config.path",
    )
    assert main(["diff", str(plain), str(other)]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("they part at step 0, stage rewarding\nrecord: ordinal ")
    assert "likely cause: code: the file of rewards.letters.config.path" in printed


def test_changed_data_part_where_the_first_changed_row_is_drawn(
    plain: Path, tmp_path: Path
) -> None:
    found = differ(plain, train(tmp_path / "run", rows=7))
    assert found.stage == "generation"
    assert found.details[0].startswith("the prompt has another content: row ")
    assert found.cause is not None and found.cause.what == "the file of data.config.path"
    assert found.cause.kind == "data"


def test_another_learning_rate_parts_in_training_and_names_a_tensor(
    plain: Path, tmp_path: Path
) -> None:
    found = differ(plain, train(tmp_path / "run", "roles.policy.config.learning_rate=0.25"))
    assert (found.step, found.record) == (0, None)
    assert found.stage in ("training", "weights") and found.tensor
    assert found.cause is not None
    assert found.cause.what == "roles.policy.config.learning_rate"


def test_a_longer_run_parts_where_the_other_ends(plain: Path, tmp_path: Path) -> None:
    found = differ(plain, train(tmp_path / "run", "run.steps=4"))
    assert (found.step, found.stage) == (3, "length")
    assert found.cause is not None and found.cause.what == "run.steps"


def test_hashes_of_checkpoints_stand_in_metrics_and_manifest_and_are_those_of_the_weights(
    tmp_path: Path,
) -> None:
    run = train(tmp_path / "run", "checkpoint.every=2", "run.steps=5")
    rows = {row["step"]: row.get("weights_sha256", "") for row in run_files.read_metrics(run)}
    assert {step for step, sha256 in rows.items() if sha256} == {2, 4, 5}
    for step in (2, 4, 5):
        file = run / "checkpoints" / f"step-{step:06d}" / "manifest.json"
        manifest = msgspec.json.decode(file.read_bytes())
        assert manifest["weights_sha256"] == rows[step]
    assert rows[5] == weights_sha256(run / "weights")
    assert len({rows[2], rows[4], rows[5]}) == 3


def test_the_last_line_names_the_weights_and_the_summary_too(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    code, run = runs.finish(directory, runs.job(launcher={"use": "core/inline"}))
    assert code == 0
    sha256 = weights_sha256(run.path / "weights")
    assert run.output.splitlines()[-1] == f"weights_sha256 {sha256}"
    assert f"- weights_sha256: {sha256}\n" in (run.path / "summary.md").read_text()
