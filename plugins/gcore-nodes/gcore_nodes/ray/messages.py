"""Defines what the supervisor and the process that speaks with Ray tell each other.

Each message is a line of JSON: requests on the standard input of that process, events on its
standard output. Bytes are base64 there.
"""

from __future__ import annotations

import msgspec


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Says which machines are wanted; the first line of the standard input.

    cluster, nodes, resources, wait_s, python, start_s: see ``RayConfig``.
    least: when so many nodes can be had and no more, these will do, after ``settle_s``.
    settle_s: None: nothing less than all will do.
    addresses: just these nodes, where a run is placed already.
    """

    cluster: str
    nodes: int | None
    resources: dict[str, float]
    wait_s: float
    python: str | None
    start_s: float
    least: int = 1
    settle_s: float | None = None
    addresses: list[str] = []


# -- requests --------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag=True):
    """Starts the agent of a host. sealed: what its keeper opens (``keeper.Order``)."""

    host: str
    sealed: bytes


class Close(msgspec.Struct, frozen=True, tag=True):
    """Ends the standard input of a host's agent."""

    host: str


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Ends the keeper of a host by force, and the agent's standard input with it."""

    host: str


Request = Start | Close | Kill


# -- events ----------------------------------------------------------------------------------------


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """The run waits for Ray. why: what is missing."""

    why: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """No machines can be had.

    where: a key of the configuration, or a machine that is lost.
    is_lost: a machine that the run was placed on is gone; another attempt may have others.
    """

    what: str
    why: str = ""
    todo: str = ""
    where: str = "launcher.config"
    is_lost: bool = False


class KeptNode(msgspec.Struct, frozen=True, kw_only=True):
    """A Ray node with a keeper.

    address: by which Ray knows the node.
    cpus: of its bundle.
    code, out, err: how the command for the node's facts ended, and what it wrote.
    public: the keeper's key, for ``seal``.
    visible: CUDA_VISIBLE_DEVICES as Ray has set it; None: it has not.
    """

    address: str
    cpus: float
    code: int
    out: bytes
    err: bytes
    public: bytes
    visible: str | None


class Found(msgspec.Struct, frozen=True, tag=True):
    """All machines are there."""

    nodes: list[KeptNode]


class Output(msgspec.Struct, frozen=True, tag=True):
    """The agent of a host has written something."""

    host: str
    content: bytes


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The agent of a host has ended. why: what became of the keeper; "": the agent ended first."""

    host: str
    code: int
    why: str = ""


Event = Waiting | Failed | Found | Output | Ended
