"""A worker and its supervisor run the same versions, or the worker does not start."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel

from gcore_core import __version__
from gcore_core.contract.errors import PluginIncompatible
from gcore_core.node import handshake
from gcore_core.run.supervisor import Supervisor
from gcore_core.runtime.messages import Hello, Versions
from gcore_core.wire.service import Call


def side(python: str, core: str = "1.0", **plugins: str) -> Versions:
    return Versions(python, core, {f"gcore-{name}": version for name, version in plugins.items()})


def test_versions_describe_the_running_interpreter(installed: InstalledPlugins) -> None:
    installed.add("vllm", wheel=Wheel(version="1.3"))
    assert handshake.versions(["gcore-vllm", "gcore-none"]) == Versions(
        sys.executable, __version__, {"gcore-vllm": "1.3", "gcore-none": ""}
    )


def test_equal_sides_agree() -> None:
    handshake.agree("policy.0", worker=side("/b", vllm="1.3"), supervisor=side("/a", vllm="1.3"))


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (side("/b", core="1.1", vllm="1.3"), "its gcore-core is 1.1, the supervisor's is 1.0."),
        (side("/b", vllm="1.2"), "its gcore-vllm is 1.2, the supervisor's is 1.3."),
        (side("/b", vllm=""), "its gcore-vllm is missing, the supervisor's is 1.3."),
        (side("/b"), "its gcore-vllm is missing, the supervisor's is 1.3."),
    ],
)
def test_a_difference_names_both_interpreters(worker: Versions, message: str) -> None:
    with pytest.raises(PluginIncompatible) as caught:
        handshake.agree("policy.0", worker=worker, supervisor=side("/a", vllm="1.3"))
    assert str(caught.value).splitlines()[0] == f"policy.0: {message}"
    assert (
        "in /a" in caught.value.why
        and "in /b" in caught.value.why
        and "/b -m pip" in caught.value.todo
    )


async def test_the_supervisor_compares_versions_of_each_worker(installed: InstalledPlugins) -> None:
    installed.add("vllm", wheel=Wheel(version="1.3"))
    hello = Hello("policy.0", 1, side("/b", core=__version__, vllm="1.2"))
    with pytest.raises(
        PluginIncompatible, match="policy.0: its gcore-vllm is 1.2, the supervisor's is 1.3"
    ):
        await Supervisor.hello(SimpleNamespace(), hello, Call(lambda: None))  # type: ignore[arg-type]
