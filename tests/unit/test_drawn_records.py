"""What of a generator's record goes into its header."""

from __future__ import annotations

from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FINISHED, Prompt
from gcore_core.runtime.shells import drawn_records


def test_what_a_generator_says_a_record_costs_besides_reaches_the_header() -> None:
    request = SampleRequest(ordinal=3, sample=1, seed=7, prompt=Prompt(row=2, text=""))
    record = Finished(request=request, status=FINISHED, versions=(4, 5), cost=12.5)
    header = drawn_records._header(record)
    assert header.key == (3, 1)
    assert header.cost == 12.5
