"""What a loss is computed of is compared with the records that a micro-batch names."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.lineage import check_terms
from gcore_language.packing import Batch, Sample, micro_batches

from gcore_core.contract.errors import RecordMismatch
from tests.support import language_models as tiny

LAYOUTS = ("flat", "shared", "padded")


def packed(layout: Any) -> tuple[Batch, list[Any], np.ndarray]:
    """A micro-batch of all records, these, and their advantages."""
    records = tiny.make_records()
    advantages = tiny.make_advantages(records)
    samples = [
        Sample(index=i, ordinal=r.ordinal, prompt=r.columns["prompt_ids"], columns=r.columns)
        for i, r in enumerate(records)
    ]
    (batch,) = micro_batches(samples, layout, 10**9, torch.device("cpu"))
    by_record = torch.from_numpy(advantages[batch.index].astype(np.float32))
    batch.columns["advantage"] = by_record[batch.columns["record"]]
    return batch, records, advantages


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_its_records_passes_in_every_layout(layout: str) -> None:
    check_terms(*packed(layout), "step 0")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("column", ["mask", "rollout_logp", "advantage"])
def test_one_changed_action_is_refused_and_its_record_is_named(layout: str, column: str) -> None:
    batch, records, advantages = packed(layout)
    last = len(batch.targets) - 1
    changed = batch.columns[column].clone()
    changed[last] = not changed[last] if column == "mask" else changed[last] + 1
    batch.columns[column] = changed
    record = records[batch.index[-1]]
    with pytest.raises(RecordMismatch, match=f"record {record.ordinal}/{record.sample} ") as caught:
        check_terms(batch, records, advantages, "step 0")
    names = {"mask": "action_mask", "rollout_logp": "logp", "advantage": "advantage"}
    assert caught.value.facts["column"] == names[column]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_places_in_another_order_are_refused(layout: str) -> None:
    batch, records, advantages = packed(layout)
    reversed_ = dataclasses.replace(batch, index=batch.index[::-1].copy())
    with pytest.raises(RecordMismatch):
        check_terms(reversed_, records, advantages, "step 0")


def test_terms_that_are_too_few_are_refused() -> None:
    batch, records, advantages = packed("padded")
    batch.columns["advantage"] = batch.columns["advantage"][:-1]
    with pytest.raises(RecordMismatch, match="another advantage"):
        check_terms(batch, records, advantages, "step 0")
