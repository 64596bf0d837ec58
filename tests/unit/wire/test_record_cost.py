"""What a controller does for every record, and need not do."""

from __future__ import annotations

import gc

import msgspec
import pytest

from gcore_core.contract.order import row_of
from gcore_core.contract.records import (
    Assignment,
    Facts,
    Header,
    Inquiry,
    Lease,
    RecordScore,
    Ref,
)
from gcore_core.contract.run_files import Asked, RecordTrace
from gcore_core.runtime.messages import Extra, TrainItem
from gcore_core.wire.frames import Frame

REF = Ref("node0", "slab", 0, 1, 2, b"mac")


@pytest.mark.parametrize(
    "form",
    [
        Asked,
        Assignment,
        Extra,
        Facts,
        Frame,
        Header,
        Inquiry,
        Lease,
        RecordTrace,
        RecordScore,
        Ref,
        TrainItem,
    ],
)
def test_no_garbage_is_collected_for_what_a_controller_holds_of_each_record(
    form: type[msgspec.Struct],
) -> None:
    assert not form.__struct_config__.gc


def test_a_header_that_came_is_unknown_to_the_garbage_collector() -> None:
    header = Header(1, 2, 3, 4, rewards={"judged": 1.0}, columns=REF, media={"image": REF})
    came = msgspec.msgpack.decode(msgspec.msgpack.encode([header]), type=list[Header])
    assert not gc.is_tracked(came[0])


def test_a_row_is_the_same_when_it_is_asked_again() -> None:
    first = [row_of(ordinal, 1000, 7) for ordinal in range(2000)]
    assert [row_of(ordinal, 1000, 7) for ordinal in range(2000)] == first
    assert row_of(3, 1000, 7) != row_of(3, 1000, 8)
