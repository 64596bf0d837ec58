"""Reads lists of hosts: from the job, from a file, or from slurm."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gcore_core.contract.errors import ConfigError

_WHERE = "launcher.config.hosts"
#: Host names, IPv4 addresses, user@host, and pods: nothing that an option or a shell could be.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")
_SLURM_VARIABLES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_MOST_HOSTS = 65536


@dataclass(frozen=True)
class Host:
    """A host of a run.

    name: as a person wrote it.
    slots: how many devices its line gives it; None: it does not say.
    """

    name: str
    slots: int | None = None


def find_hosts(
    hosts: str | Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[Host]:
    """Returns the hosts of a run, in order.

    hosts: see ``CommandConfig``.
    Raises ConfigError.
    """
    if not isinstance(hosts, str):
        return listed(hosts)
    if hosts == "slurm":
        return of_slurm(environment)
    return of_file(Path(hosts).expanduser())


def listed(names: Sequence[str]) -> list[Host]:
    """Returns the hosts of a list of names. Raises ConfigError."""
    return _checked((Host(name) for name in names), _WHERE)


# -- files -----------------------------------------------------------------------------------------


def of_file(path: Path) -> list[Host]:
    """Reads a file with one host a line.

    ``#`` begins a comment. Behind the name ``slots=N`` may stand, as in files for mpirun and
    DeepSpeed, or ``:N``, as in files for MPICH; either says how many devices of the host are used.
    Raises ConfigError naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"the file of hosts cannot be read: {reason}",
            where=f"{_WHERE}: {path}",
            todo="name a file with one host a line, a list of hosts, or slurm",
        ) from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_of_line(words, f"{path}:{number}"))
    return _checked(hosts, str(path))


def _of_line(words: list[str], where: str) -> Host:
    name, *settings = words
    slots = None
    name_part, colon, number = name.partition(":")
    if colon and number.isdecimal():
        name, slots = name_part, int(number)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key in ("max_slots", "max-slots"):
            continue  # a bound for mpirun, which starts no more than slots here
        if key != "slots" or not value.isdecimal():
            raise ConfigError(
                f"{setting!r} is not understood behind a host",
                where=where,
                todo="write a host's name and, if you like, slots=N behind it",
            )
        slots = int(value)
    if slots == 0:
        raise ConfigError(
            f"{name} has no slots", where=where, todo="leave the line out, or give it some"
        )
    return Host(name, slots)


# -- slurm -----------------------------------------------------------------------------------------


def of_slurm(environment: Mapping[str, str]) -> list[Host]:
    """Returns the hosts of the slurm job that this process is part of. Raises ConfigError."""
    for variable in _SLURM_VARIABLES:
        if environment.get(variable):
            names = expand(environment[variable], where=variable)
            return _checked((Host(name) for name in names), variable)
    raise ConfigError(
        "this is no slurm job: SLURM_JOB_NODELIST is not set",
        where=f"{_WHERE}: slurm",
        todo="start it by sbatch or inside salloc, or list the hosts",
    )


def expand(text: str, where: str = "SLURM_JOB_NODELIST") -> list[str]:
    """Returns the hosts of a host list as slurm writes them.

        n[01-03,07],x5      n01 n02 n03 n07 x5
        r[1-2]n[0-1]        r1n0 r1n1 r2n0 r2n1

    Numbers keep their leading zeros. Raises ConfigError naming the place in ``text``.
    """
    names: list[str] = []
    for start, group in _split(text, where):
        made = [""]
        position = 0
        for match in re.finditer(r"\[([^\[\]]*)\]", group):
            fixed = group[position : match.start()]
            at = start + match.start(1)
            numbers = _numbers(match.group(1), text, at, where)
            made = [f"{begin}{fixed}{number}" for begin in made for number in numbers]
            if len(names) + len(made) > _MOST_HOSTS:
                raise _malformed(f"more than {_MOST_HOSTS} hosts", text, at, where)
            position = match.end()
        rest = group[position:]
        if not group or set(rest) & set("[]"):
            raise _malformed("a host is missing" if not group else "a bracket", text, start, where)
        names += [f"{begin}{rest}" for begin in made]
    return names


def _split(text: str, where: str) -> list[tuple[int, str]]:
    """Divides a list at the commas outside of brackets, into (position, group)."""
    groups = []
    start = 0
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _malformed("a bracket", text, position, where)
        if letter == "," and not depth:
            groups.append((start, text[start:position]))
            start = position + 1
    if depth:
        raise _malformed("a bracket that is not closed", text, text.rindex("["), where)
    return [*groups, (start, text[start:])]


def _numbers(ranges: str, text: str, start: int, where: str) -> list[str]:
    """Returns the numbers of what stands in brackets, such as ``01-03,07``."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise _malformed(f"{part!r} is no range of numbers", text, start, where)
        if dash and int(last) < int(first):
            raise _malformed(f"{part!r} runs backwards", text, start, where)
        if int(last or first) - int(first) >= _MOST_HOSTS:
            raise _malformed(f"more than {_MOST_HOSTS} hosts", text, start, where)
        width = len(first)
        numbers += [f"{number:0{width}d}" for number in range(int(first), int(last or first) + 1)]
        start += len(part) + 1
    return numbers


def _malformed(what: str, text: str, position: int, where: str) -> ConfigError:
    return ConfigError(
        "the list of hosts is malformed",
        where=where,
        why=f"{what}, at character {position + 1} of {text!r}",
        todo="write it as slurm does, such as n[01-03,07],x5; `scontrol show hostnames` reads it",
    )


def natural_order(names: Sequence[str]) -> list[str]:
    """Returns names in the order in which a person counts them: n2 before n10."""

    def parts(name: str) -> list[tuple[int, str]]:
        split = re.split(r"(\d+)", name)
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in split]

    return sorted(names, key=lambda name: (parts(name), name))


# -- all of them -----------------------------------------------------------------------------------


def _checked(hosts: Iterable[Host], where: str) -> list[Host]:
    """Returns the hosts. Raises ConfigError for none, for one twice, and for what is no name."""
    hosts = list(hosts)
    if not hosts:
        raise ConfigError("no host is named", where=where, todo="name at least one")
    for host in hosts:
        if not isinstance(host.name, str) or not _NAME.fullmatch(host.name):
            raise ConfigError(
                f"{host.name!r} is no host's name",
                where=where,
                todo="a name has letters, digits and . _ - : @, and begins with a letter or digit",
            )
    name, count = Counter(host.name for host in hosts).most_common(1)[0]
    if count > 1:
        raise ConfigError(
            f"{name} is named {count} times",
            where=where,
            todo="name each host once; an agent uses all devices of its host",
        )
    return hosts
