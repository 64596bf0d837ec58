"""Makes commands that lead to hosts, and asks all hosts for their facts at once."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections import deque
from collections.abc import Sequence

import msgspec

from gcore_core import __version__
from gcore_core.contract.errors import ConfigError
from gcore_core.kits.launching import MachineFacts
from gcore_core.kits.machines import end_command

_FACTS = ("-m", "gcore_core.runtime.process.facts")
_TAIL_LINES = 3  # of what a command wrote, shown when it fails
_FACTS_LIMIT_BYTES = 1 << 20
_NOT_FOUND = 127  # what a shell, ssh and env answer for a command that is not there


def check_template(template: str) -> None:
    """Raises ValueError unless ``template`` is a command with ``{host}`` in it."""
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise ValueError(f"command {template!r} cannot be split into words: {error}") from error
    if not any("{host}" in word for word in words):
        raise ValueError(
            f"command must say where {{host}} goes, as in 'ssh {{host}}': {template!r}"
        )
    if "{host}" in words[0]:
        raise ValueError(f"command must begin with a program, not with {{host}}: {template!r}")


def command_for(template: str, host: str, words: Sequence[str]) -> list[str]:
    """Returns the command that runs ``words`` on a host.

    The template is split into words first and the host put in then, so a host is never more than a
    part of one word.
    """
    return [word.replace("{host}", host) for word in shlex.split(template)] + list(words)


async def ask_facts(
    template: str, hosts: Sequence[str], python: str, timeout_s: float
) -> list[MachineFacts]:
    """Asks all hosts at once what they have; returns their answers, in order.

    Raises ConfigError that names each host that cannot be used, with the command that was tried.
    """
    commands = [command_for(template, host, (python, *_FACTS)) for host in hosts]
    answers = await asyncio.gather(*(_ask(command, timeout_s) for command in commands))
    faults = [
        (host, command, fault)
        for host, command, (_, fault) in zip(hosts, commands, answers, strict=True)
        if fault
    ]
    if faults:
        raise _unusable(faults, len(hosts), python)
    return [facts for facts, _ in answers if facts is not None]


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


async def _ask(command: list[str], timeout_s: float) -> tuple[MachineFacts | None, str]:
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
        return None, f"{command[0]} cannot be started: {error.strerror}"
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    except TimeoutError:
        return None, f"it did not answer within {timeout_s:g} s (launcher.config.start_s)"
    finally:
        if process.returncode is None:
            await end_command(process)
    if process.returncode:
        return None, _failure(process.returncode, _tail(err))
    return _read(out, _tail(err))


def _failure(code: int, tail: str) -> str:
    """Says how a command ended, with the last lines of what it wrote."""
    if code == _NOT_FOUND:
        tail += "\nthe interpreter is not there: set launcher.config.python"
    elif "No module named" in tail:
        tail += "\nthat interpreter has no gcore-core: install it there"
    return f"the command ended with {code}: {tail}" if tail else f"the command ended with {code}"


def _read(out: bytes, tail: str) -> tuple[MachineFacts | None, str]:
    """Reads the last line of what a host has printed; a login may print others before it."""
    lines = out[-_FACTS_LIMIT_BYTES:].splitlines()
    try:
        facts = msgspec.json.decode(lines[-1] if lines else b"", type=MachineFacts)
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = {}
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, IndexError):
            fields = msgspec.json.decode(lines[-1], type=dict)
        version = fields.get("version")
        if version is not None and version != __version__:
            return None, _other_version(version, f"{fields.get('executable')}")
        shown = _tail(out) or tail or "nothing"
        return None, f"it did not answer with its facts but with: {shown}"
    if facts.version != __version__:
        return None, _other_version(facts.version, facts.executable)
    return facts, ""


def _other_version(version: str, executable: str) -> str:
    return f"it has gcore-core {version} ({executable}), here it is {__version__}"


def _tail(output: bytes) -> str:
    lines = (line for line in output.decode("utf-8", "replace").splitlines() if line.strip())
    return "\n".join(deque(lines, maxlen=_TAIL_LINES))
