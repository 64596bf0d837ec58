"""Defines the settings of ``nodes/command`` and of ``nodes/join``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from gcore_nodes.hosts import listed
from gcore_nodes.machines_config import MachinesConfig
from gcore_nodes.token import TOKEN_VARIABLE


@dataclass(frozen=True, kw_only=True)
class CommandConfig(MachinesConfig):
    """Holds the settings of ``nodes/command``.

    hosts: names or addresses of the machines, in order; or ``slurm``: those of the slurm job that
        this is run in; or the path of a file with one host a line.
    command: what leads to a host. ``{host}`` stands for it. No shell reads it.
    python: the interpreter on the hosts. Default: the path of this one.
    min_hosts: with how few of them a run may begin, and go on when it has lost others; those that
        come later are taken in at a checkpoint (``cluster.grow``). Default: a run begins with all,
        and goes on with what is left.
    The others are those of every launcher for several machines.
    """

    hosts: str | list[str]
    command: str = "ssh -o BatchMode=yes {host}"
    python: str | None = None
    min_hosts: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.command)
        if isinstance(self.hosts, list):
            listed(self.hosts)
        if self.python is not None and shlex.quote(self.python) != self.python:
            raise ValueError(f"python must be a path without blanks or quotes, not {self.python!r}")
        if self.min_hosts is not None and self.min_hosts < 1:
            raise ValueError(f"min_hosts must be at least 1, not {self.min_hosts}")
        if isinstance(self.hosts, list) and (self.min_hosts or 1) > len(self.hosts):
            raise ValueError(f"min_hosts is {self.min_hosts}, and hosts is {self.hosts}")


@dataclass(frozen=True, kw_only=True)
class JoinConfig(MachinesConfig):
    """Holds the settings of ``nodes/join``.

    hosts: how many nodes join; or their names; or ``slurm``: those of the slurm job that this is
        run in; or the path of a file with one name a line. With names it is said who is missing.
    token_file: holds the token that all nodes know. Default: an environment variable does.
    token_variable: name of that variable.
    home: name or address of this machine, at which nodes join. Default: its address in the network
        ``address``, the one that its name stands for, or its only one.
    join_port: at which nodes join.
    wait_s: for how long nodes are waited for.
    min_hosts: with how few of them a run may begin, and go on when it has lost others; those that
        join later are taken in at a checkpoint (``cluster.grow``), up to ``hosts``. Default: all
        must have joined.
    The others are those of every launcher for several machines.
    """

    hosts: int | str | list[str]
    token_file: str | None = None
    token_variable: str = TOKEN_VARIABLE
    home: str | None = None
    join_port: int = 29399
    wait_s: float = 600.0
    min_hosts: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.hosts, int) and self.hosts < 1:
            raise ValueError(f"hosts must be at least 1, not {self.hosts}")
        if isinstance(self.hosts, list):
            listed(self.hosts)
        if not 1024 <= self.join_port < 1 << 16:
            raise ValueError(f"join_port must be from 1024 to 65535, not {self.join_port}")
        if not self.wait_s > 0:
            raise ValueError(f"wait_s must be positive, not {self.wait_s}")
        if self.min_hosts is not None and self.min_hosts < 1:
            raise ValueError(f"min_hosts must be at least 1, not {self.min_hosts}")
        named = len(self.hosts) if isinstance(self.hosts, list) else self.hosts
        if isinstance(named, int) and (self.min_hosts or 1) > named:
            raise ValueError(f"min_hosts is {self.min_hosts}, and hosts is {self.hosts}")


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
