"""The trainer that saved a state writes its weights in Hugging Face layout, in processes of its
own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from gcore_testing.fake import FakeTrainer, FakeTrainerConfig
from gcore_testing.installed import InstalledPlugins
from gcore_testing.safetensors_files import read_safetensors

from gcore_core import cli
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import CheckpointError, ConfigError, DataError
from gcore_core.run.checkpoints import CheckpointFacts, Checkpoints

JOB = """\
run: {name: job}
launcher: {use: core/inline}
data: {use: letters}
advantage: {use: letters}
objective: {use: letters}
roles:
  policy: {use: letters}
  rollout: {use: letters}
rewards:
  letters: {use: letters}
"""


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[InstalledPlugins]:
    with InstalledPlugins(tmp_path / "site") as plugins:
        plugins.add("letters", "from gcore_testing.fake import *\n")
        yield plugins


@pytest.fixture
def run(installed: InstalledPlugins, tmp_path: Path) -> Path:
    """Two checkpoints of a fake trainer; the weights of the second one are shifted by one."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text(JOB)
    trainer = FakeTrainer(FakeTrainerConfig(), WorkerContext(role="policy"))
    checkpoints = Checkpoints(directory)
    for step in (1, 2):
        part = checkpoints.begin(step) / "policy"
        part.mkdir()
        (part.parent / "config.json").write_text(json.dumps(yaml.safe_load(JOB)))
        trainer.save(part)
        checkpoints.commit(step, CheckpointFacts(run="a"))
        trainer._logits = trainer._logits + np.float32(1)
    return directory


def values(directory: Path) -> np.ndarray:
    return np.concatenate(
        [array.view(np.float32) for _, array in read_safetensors(directory / "model.safetensors")]
    )


def test_a_step_is_exported_by_the_trainer_that_saved_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        assert (
            cli.main(["export", str(run), "--step", str(step), "--to", str(tmp_path / f"to{step}")])
            == 0
        )
    np.testing.assert_array_equal(
        values(tmp_path / "to1") + np.float32(1), values(tmp_path / "to2")
    )
    assert capsys.readouterr().out.startswith(f"{tmp_path}/to1: 0.0 MB")
    assert sorted(child.name for child in tmp_path.glob("*to*")) == ["to1", "to2"]


def test_a_step_is_exported_with_the_settings_that_it_was_saved_with(
    run: Path, tmp_path: Path
) -> None:
    """The run may have gone on with others, by which its trainer writes other weights."""
    from gcore_tools.export.of_checkpoint import export_step

    export_step(run, 2, tmp_path / "before")
    changed = JOB.replace("policy: {use: letters}", "policy: {use: another}")
    (run / "config.yaml").write_text(changed)
    export_step(run, 2, tmp_path / "after")
    np.testing.assert_array_equal(values(tmp_path / "before"), values(tmp_path / "after"))


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:
    from gcore_tools.export.of_checkpoint import export_step

    (run / "checkpoints/step-000002/policy/state.npz").write_text("9")
    with pytest.raises(CheckpointError, match="step 2 is not whole"):
        export_step(run, 2, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_trainer_that_cannot_load_reports_the_reason(run: Path, tmp_path: Path) -> None:
    from gcore_tools.export.of_checkpoint import export_step

    checkpoints = Checkpoints(run)
    (checkpoints.begin(3) / "policy").mkdir()
    config = checkpoints.directory / "step-000002" / "config.json"
    shutil.copy(config, checkpoints.partial(3))
    (checkpoints.directory / "step-000003.partial/policy/other").touch()
    checkpoints.commit(3, CheckpointFacts(run="a"))
    with pytest.raises(
        DataError, match="could not export this state .rank 0, exit code 1."
    ) as caught:
        export_step(run, 3, tmp_path / "to")
    assert "state.npz" in caught.value.why
    assert not (tmp_path / "to").exists()


def test_a_place_that_a_trainer_cannot_write_is_named_and_not_its_state(
    run: Path, tmp_path: Path
) -> None:
    from gcore_tools.export.of_checkpoint import export_step

    (tmp_path / f".to.{os.getpid()}.new").write_text("a file where a directory should be")
    with pytest.raises(ConfigError, match="the weights could not be written") as caught:
        export_step(run, 2, tmp_path / "to")
    assert "the system says: File exists" in caught.value.why
    assert caught.value.todo == "free some space, or name another directory"
    assert not (tmp_path / "to").exists()


def test_an_interpreter_that_ends_before_it_is_told_anything_is_named_as_the_cause(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the disk, on which nothing was written."""
    from gcore_tools.export import of_checkpoint

    start = of_checkpoint._start

    def ended(python: str, log: Path) -> subprocess.Popen[bytes]:
        broken = tmp_path / "python"
        broken.write_text("#!/bin/sh\necho no module named gcore_core\nexit 3\n")
        broken.chmod(0o700)
        child = start(str(broken), log)
        child.wait()
        return child

    monkeypatch.setattr(of_checkpoint, "_start", ended)
    with pytest.raises(
        DataError, match=r"could not export this state \(rank 0, exit code 3\)"
    ) as told:
        of_checkpoint.export_step(run, 2, tmp_path / "to")
    assert told.value.why == "no module named gcore_core"
