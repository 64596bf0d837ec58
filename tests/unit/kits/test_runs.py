"""What tools learn of a run from its directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from gcore_testing.installed import InstalledPlugins

from gcore_core.contract.errors import CheckpointError
from gcore_core.kits import runs
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
def run(installed: InstalledPlugins, tmp_path: Path) -> Path:
    """A run whose settings have changed since it saved its checkpoint."""
    installed.add("letters", "from gcore_testing.fake import *\n")
    checkpoints = Checkpoints(tmp_path)
    part = checkpoints.begin(3)
    (part / "config.json").write_text(json.dumps(yaml.safe_load(JOB)))
    checkpoints.commit(3, CheckpointFacts(run="a"))
    (tmp_path / "config.yaml").write_text("run: {name: another}\n")
    return tmp_path


def test_a_checkpoint_that_is_whole_is_opened(run: Path) -> None:
    assert runs.saved_steps(run) == [3]
    path = runs.open_checkpoint(run, 3)
    manifest, problems = runs.inspect_checkpoint(path)
    assert manifest is not None and manifest.step == 3 and problems == []
    (path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="step 3 is not whole"):
        runs.open_checkpoint(run, 3)


def test_the_plan_of_a_checkpoint_has_the_settings_that_it_was_saved_with(run: Path) -> None:
    plan = runs.saved_plan(runs.open_checkpoint(run, 3))
    assert plan.settings.run.name == "job"
    assert runs.read_settings(run) == {"run.name": "another"}
