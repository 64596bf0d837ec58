"""What the process that speaks with Ray tells is told on; here a script stands in its place."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from pathlib import Path

import pytest
from gcore_nodes.facts import machine_facts
from gcore_nodes.ray.config import RayConfig
from gcore_nodes.ray.launcher import RayLauncher

from gcore_core.contract.errors import ConfigError, WorkerError
from gcore_core.contract.launching import ElasticLauncher, NodeFacts
from gcore_core.wire.service import Service

pytestmark = pytest.mark.rest

BEGIN = """
import sys, msgspec
from gcore_nodes.facts import machine_facts
from gcore_nodes.ray.messages import *
wish = msgspec.json.decode(sys.stdin.readline(), type=Wish)
def tell(event):
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\\n")
    sys.stdout.flush()
def node(address, facts, code=0, err=b""):
    out = msgspec.json.encode(facts)
    return KeptNode(address=address, cpus=3.0, code=code, out=out, err=err, public=bytes(32),
                    visible=None)
def here():
    return msgspec.structs.replace(machine_facts(), addresses=["10.0.0.1"])
def other(number):
    return msgspec.structs.replace(machine_facts(), machine=f"m{number}", devices=[],
                                   addresses=[f"10.0.0.{number}"])
"""
END = "sys.stdin.read()\n"


def launcher(tmp_path: Path, script: str) -> RayLauncher:
    path = tmp_path / "stand_in.py"
    path.write_text(BEGIN + textwrap.dedent(script))
    return RayLauncher(RayConfig(start_s=20.0, wait_s=20.0), [sys.executable, str(path)])


def nodes(tmp_path: Path, script: str) -> list[NodeFacts]:
    return asyncio.run(launcher(tmp_path, script).nodes("auto"))


def fault(tmp_path: Path, script: str) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        nodes(tmp_path, script)
    return error.value


def test_machines_come_with_the_cpus_that_ray_has_set_aside(tmp_path: Path) -> None:
    """Home is the one that this runs on."""
    script = f"tell(Found([node('10.0.0.1', here()), node('10.0.0.2', other(2))]))\n{END}"
    first, second = nodes(tmp_path, script)
    assert (first.host, second.host) == ("10.0.0.1", "10.0.0.2")
    if machine_facts().devices[0].kind == "cpu":
        assert len(first.devices) == 3
    assert len(second.devices) == 3


def test_what_is_missing_is_told_while_the_run_waits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"tell(Waiting('2 GPUs'))\ntell(Found([node('10.0.0.1', here())]))\n{END}"
    assert len(nodes(tmp_path, script)) == 1
    assert "the run waits for Ray: 2 GPUs" in capfd.readouterr().err


def test_a_refusal_is_told_as_it_is(tmp_path: Path) -> None:
    error = fault(tmp_path, "tell(Failed('no cluster', 'why', 'do', 'launcher.config.cluster'))")
    assert (error.what, error.why, error.todo) == ("no cluster", "why", "do")
    assert error.where == "launcher.config.cluster"


def test_a_process_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    error = fault(tmp_path, "sys.exit('raylet is gone')")
    assert error.what == "the process that speaks with Ray ended with 1"
    assert "raylet is gone" in error.why


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ("node('10.0.0.2', other(2), 1, b'No module named gcore_core')", "no gcore-core: install"),
        ("node('10.0.0.2', {'version': '0.0.9', 'executable': '/old'})", "gcore-core 0.0.9 (/old)"),
        ("node('10.0.0.2', {}, 127, b'/no/python: not there')", "set launcher.config.python"),
    ],
)
def test_a_node_that_has_not_what_is_needed_is_named(tmp_path: Path, found: str, why: str) -> None:
    error = fault(tmp_path, f"tell(Found([{found}]))\n{END}")
    assert error.what == "10.0.0.2 cannot be used"
    assert why in error.why
    assert "in the same versions" in error.todo


def test_two_ray_nodes_on_one_machine(tmp_path: Path) -> None:
    script = f"tell(Found([node('10.0.0.2', other(2)), node('10.0.0.3', other(2))]))\n{END}"
    error = fault(tmp_path, script)
    assert error.what.startswith("10.0.0.2 and 10.0.0.3 are one machine")
    assert "once on each machine" in error.todo


def test_a_run_is_placed_again_on_what_ray_has_and_then_gets_just_these(tmp_path: Path) -> None:
    """What was lost is named, and a site is opened on the nodes that were found."""

    async def go() -> None:
        found = "tell(Found([node('10.0.0.1', here()), node('10.0.0.2', other(2))]))"
        one = launcher(tmp_path, found + "\nsys.stdin.read()")
        first = await one.find_nodes("auto", again=False)
        assert ([node.host for node in first.nodes], first.missing) == (
            ["10.0.0.1", "10.0.0.2"],
            {},
        )
        launcher(tmp_path, f"tell(Found([node('10.0.0.1', here())]))\n{END}")
        for _ in range(2):
            second = await one.find_nodes("auto", again=True)
            assert list(second.missing) == ["10.0.0.2"]
        launcher(tmp_path, "tell(Failed(f'{wish.addresses}', is_lost=True, where='10.0.0.1'))")
        with pytest.raises(WorkerError) as error:
            async with one.site({}, Service("supervisor"), tmp_path):
                raise AssertionError("the site is open")
        assert (error.value.what, error.value.where) == ("['10.0.0.1']", "10.0.0.1")

    assert isinstance(launcher(tmp_path, ""), ElasticLauncher)
    asyncio.run(go())


def test_the_end_of_what_speaks_with_ray_is_the_end_of_what_its_keepers_hold(
    tmp_path: Path,
) -> None:
    """Whoever waits for an agent is told, and the agent's log says why."""

    async def go() -> None:
        script = "tell(Found([node('10.0.0.2', other(2))]))\nsys.stdin.readline()\nsys.exit(3)"
        one = launcher(tmp_path, script)
        async with one.hosts():
            assert one._link is not None
            agent = one._link.start("10.0.0.2", b"", tmp_path / "log")
            await asyncio.wait_for(agent.wait(), 20)
            assert agent.returncode == 255

    asyncio.run(go())
    assert (tmp_path / "log").read_text() == "the process that speaks with Ray has ended\n"
