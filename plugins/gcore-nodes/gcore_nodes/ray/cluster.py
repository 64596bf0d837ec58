"""Speaks with Ray for a supervisor: ``python -m gcore_nodes.ray.cluster``.

It has a process of its own. Ray ends a process that is connected to it when its node's daemon ends,
takes over its signals, and starts threads there; the supervisor has to outlive all of that, at
least to clear up. It ends when its standard input does, and Ray ends its keepers with it.

    1. joins the cluster
    2. asks for a placement group: one bundle a node, every bundle on another one
    3. puts a keeper into each bundle, and asks it what its machine has
    4. starts and ends agents through the keepers, as it is told
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, TextIO

import msgspec

from gcore_nodes.ray.bundles import (
    Bundle,
    RayNode,
    addresses_of,
    bundles,
    free_now,
    in_order,
    pinned,
    shortage,
)
from gcore_nodes.ray.keeper import Keeper
from gcore_nodes.ray.messages import (
    Close,
    Ended,
    Event,
    Failed,
    Found,
    KeptNode,
    Output,
    Request,
    Start,
    Waiting,
    Wish,
)

_FACTS = ["-m", "gcore_nodes.facts"]
_LOOK_S = 0.5  # between two looks at a placement group that is pending
_SAY_S = 30.0  # so often what is missing is said
_LOST_CODE = 255  # the exit code of an agent whose keeper is gone, as ssh answers


class Refused(Exception):
    """No machines can be had. failed: what the supervisor is told."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.what)
        self.failed = failed


class Lost(Exception):
    """A node went away while it was being asked; another try may have others."""


@dataclass
class Kept:
    """A keeper, and where it is."""

    actor: Any
    address: str
    cpus: float


# -- what Ray knows --------------------------------------------------------------------------------


def join(wish: Wish) -> None:
    """Connects this process with the cluster. Raises Refused."""
    import ray

    address = wish.cluster
    try:
        ray.init(
            address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except Exception as error:  # Ray raises many kinds, RuntimeError among them
        raise Refused(_not_joined(address, ray.__version__, error)) from error


def _not_joined(address: str, version: str, error: Exception) -> Failed:
    """Says why a cluster could not be joined, after what Ray has said."""
    text = " ".join(f"{error}".split())
    here = f"here it is Ray {version} on Python {sys.version.split()[0]}"
    where = "launcher.config.cluster"
    if "ersion mismatch" in text:
        return Failed(
            "the cluster has another version of Ray or Python",
            f"{text}; {here}",
            "have the versions of the cluster's nodes here, or those of here there",
            where,
        )
    if isinstance(error, ConnectionError) or "onnect" in text:
        return Failed(
            f"no Ray cluster answers at {address}"
            if address != "auto"
            else "this machine is a node of no Ray cluster",
            text,
            "start one: `ray start --head` here, then `ray start --address=HOST:6379` on the "
            "others; or submit the run to a cluster: `ray job submit -- g-core run ...`",
            where,
        )
    return Failed(
        f"the Ray cluster at {address} cannot be joined",
        f"{type(error).__name__}: {text}",
        "",
        where,
    )


def alive() -> list[RayNode]:
    """Returns the nodes of the cluster that Ray believes to be alive, each address once.

    Where Ray was started again on a machine, it may be there twice for a minute.
    """
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    by_address = {}
    for node in ray.nodes():
        if node["Alive"]:
            address = str(node["NodeManagerAddress"])
            by_address[address] = RayNode(
                address=address,
                total=dict(node["Resources"]),
                free=dict(free.get(node["NodeID"], {})),
            )
    return list(by_address.values())


# -- machines --------------------------------------------------------------------------------------


class Cluster:
    """Holds the placement group of a run and its keepers.

    tell: writes an event to the supervisor.
    """

    def __init__(self, wish: Wish, tell: Any) -> None:
        self._wish = wish
        self._tell = tell
        self._group: Any = None
        self._kept: dict[str, Kept] = {}
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + wish.wait_s
        self._say_s = time.monotonic() + _SAY_S
        self._working: set[asyncio.Task[None]] = set()

    async def find(self) -> list[KeptNode]:
        """Waits for the machines; returns them, lowest address first. Raises Refused."""
        while True:
            made = await self._reserve()
            try:
                return await self._ask(made)
            except Lost as error:
                await self._wait(f"{error}")
                self.release()

    async def _reserve(self) -> list[Bundle]:
        """Waits until Ray has set aside what is asked for; returns the bundles.

        After ``settle_s`` it is what can be had at once, where that is enough.
        """
        while True:
            nodes = alive()
            made, why = self._wanted(nodes)
            if made and self._settles():
                fewer = free_now(made, nodes)
                if self._wish.least <= len(fewer) < len(made):
                    made = fewer
            if not made:
                await self._wait(why)
            elif await self._set_aside(made):
                return made

    def _wanted(self, nodes: list[RayNode]) -> tuple[list[Bundle], str]:
        """Returns the bundles of all nodes that the run is to have, or why there can be none."""
        wish = self._wish
        made, why = bundles(nodes, wish.nodes, wish.resources)
        if not wish.addresses:
            return made, why
        by_address = {node.address: node for node in nodes}
        for address in wish.addresses:
            if address not in by_address:
                why = "Ray no longer has it, and the run was placed on it"
                raise Refused(Failed("the machine is lost", why, where=address, is_lost=True))
        # The run was placed on what all bundles have alike, or on whole nodes.
        are_alike = wish.nodes is not None or wish.resources
        amounts = made[0] if made and are_alike else wish.resources
        return [pinned(by_address[one], amounts) for one in wish.addresses], ""

    def _settles(self) -> bool:
        settle_s = self._wish.settle_s
        return settle_s is not None and time.monotonic() > self._began_s + settle_s

    async def _set_aside(self, made: list[Bundle]) -> bool:
        """Waits for a placement group; returns whether it is there.

        It is given up when a node is gone that a bundle was pinned to, and when less will do.
        """
        from ray.util.placement_group import placement_group

        name = f"g-core-{secrets.token_hex(4)}"  # for who looks at the cluster
        self._group = placement_group(made, strategy="STRICT_SPREAD", name=name)
        pins = set(addresses_of(made))
        settled = self._settles()
        while pins <= {node.address for node in alive()} and settled == self._settles():
            if await asyncio.to_thread(self._group.wait, _LOOK_S):
                return True
            await self._wait(shortage(made, alive()))
        self.release()
        return False

    async def _wait(self, why: str) -> None:
        """Waits a moment, and says why from time to time. Raises Refused when it took too long."""
        if time.monotonic() > self._deadline_s:
            raise Refused(
                Failed(
                    f"Ray has no such machines after {self._wish.wait_s:g} s",
                    why,
                    "free them, add nodes to the cluster, ask for less by nodes and resources of "
                    "launcher.config, or raise its wait_s",
                )
            )
        if time.monotonic() > self._say_s:
            self._say_s += _SAY_S
            self._tell(Waiting(why))
        await asyncio.sleep(_LOOK_S)

    async def _ask(self, made: list[Bundle]) -> list[KeptNode]:
        """Puts a keeper into each bundle and asks all of them at once. Raises Lost and Refused."""
        import ray
        from ray.util import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        by_id = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
        places = placement_group_table(self._group)["bundles_to_node_id"]
        addresses = [by_id.get(places[index], "") for index in range(len(made))]
        kept = []
        for index, bundle in enumerate(made):
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            actor = (
                ray.remote(Keeper)
                .options(
                    num_cpus=bundle.get("CPU", 0),
                    num_gpus=bundle.get("GPU", 0),
                    max_restarts=0,
                    max_concurrency=16,
                    scheduling_strategy=strategy,
                )
                .remote()
            )
            kept.append(Kept(actor, addresses[index], bundle.get("CPU", 0)))
        answers = await asyncio.gather(*(self._look(one) for one in kept))
        order = in_order(addresses)
        self._kept = {kept[index].address: kept[index] for index in order}
        return [answers[index] for index in order]

    async def _look(self, kept: Kept) -> KeptNode:
        """Asks a keeper what its machine has."""
        from ray.exceptions import RayError

        try:
            look = kept.actor.look.remote(self._wish.python or "", _FACTS)
            answer = await asyncio.wait_for(look, self._wish.start_s)
        except (RayError, TimeoutError) as error:
            # Ray takes about a minute to notice that a node is gone, so a run that has lost one may
            # be given it again.
            is_lost = self._wish.settle_s is not None and isinstance(error, TimeoutError)
            if is_lost or kept.address not in {node.address for node in alive()}:
                raise Lost(f"{kept.address} does not answer") from error
            raise Refused(self._no_keeper(kept.address, error)) from error
        return KeptNode(address=kept.address, cpus=kept.cpus, **answer)

    def _no_keeper(self, address: str, error: Exception) -> Failed:
        if isinstance(error, TimeoutError):
            why = f"its keeper did not answer within {self._wish.start_s:g} s"
            todo = "raise launcher.config.start_s, or see the logs of Ray on that node"
        else:
            lines = [line.strip() for line in f"{error}".splitlines() if line.strip()]
            missing = [line for line in lines if "ModuleNotFoundError" in line]
            why = (missing or lines or [type(error).__name__])[-1]
            todo = "see the logs of Ray on that node"
            if missing:
                todo = (
                    "install gcore-nodes and the plugins of the job, in the versions of here, "
                    "where Ray runs on that node"
                )
        return Failed(f"{address} cannot be used", why, todo)

    # -- agents ------------------------------------------------------------------------------------

    def handle(self, request: Request) -> None:
        """Begins what the supervisor asks for."""
        kept = self._kept.get(request.host)
        if kept is None:
            return
        if isinstance(request, Start):
            self._begin(self._run(kept, request.sealed))
        elif isinstance(request, Close):
            self._begin(self._call(kept.actor.close.remote()))
        else:
            self._begin(self._kill(kept))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _call(self, reference: Any) -> None:
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):  # ``_run`` sees the end of a keeper
            await reference

    async def _run(self, kept: Kept, sealed: bytes) -> None:
        """Starts an agent and tells what it writes, until it has ended."""
        from ray.exceptions import RayError

        try:
            await kept.actor.start.remote(sealed)
            code: int | None = None
            while code is None:
                content, code = await kept.actor.output.remote()
                if content:
                    self._tell(Output(kept.address, content))
            self._tell(Ended(kept.address, code))
        except RayError as error:
            lines = [line.strip() for line in f"{error}".splitlines() if line.strip()]
            self._tell(Ended(kept.address, _LOST_CODE, (lines or [type(error).__name__])[-1]))

    async def _kill(self, kept: Kept) -> None:
        """Ends an agent by force, and its keeper."""
        import ray

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._call(kept.actor.kill.remote()), 2.0)
        ray.kill(kept.actor)

    def release(self) -> None:
        """Gives everything back to Ray."""
        import ray
        from ray.util import remove_placement_group

        for kept in self._kept.values():
            ray.kill(kept.actor)
        self._kept = {}
        if self._group is not None:
            remove_placement_group(self._group)  # ends the keepers in it, too
            self._group = None


# -- the process -----------------------------------------------------------------------------------


async def lines_of(stream: TextIO) -> AsyncIterator[bytes]:
    """Yields the lines of a pipe."""
    reader = asyncio.StreamReader(limit=1 << 26)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stream)
    while line := await reader.readline():
        yield line


async def serve(wish: Wish, tell: Any) -> None:
    """Finds the machines, then does what is asked until the standard input ends."""
    cluster = Cluster(wish, tell)
    finding: asyncio.Task[list[KeptNode]] = asyncio.ensure_future(cluster.find())
    requests = asyncio.ensure_future(_requests(cluster))
    try:
        await asyncio.wait([finding, requests], return_when=asyncio.FIRST_COMPLETED)
        if requests.done():  # the supervisor is gone, or has changed its mind
            return
        tell(Found(finding.result()))
        await requests
    except Refused as error:
        tell(error.failed)
    finally:
        finding.cancel()
        requests.cancel()
        cluster.release()


async def _requests(cluster: Cluster) -> None:
    decoder = msgspec.json.Decoder(Request)
    async for line in lines_of(sys.stdin):
        cluster.handle(decoder.decode(line))


def main() -> None:
    # What Ray or a library prints must not get between the events.
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    encoder = msgspec.json.Encoder()

    def tell(event: Event) -> None:
        with contextlib.suppress(BrokenPipeError):  # the end of the standard input follows
            events.write(encoder.encode(event) + b"\n")

    first = bytearray()
    while not first.endswith(b"\n"):  # byte by byte: what follows is for ``lines_of``
        byte = os.read(0, 1)
        if not byte:
            return
        first += byte
    wish = msgspec.json.decode(first, type=Wish)
    try:
        join(wish)
    except Refused as error:
        tell(error.failed)
        return
    try:
        asyncio.run(serve(wish, tell))
    finally:
        import ray

        ray.shutdown()


if __name__ == "__main__":
    main()
