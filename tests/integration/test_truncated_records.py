"""Records that were cut off are trained on, or only compared with, as the job says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import runs


@pytest.mark.parametrize("truncated", ["train", "mask"])
def test_actions_of_truncated_records_are_masked_where_the_job_says_so(
    tmp_path: Path, truncated: str
) -> None:
    job = runs.job(launcher={"use": "core/inline"})
    job["roles"]["rollout"]["config"] = {"max_new_tokens": 3}
    job["controller"]["config"]["truncated"] = truncated
    code, run = runs.finish(tmp_path, job)
    assert code == 0, run.output
    steps = [step["metrics"] for step in run.metrics() if "masked_share" in step["metrics"]]
    assert steps
    for step in steps:
        assert 0 < step["truncated_share"] < 1
        # no record is longer than a truncated one, so their share of the actions is the larger
        if truncated == "train":
            assert step["masked_share"] == 0
        else:
            assert step["truncated_share"] <= step["masked_share"] < 1
