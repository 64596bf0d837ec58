from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gcore_core import cli
from gcore_core.run.checkpoints import CheckpointFacts, Checkpoints


@pytest.fixture
def run(tmp_path: Path) -> Path:
    checkpoints = Checkpoints(tmp_path)
    for step in (10, 20):
        (checkpoints.begin(step) / "part").write_bytes(bytes(1_000_000))
        checkpoints.commit(step, CheckpointFacts(run="a", metrics={"reward": 0.5}))
    return tmp_path


def damage(run: Path) -> None:
    """The size stays."""
    with (run / "checkpoints/step-000020/part").open("r+b") as file:
        file.write(b"1")


def test_list_shows_each_checkpoint_with_its_size(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run)  # it reads no content
    assert cli.main(["checkpoint", "list", str(run)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(words[0], *words[-2:]) for words in lines] == [
        ("CHECKPOINT", "FILES", "MB"),
        ("step-000010", "1", "1.0"),
        ("step-000020", "1", "1.0"),
    ]
    (run / "checkpoints/step-000020/part").unlink()
    assert cli.main(["checkpoint", "list", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step-000020"]["problems"] == ["part: it is missing"]
    assert (told["step-000010"]["bytes"], told["step-000010"]["metrics"]) == (
        1_000_000,
        {"reward": 0.5},
    )


def test_verify_ends_with_1_and_names_the_file(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{run}/checkpoints/step-0000{step}: whole, 1 files, 1.0 MB" for step in (10, 20)
    ]
    damage(run)
    assert cli.main(["checkpoint", "verify", str(run)]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"{run}/checkpoints/step-000020: 1 problem",
        "  part: its bytes are not those that were saved",
    ]


def test_verify_takes_one_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(run)
    assert cli.main(["checkpoint", "verify", str(run / "checkpoints/step-000010")]) == 0
    monkeypatch.chdir(run / "checkpoints/step-000020")
    assert cli.main(["checkpoint", "verify", "--json", "."]) == 1
    told = capsys.readouterr().out.partition("{")[2]
    assert json.loads("{" + told) == {".": ["part: its bytes are not those that were saved"]}


def test_a_directory_without_checkpoints_is_an_error(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    for action in ("list", "verify"):
        assert cli.main(["checkpoint", action, str(run)]) == 8
        assert capsys.readouterr().err.startswith(f"{run}: there are no checkpoints here.")
