"""Reads the token that all nodes of a run know."""

from __future__ import annotations

import os
from pathlib import Path

from gcore_core.contract.errors import ConfigError

#: Environment variable that holds the token where no file is named.
TOKEN_VARIABLE = "G_CORE_JOIN_TOKEN"
_LEAST_BYTES = 16
_MAKE = "python3 -c 'import secrets; print(secrets.token_hex())'"


def read_token(file: str | None, variable: str, where: str) -> bytes:
    """Returns the token that all nodes of a run know.

    file: holds it; None: the environment variable does.
    where: the setting that says so, for errors.
    Raises ConfigError when there is none, or one that could be guessed.
    """
    if file is None:
        token = os.environ.get(variable, "").strip().encode()
        source = f"the environment variable {variable}"
        if not token:
            raise ConfigError(
                f"no token is given, and {source} is not set",
                where=where,
                why="nodes that join a run prove by a token that they may",
                todo=f"write one to a file that you alone may read, and name it: {_MAKE}",
            )
    else:
        source = f"the file {file}"
        try:
            token = Path(file).expanduser().read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                f"the token cannot be read: {error.strerror}",
                where=where,
                why=source,
                todo=f"write one there: {_MAKE}",
            ) from error
    if len(token) < _LEAST_BYTES:
        raise ConfigError(
            f"the token is too short: {len(token)} bytes of at least {_LEAST_BYTES}",
            where=where,
            why=f"{source} holds it; who listens could try all short ones",
            todo=f"make one: {_MAKE}",
        )
    return token
