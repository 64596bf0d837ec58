"""Commands lead to hosts word by word, and a host that cannot be used is told with its command."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from pathlib import Path

import pytest
from gcore_nodes.command_launcher import CommandLauncher
from gcore_nodes.commands import ask_hosts, check_usable, command_for
from gcore_nodes.config import CommandConfig
from gcore_nodes.facts import MachineFacts, machine_identity

from gcore_core import __version__
from gcore_core.contract.errors import ConfigError

#: Runs what follows the host, here.
HERE = "env HOST={host}"


def ask(template: str, hosts: list[str], python: str, timeout_s: float = 60) -> list[MachineFacts]:
    answers = asyncio.run(ask_hosts(template, hosts, python, timeout_s))
    check_usable(template, hosts, python, answers)
    return [answer for answer in answers if not isinstance(answer, str)]


def fault(template: str, python: str = sys.executable, timeout_s: float = 60) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        ask(template, ["n1"], python, timeout_s)
    return error.value


def interpreter(directory: Path, script: str) -> str:
    """Makes a program that stands for an interpreter on a host."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("ssh {host}", "ssh n1 python -V"),
        ("ssh -o BatchMode=yes -l 'a b' {host}", "ssh -o BatchMode=yes -l 'a b' n1 python -V"),
        ("srun --overlap -N1 -n1 -w {host}", "srun --overlap -N1 -n1 -w n1 python -V"),
        ("kubectl exec -i {host} --", "kubectl exec -i n1 -- python -V"),
        ("ip netns exec {host}", "ip netns exec n1 python -V"),
        ("docker exec -i --env=H={host} {host}", "docker exec -i --env=H=n1 n1 python -V"),
    ],
)
def test_templates(template: str, expected: str) -> None:
    assert shlex.join(command_for(template, "n1", ["python", "-V"])) == expected


def test_no_shell_reads_a_host() -> None:
    assert command_for("ssh {host}", "a; b $(c)", []) == ["ssh", "a; b $(c)"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("ssh", "command must say where {host} goes"),
        ("{host}", "must begin with a program"),
        ("ssh 'n {host}", "cannot be split into words: No closing quotation"),
    ],
)
def test_wrong_templates(template: str, message: str) -> None:
    with pytest.raises(ValueError, match="command") as error:
        CommandConfig(hosts=["a"], command=template)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"python": "my python"}, "without blanks"),
        ({"port": 80}, "from 1024"),
        ({"address": "10.0"}, "10.0"),
        ({"private": ["here"]}, "here"),
        ({"devices": 0}, "positive"),
        ({"patience_s": 7.0}, "at least 8"),
        ({"min_hosts": 0}, "min_hosts must be at least 1"),
        ({"min_hosts": 2}, "min_hosts is 2, and hosts is ['a']"),
        ({"hosts": ["a", "a"]}, "named 2 times"),
    ],
)
def test_wrong_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=".") as error:
        CommandConfig(**{"hosts": ["a"], **settings})  # type: ignore[arg-type]
    assert message in str(error.value)


def test_facts_come_from_all_hosts_in_order() -> None:
    first, second = ask(HERE, ["n1", "n2"], sys.executable)
    assert first.version == second.version == __version__
    assert first.machine == machine_identity()
    assert first.devices


def test_facts_may_follow_what_a_login_prints(tmp_path: Path) -> None:
    noisy = interpreter(tmp_path, f'echo "Welcome to $HOST"; exec {sys.executable} "$@"')
    (facts,) = ask(HERE, ["n1"], noisy)
    assert facts.version == __version__


def test_a_program_that_is_not_there() -> None:
    error = fault("no-such-ssh {host}")
    assert error.what == "n1 cannot be used"
    assert error.why == "no-such-ssh cannot be started: No such file or directory"
    assert error.todo.startswith("try it by hand: no-such-ssh n1 ")


def test_an_interpreter_that_is_not_there() -> None:
    error = fault(HERE, "/no/such/python")
    assert "/no/such/python" in error.why and "No such file" in error.why
    assert "set launcher.config.python" in error.why


def test_an_interpreter_without_the_core(tmp_path: Path) -> None:
    bare = interpreter(tmp_path, f'exec {sys.executable} -I -S "$@"')
    error = fault(HERE, bare)
    assert "No module named" in error.why
    assert "install it there" in error.why


def test_another_version(tmp_path: Path) -> None:
    facts = {"version": "0.0.9", "executable": "/old/python"}
    error = fault(HERE, interpreter(tmp_path, f"echo '{json.dumps(facts)}'"))
    assert error.why == f"it has gcore-core 0.0.9 (/old/python), here it is {__version__}"


def test_what_is_no_json(tmp_path: Path) -> None:
    error = fault(HERE, interpreter(tmp_path, "echo one; echo two"))
    assert error.why == "it did not answer with its facts but with: one\ntwo"
    assert "with: nothing" in fault(HERE, interpreter(tmp_path, ":")).why


def test_the_last_lines_of_errors_are_shown(tmp_path: Path) -> None:
    script = "for i in 1 2 3 4; do echo line $i >&2; done; exit 255"
    error = fault(HERE, interpreter(tmp_path, script))
    assert error.why == "the command ended with 255: line 2\nline 3\nline 4"


def test_a_host_that_does_not_answer_is_given_up_and_its_command_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"echo $$ >> {pids}; sleep 1000 & echo $! >> {pids}; wait"
    started_s = time.monotonic()
    error = fault(HERE, interpreter(tmp_path, script), timeout_s=1.0)
    assert time.monotonic() - started_s < 20
    assert error.why == "it did not answer within 1 s (launcher.config.start_s)"
    deadline_s = time.monotonic() + 20
    while any(is_running(pid) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline_s, "the command lives on"
        time.sleep(0.02)


def is_running(pid: str) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_all_hosts_are_asked_at_once_and_those_that_fail_are_named(tmp_path: Path) -> None:
    """Each waits until all have begun, so one after the other would never end."""
    script = (
        f"touch {tmp_path}/$HOST\n"
        f"until [ -e {tmp_path}/n1 -a -e {tmp_path}/n2 -a -e {tmp_path}/n3 ]; do sleep 0.02; done\n"
        f'[ $HOST = n1 ] && exec {sys.executable} "$@"\nexit 3'
    )
    with pytest.raises(ConfigError) as error:
        ask(HERE, ["n1", "n2", "n3"], interpreter(tmp_path, script))
    assert error.value.what == "n2 cannot be used (and 1 of 2 others: n3)"
    assert error.value.facts["hosts"] == ["n2", "n3"]


@pytest.mark.parametrize(
    ("hosts", "grows"), [(["a"], False), (["a", "b"], True), ("hosts.txt", True)]
)
def test_another_host_can_come_where_a_file_or_several_are_named(
    hosts: str | list[str], grows: bool
) -> None:
    """A run on one host that the job itself names listens on no network."""
    assert CommandLauncher(CommandConfig(hosts=hosts)).grows == grows
