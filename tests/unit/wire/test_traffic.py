"""What processes send and receive is counted, and every step's report says how much went through
controllers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_testing.simulation import SimulatedJob, run_virtual, simulate

from gcore_core.contract.launching import Endpoint
from gcore_core.wire.service import Call, Service
from gcore_core.wire.sockets import RpcNetwork

ECHO = Endpoint("echo", bytes, bytes)


async def test_both_ends_of_a_connection_count_the_same_bytes(tmp_path: Path) -> None:
    async def echo(request: bytes, call: Call) -> bytes:
        return request

    addresses = {"echo": f"unix:{tmp_path}/echo"}
    here, there = RpcNetwork(addresses, b"secret"), RpcNetwork(addresses, b"secret")
    service = Service("echo")
    service.add(ECHO, echo)
    await there.serve("echo", service)
    assert await here.peer("echo").call(ECHO, bytes(1000)) == bytes(1000)
    assert here.traffic == there.traffic
    assert (
        here.traffic.messages == 4 and 2000 < here.traffic.nbytes < 2200
    )  # with the greeting and its answer
    await here.close()
    await there.close()


@pytest.mark.parametrize("shards", [1, 4])
def test_a_report_has_the_bytes_per_record_that_went_through_controllers(
    shards: int, tmp_path: Path
) -> None:
    """A header alone goes in from the generator, out to two scorers, and as a reference to the
    trainer.
    """
    outcome = run_virtual(
        simulate(SimulatedJob(shards=shards, scorers=2, evaluate_prompts=0), tmp_path)
    )
    for report in outcome.reports[1:]:
        assert 300 < report.metrics["controller/bytes_per_record"] < 2000
        assert report.metrics["controller/messages"] > 10 * shards
