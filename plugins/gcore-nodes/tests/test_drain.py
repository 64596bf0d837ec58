"""A host leaves when it is told to, or its person hears why not; nobody takes it back unasked."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gcore_nodes import command_launcher
from gcore_nodes.channel import Over
from gcore_nodes.command_launcher import CommandLauncher
from gcore_nodes.config import CommandConfig
from gcore_nodes.drain import drain
from gcore_nodes.facts import machine_facts
from gcore_nodes.join import Member, Wish
from gcore_nodes.machines import Host

from gcore_core.contract.errors import AddressError, ConfigError, WorkerDied


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def answering(run: Path, *lines: str, asked: str = "node2") -> threading.Thread:
    """Answers as a run does, when it is asked for the host ``asked``."""
    file = run / "leave" / asked

    def answer() -> None:
        while not file.exists():
            pass
        for line in lines:
            file.write_text(f"{line}\n")

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("node2 has left", 0),
        ("node2 does not leave: g-core run is there", 2),
    ],
)
def test_what_the_run_answers_is_printed_and_is_the_exit_code(
    run: Path, capsys: pytest.CaptureFixture[str], answer: str, code: int
) -> None:
    thread = answering(run, answer)
    assert drain(run, "node2", 60.0) == code
    thread.join()
    assert answer in capsys.readouterr().out
    assert not list((run / "leave").iterdir()), "the next one would be answered by this file"


def test_a_host_may_be_named_by_its_node(run: Path) -> None:
    """The run takes either name, and answers with the host's."""
    thread = answering(run, "node2 has left", asked="agent.2")
    assert drain(run, "agent.2", 10.0) == 0
    thread.join()


def test_a_run_that_does_not_answer_is_told_so(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drain(run, "node2", 0.3) == AddressError.exit_code
    assert capsys.readouterr().err == "node2 has not left in 0.3 s: no run answers\n"


def test_a_drain_ends_with_the_run(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore_nodes.drain._OVER_S", 0.5)
    thread = answering(run, "node2 leaves at the next checkpoint")
    assert drain(run, "node2", 60.0) == AddressError.exit_code
    thread.join()
    assert capsys.readouterr().err == "the run has ended, and uses node2 no more\n"


def test_a_second_drain_of_a_host_ends_with_the_first(run: Path) -> None:
    def removing() -> None:
        file = run / "leave" / "node2"
        while not file.exists():
            pass
        file.unlink()

    thread = threading.Thread(target=removing)
    thread.start()
    with pytest.raises(ConfigError, match="nobody asks node2 to leave any more"):
        drain(run, "node2", 60.0)
    thread.join()


@pytest.mark.parametrize("host", ["", "..", ".hidden", "a/b"])
def test_what_is_no_name_of_a_host_is_refused(run: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a host"):
        drain(run, host, 1.0)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory of a run"):
        drain(tmp_path, "node2", 1.0)


async def test_a_host_that_has_left_is_not_asked_again_until_the_list_was_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(command: str, names: list[str], *rest: Any) -> list[Any]:
        here = machine_facts()
        return [msgspec.structs.replace(here, machine=name) for name in names]

    monkeypatch.setattr(command_launcher, "ask_hosts", answers)
    hosts = tmp_path / "hosts"
    hosts.write_text("node1\nnode2\n")
    launcher = CommandLauncher(CommandConfig(hosts=str(hosts), min_hosts=1))
    launcher.let_go("node2")
    there = [Host(name="node1", facts=machine_facts())]
    assert await launcher._ask_absent(there) == ""
    present, missing = await launcher._ask(again=True)
    assert [host.name for host in present] == ["node1"]
    assert missing == {"node2": "it has left"}
    hosts.write_text("node1\n")
    assert await launcher._ask_absent(there) == ""
    hosts.write_text("node1\nnode2\n")
    assert await launcher._ask_absent(there) == "node2"
    there[0] = Host(name="node1", facts=msgspec.structs.replace(there[0].facts, machine="node2"))
    assert await launcher._ask_absent(there) == "", "another name of a machine that is there"


class LostHome:
    """A connection on which home says some things, and is lost then."""

    def __init__(self, *messages: Any) -> None:
        self._messages = list(messages)

    def send(self, message: Any) -> None:
        pass

    async def expect(self, *kinds: Any) -> Any:
        if not self._messages:
            raise WorkerDied("the connection has ended", where="home")
        return self._messages.pop(0)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("says", [[], [Over(well=False, again=True)]], ids=["lost", "begins again"])
async def test_a_node_that_leaves_does_not_come_again(says: list[Over]) -> None:
    wish = Wish(host="home", port=1, token=b"", name="node2", wait_s=1.0, again_s=1.0)
    for is_leaving in (True, False):
        member = Member(wish)
        member._is_leaving = is_leaving
        home: Any = LostHome(*says)
        over, _ = await member._served(home)
        assert over.again != is_leaving
