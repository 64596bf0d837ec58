"""What of a generator's record goes into its header, and for which step it is stored."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from gcore_core.contract.columns import Columns, token_columns_problem
from gcore_core.contract.errors import ContractError
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FAILED, FINISHED, Lease, Prompt, Ref
from gcore_core.runtime.messages import TRAIN, GenerateRequest
from gcore_core.store.client import StoreWriter
from gcore_core.workers import drawn_records
from gcore_core.workers.rounds import Rounds
from gcore_core.workers.row_digest import prompt_digest


def test_the_extra_cost_of_a_record_reaches_its_header() -> None:
    request = SampleRequest(ordinal=3, sample=1, seed=7, prompt=Prompt(row=2, text=""))
    record = Finished(request=request, status=FINISHED, versions=(4, 5), cost=12.5)
    header = drawn_records._header(record)
    assert header.key == (3, 1)
    assert header.cost == 12.5


def test_a_record_is_as_long_as_its_row_and_its_answer_as_what_was_sampled() -> None:
    request = SampleRequest(ordinal=3, sample=1, seed=7, prompt=Prompt(row=2, text=""))
    columns = {
        "prompt_ids": np.array([1, 2], np.int32),
        "action_ids": np.arange(5, dtype=np.int32),
        "action_mask": np.array([1, 0, 0, 1, 1], np.uint8),
        "logp": np.zeros(5, np.float32),
    }
    record = Finished(request=request, status=FINISHED, versions=(4, 4), columns=columns)
    header = drawn_records._header(record)
    assert (header.n_prompt, header.n_actions, header.n_given, header.n_sampled) == (2, 5, 2, 3)


def test_the_header_carries_the_digest_of_the_row() -> None:
    prompt = Prompt(row=2, text="1+2=", fields={"answer": "3", "source": "a"})
    request = SampleRequest(ordinal=3, sample=1, seed=7, prompt=prompt)
    header = drawn_records._header(Finished(request=request, status=FINISHED, versions=(4, 5)))
    assert header.prompt_digest == prompt_digest(prompt) != 0


def test_the_digest_of_a_row_depends_on_its_content_alone() -> None:
    row = Prompt(row=2, text="1+2=", images=["/a/x.png"], fields={"answer": "3", "source": "a"})
    same = Prompt(row=2, text="1+2=", images=["/b/x.png"], fields={"source": "a", "answer": "3"})
    assert prompt_digest(row) == prompt_digest(same)
    others = [
        Prompt(row=3, text=row.text, images=row.images, fields=row.fields),
        Prompt(row=2, text="1+2", images=row.images, fields=row.fields),
        Prompt(row=2, messages=[], images=row.images, fields=row.fields),
        Prompt(row=2, text=row.text, images=[], fields=row.fields),
        Prompt(row=2, text=row.text, images=row.images, fields={**row.fields, "answer": "4"}),
    ]
    assert len({prompt_digest(other) for other in [row, *others]}) == 6


def test_a_row_with_an_integer_beyond_64_bits_has_a_digest() -> None:
    rows = [Prompt(row=2, text="", fields={"b": 1, "answer": 2**64 + n}) for n in range(2)]
    same = Prompt(row=2, text="", fields={"answer": 2**64, "b": 1})
    assert prompt_digest(rows[0]) == prompt_digest(same) != 0
    assert prompt_digest(rows[0]) != prompt_digest(rows[1])


def test_a_row_that_cannot_be_encoded_has_no_digest() -> None:
    assert prompt_digest(Prompt(row=2, text="", fields={"answer": object()})) == 0
    assert prompt_digest(Prompt(row=2, text="", fields={"choices": {1: "a"}})) == 0


def token_columns(**changed: np.ndarray) -> dict[str, np.ndarray]:
    columns = {
        "prompt_ids": np.array([1, 2], np.int32),
        "action_ids": np.arange(3, dtype=np.int32),
        "action_mask": np.ones(3, np.uint8),
        "logp": np.zeros(3, np.float32),
        "temperature": np.ones((), np.float32),
        "text": np.frombuffer(b"abc", np.uint8),
    }
    return columns | changed


NO_TEXT = token_columns(txt=np.frombuffer(b"abc", np.uint8))
del NO_TEXT["text"]


@pytest.mark.parametrize(
    ("status", "columns", "told"),
    [
        pytest.param(FINISHED, NO_TEXT, "column 'text' is missing; there are", id="misspelt"),
        pytest.param(
            FINISHED, token_columns(logp=np.zeros(3)), "'logp' is float64, it must", id="dtype"
        ),
        pytest.param(
            FINISHED,
            token_columns(logp=np.zeros(2, np.float32)),
            "action_ids [3], logp [2], action_mask [3]",
            id="length",
        ),
        pytest.param(
            FINISHED,
            token_columns(temperature=np.ones(3, np.float32)),
            "'temperature' is one number",
            id="temperatures",
        ),
        pytest.param("done", token_columns(), "its status is 'done', it must be", id="status"),
        pytest.param(FAILED, token_columns(), "it has failed, and has columns", id="failed"),
    ],
)
async def test_what_is_no_record_of_the_contract_ends_the_request(
    status: str, columns: dict[str, np.ndarray], told: str
) -> None:
    """Else a reward reads an empty text, and a trainer another precision, in silence."""
    rounds = Rounds(shards=1, gather_s=None, restarted=False)
    records = drawn_records.DrawnRecords(cast(StoreWriter, SlowStore()), rounds, shards=1)
    request = SampleRequest(ordinal=7, sample=0, seed=1, prompt=Prompt(row=0, text=""))
    records.begin(Lease(ordinal=7, row=0, epoch=0, samples=(0,)), 2)
    record = Finished(request=request, status=status, versions=(0, 0), columns=columns)
    with pytest.raises(ContractError, match=re.escape(told)) as raised:
        await records.keep_finished([record])
    assert "record 7/0" in str(raised.value)


def test_the_columns_of_another_kind_of_action_are_not_looked_at() -> None:
    assert token_columns_problem({"latents": np.zeros((2, 4), np.float64)}) == ""
    assert token_columns_problem(token_columns()) == ""


class SlowStore:
    """A store that is full at first; a reference names the step that it is held for."""

    def __init__(self) -> None:
        self.room = asyncio.Event()

    async def put(self, step: int, shards: frozenset[int], records: Sequence[Columns]) -> Ref:
        await self.room.wait()
        return Ref("node0", f"of step {step}", 0, 0, 0, b"", "columns", ())

    async def put_blobs(self, step: int, shards: frozenset[int], arrays: Any) -> list[Ref]:
        return []


async def test_a_record_is_held_for_a_step_that_asked_while_it_was_stored() -> None:
    store = SlowStore()
    rounds = Rounds(shards=1, gather_s=None, restarted=False)
    records = drawn_records.DrawnRecords(cast(StoreWriter, store), rounds, shards=1)
    lease = Lease(ordinal=7, row=0, epoch=0, samples=(0,))
    request = SampleRequest(ordinal=7, sample=0, seed=1, prompt=Prompt(row=0, text=""))

    await rounds.join(GenerateRequest(2, 0, 0, TRAIN, [lease], 0))
    assert records.begin(lease, 2) == [0]
    taking = asyncio.ensure_future(
        records.keep_finished([Finished(request=request, status=FINISHED, versions=(2, 2))])
    )
    await asyncio.sleep(0)
    await rounds.join(GenerateRequest(3, 0, 0, TRAIN, [lease], 0))
    assert records.begin(lease, 3) == []  # it still runs
    store.room.set()
    await taking

    ((step, header),) = records._finished.values()
    assert step == 3
    assert header.columns is not None
    assert header.columns.slab == "of step 3"
