"""A generator that masks actions is seen: by a metric, and by an error when nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import runs

MASKS = """
from dataclasses import dataclass, replace

import numpy as np
from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_testing import fake


class MasksAll(fake.FakeGenerator):
    def _finished(self, request, letters, status):
        record = super()._finished(request, letters, status)
        mask = self.mask(record.columns["action_mask"])
        return replace(record, columns={**record.columns, "action_mask": mask})

    def mask(self, mask):
        return np.zeros_like(mask)


class MasksOneRecord(MasksAll):
    def _finished(self, request, letters, status):
        if request.sample:
            return fake.FakeGenerator._finished(self, request, letters, status)
        return super()._finished(request, letters, status)


class MasksLast(MasksAll):
    def mask(self, mask):
        last = np.arange(mask.size) == mask.size - 1
        return np.where(last, 0, mask).astype(np.uint8)


class MasksAllAndLies(MasksAll):
    '''Its log-probs are those of another model, which a mask hid.'''

    def _finished(self, request, letters, status):
        record = super()._finished(request, letters, status)
        return replace(record, columns={**record.columns, "logp": record.columns["logp"] + 0.5})


@dataclass(frozen=True, kw_only=True)
class Repeats(fake.FakeGeneratorConfig):
    def traits(self):
        return Traits(receives_weights=True, fingerprints=True, determinism=True, abort=True)


@hookimpl
def gcore_generators():
    for cls in (MasksAll, MasksOneRecord, MasksLast, MasksAllAndLies):
        yield p.GeneratorProvider(
            name=cls.__name__.lower(), summary="-", factory=f"masks:{cls.__name__}",
            config=Repeats,
        )
"""


def finish(directory: Path, rollout: str) -> tuple[int, runs.Run]:
    job = runs.job(launcher={"use": "core/inline"})
    job["local"] = [*job["local"], "masks.py"]
    job["roles"] = {"policy": {"use": "trouble/recording"}, "rollout": {"use": rollout}}
    directory.mkdir(exist_ok=True)
    (directory / "masks.py").write_text(MASKS)
    return runs.finish(directory, job)


@pytest.mark.parametrize("generator", ["masksall", "masksallandlies"])
def test_a_step_without_a_trained_action_ends_the_run(generator: str, tmp_path: Path) -> None:
    code, run = finish(tmp_path, f"masks/{generator}")
    assert code == 6, run.output
    assert "step 0: no action was trained on" in run.output
    assert "action_mask is 0 at all " in run.output
    assert "the generator writes action_mask" in run.output


@pytest.mark.parametrize("generator", ["masksonerecord", "maskslast"])
def test_the_share_of_masked_actions_is_a_metric(generator: str, tmp_path: Path) -> None:
    code, run = finish(tmp_path, f"masks/{generator}")
    assert code == 0, run.output
    shares = [row["masked_share"] for row in run.metrics()[1:]]
    assert len(shares) == 3
    assert all(0 < share < 1 for share in shares)


def test_no_action_of_a_whole_answer_is_masked(tmp_path: Path) -> None:
    code, run = finish(tmp_path, "fake")
    assert code == 0, run.output
    assert [row["masked_share"] for row in run.metrics()[1:]] == [0.0] * 3
