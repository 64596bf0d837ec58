"""Makes commands that lead to hosts, and asks all hosts for their facts at once."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence

from gcore_core.contract.errors import ConfigError
from gcore_nodes.facts import MachineFacts
from gcore_nodes.machines import FACTS, end_command, read_facts


def command_for(template: str, host: str, words: Sequence[str]) -> list[str]:
    """Returns the command that runs ``words`` on a host.

    The template is split into words first and the host put in then, so a host is never more than a
    part of one word.
    """
    return [word.replace("{host}", host) for word in shlex.split(template)] + list(words)


async def ask_hosts(
    template: str, hosts: Sequence[str], python: str, timeout_s: float
) -> list[MachineFacts | str]:
    """Asks all hosts at once; returns of each, in order, what it has or why it cannot be used."""
    return await asyncio.gather(
        *(_ask(_facts_command(template, host, python), timeout_s) for host in hosts)
    )


def check_usable(
    template: str, hosts: Sequence[str], python: str, answers: Sequence[MachineFacts | str]
) -> None:
    """Raises ConfigError that names each host that cannot be used, with the command that was tried.

    answers: of ``ask_hosts``.
    """
    faults = [
        (host, _facts_command(template, host, python), answer)
        for host, answer in zip(hosts, answers, strict=True)
        if isinstance(answer, str)
    ]
    if faults:
        raise _unusable(faults, len(hosts), python)


def _facts_command(template: str, host: str, python: str) -> list[str]:
    return command_for(template, host, (python, *FACTS))


def _unusable(faults: list[tuple[str, list[str], str]], n_hosts: int, python: str) -> ConfigError:
    """Returns the error for hosts that cannot be used; of several, the first in full."""
    host, command, fault = faults[0]
    others = ", ".join(name for name, _, _ in faults[1:6])
    more = f" (and {len(faults) - 1} of {n_hosts - 1} others: {others})" if others else ""
    return ConfigError(
        f"{host} cannot be used{more}",
        where="launcher.config",
        why=fault,
        todo=f"try it by hand: {shlex.join(command)} < /dev/null",
        hosts=[name for name, _, _ in faults],
        python=python,
    )


async def _ask(command: list[str], timeout_s: float) -> MachineFacts | str:
    """Runs one command; returns what its host has, or else what is wrong with the host."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # no terminal, on which a command could ask for a password
        )
    except OSError as error:
        return f"{command[0]} cannot be started: {error.strerror}"
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    except TimeoutError:
        return f"it did not answer within {timeout_s:g} s (launcher.config.start_s)"
    finally:
        if process.returncode is None:
            await end_command(process)
    return read_facts(process.returncode or 0, out, err)
