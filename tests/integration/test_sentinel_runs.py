"""Runs of fakes whose second replica goes wrong: it is named, and the run ends saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import FAKE, finish, job

LATE = '''
"""A generator whose replica 1 gives log-probs, or holds weights, that are wrong from version 2 on."""
from dataclasses import dataclass, replace

import numpy as np

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_testing import fake


@dataclass(frozen=True, kw_only=True)
class LateConfig(fake.FakeGeneratorConfig):
    fault: str = "gap"

    def traits(self):
        return Traits(
            receives_weights=True,
            fingerprints=True,
            determinism=True,
            abort=True,
            scores_logprobs=True,
        )


class Late(fake.FakeGenerator):
    def __init__(self, config, context):
        super().__init__(config, context)
        self._fault = config.fault if context.rank == 1 else ""
        self._older = self._logits

    def begin_weights(self, plan):
        self._older = self._logits.copy()
        super().begin_weights(plan)

    def logprobs(self, records):
        if self._fault == "unpushed" and self.version >= 3:
            self._logits = self._older  # after the push was verified
        return super().logprobs(records)

    def submit(self, requests):
        if self._fault == "old" and self.version >= 2:
            self._logits = self._older
        super().submit(requests)

    def _finished(self, request, letters, status):
        found = super()._finished(request, letters, status)
        if self._fault != "gap" or self.version < 2:
            return found
        return replace(found, columns={**found.columns, "logp": found.columns["logp"] + np.float32(0.01)})


@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(
        summary="-", factory="late:Late", config=LateConfig
    )
'''  # noqa: E501


def late(tmp_path: Path, fault: str, **sections: Any) -> dict[str, Any]:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "late.py").write_text(LATE)
    config = job(
        run={"steps": 6},
        checkpoint={"every": 1, "restarts": 0},
        roles={
            "policy": {"use": "fake"},
            "rollout": {"use": "late", "slots": 2, "config": {"fault": fault}},
        },
        cluster={"devices": 4},
        launcher={"use": "core/inline"},
        **sections,
    )
    config["local"] = [str(FAKE), "trouble.py", "late.py"]
    return config


@pytest.mark.protects
@pytest.mark.parametrize("use", ["core/band", "sentinel/band", "sentinel"])
@pytest.mark.parametrize("shards", [1, 2])
def test_the_replica_that_goes_wrong_is_named_and_the_run_ends_saved(
    tmp_path: Path, use: str, shards: int
) -> None:
    config = late(tmp_path, "gap", sentinel={"use": use}, controller={"shards": shards})
    code, run = finish(tmp_path, config)
    assert code == 6, run.output
    assert "step 2: rollout.1 and the trainer disagree about log-probs since step 2" in run.output
    assert "are off by more than 0.001 nats" in run.output
    saved = sorted(path.name for path in (run.path / "checkpoints").glob("step-*"))
    assert saved[-1:] == ["step-000002"], saved


def test_a_replica_that_holds_old_weights_is_told_by_its_tensors(tmp_path: Path) -> None:
    code, run = finish(tmp_path, late(tmp_path, "old"))
    assert code == 6, run.output
    assert (
        "cause: rollout.1 holds weights of version 1 in 2 of 2 tensors: old weights" in run.output
    )


def test_a_healthy_run_with_two_replicas_goes_to_its_end(tmp_path: Path) -> None:
    code, run = finish(tmp_path, late(tmp_path, "none"))
    assert code == 0, run.output
