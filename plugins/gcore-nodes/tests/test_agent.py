"""The agent of a run on several machines: what it makes, how long it lives, how it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_nodes.agent import MachineAgentSpec, prepare

from gcore_core.contract.errors import AddressError
from gcore_core.kits.launching import StoreSpec


def test_a_directory_of_the_run_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """On a machine that does not share it; there the agent makes it first of all."""
    (tmp_path / "runs").write_text("a file")
    spec = MachineAgentSpec(
        name="agent.1",
        addresses={},
        secret=b"s" * 32,
        store=StoreSpec(node="agent.1", directory="", spill=""),
        meeting=str(tmp_path / "meeting"),
        record=str(tmp_path / "runs" / "job" / "logs" / "processes.json"),
        is_remote=True,
    )
    with pytest.raises(AddressError, match="the run's directory cannot be made") as error:
        prepare(spec)
    assert error.value.where == str(tmp_path / "runs" / "job" / "logs")
