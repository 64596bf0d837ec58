"""Lets the ranks of one trainer meet and sum numbers."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_language.exact_sums import sum_of

Sums = dict[str, tuple[float, float]]  # name -> (sum of values, sum of weights)
Terms = dict[str, list[tuple[float, float]]]  # name -> (value, weight) of each micro-batch


class Ranks:
    """The workers of one trainer, of which this process is one.

    With a single worker all sums and maxima return their argument.

    rank: number of this worker.
    count: how many workers there are.
    device: where collectives run.
    speaks: whether this worker's numbers count in sums. It is False on workers whose numbers only
        repeat another's, such as all but the first tensor-parallel rank of a replica, or all but
        the first of the ranks that share each record's tokens.
    """

    def __init__(
        self,
        context: WorkerContext,
        device: torch.device,
        *,
        always_meet: bool = False,
        host_too: bool = False,
    ) -> None:
        """Makes the process group when there are several ranks.

        host_too: whether tensors in host memory are sent as well as those of an accelerator.
        always_meet: make one for a single rank too, for libraries that require one, unless the
            process has one already.
        """
        self.rank = context.rank
        self.count = context.ranks
        self.device = device
        self.speaks = True
        self._met = self.count > 1 or (always_meet and not dist.is_initialized())
        if not self._met:
            return
        store = self._store(context)
        on_device = "nccl" if device.type == "cuda" else "gloo"
        backend = "cpu:gloo,cuda:nccl" if host_too and device.type == "cuda" else on_device
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.count)

    def _store(self, context: WorkerContext) -> dist.Store:
        """Makes what the ranks meet in, and has gloo use the interface that they share."""
        if context.meeting_address:
            host, _, port = context.meeting_address.rpartition(":")
            # NCCL looks for interfaces by itself; it takes this word too where it is set.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(host))
            return dist.TCPStore(
                host, int(port), self.count, is_master=self.rank == 0, wait_for_workers=False
            )
        # ranks that share a directory are on one machine: gloo may keep to the loopback interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self.count == 1:
            return dist.HashStore()
        path = Path(context.rendezvous) / f"{context.role}.store"
        return dist.FileStore(str(path), self.count)

    def sum(self, values: list[float]) -> list[float]:
        """Sums element by element over the ranks that speak."""
        if self.count == 1:
            return values
        return self.sum_parts(values if self.speaks else [0.0] * len(values))

    def sum_parts(self, values: list[float]) -> list[float]:
        """Sums element by element over all ranks: of what each holds a part, such as weights."""
        if self.count == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        sums: list[float] = total.tolist()
        return sums

    def max(self, values: list[float]) -> list[float]:
        """Takes the maximum, element by element, over all ranks."""
        if self.count == 1:
            return values
        most = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        maxima: list[float] = most.tolist()
        return maxima

    def sum_terms(self, terms: list[float]) -> float:
        """Sums the terms of all ranks that speak; each may have another number of them.

        The sum is rounded once: it has the same bits however terms are dealt to ranks.
        """
        return self.add_up({"": [(term, 0.0) for term in terms]}).get("", (0.0, 0.0))[0]

    def add_up(self, terms: Terms) -> Sums:
        """Sums (value, weight) pairs by name over the ranks that speak.

        Each sum is rounded once: it has the same bits however pairs are dealt to ranks. Ranks may
        have different names, so each sends its pairs as JSON, padded to the longest.
        """
        everyone = [terms] if self.count == 1 else self.gather(terms if self.speaks else {})
        names = dict.fromkeys(name for part in everyone for name in part)
        pairs = {name: [pair for part in everyone for pair in part.get(name, [])] for name in names}
        return {
            name: (sum_of(value for value, _ in rows), sum_of(weight for _, weight in rows))
            for name, rows in pairs.items()
        }

    def gather(self, value: Any) -> list[Any]:
        """Returns what each rank gave, in the order of ranks: plain values, as JSON has them."""
        if self.count == 1:
            return [value]
        encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
        longest = int(self.max([len(encoded)])[0])
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8, device=self.device)
        padded[: len(encoded)] = torch.from_numpy(encoded.copy()).to(self.device)
        everyone = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(everyone, padded)
        return [json.loads(part.cpu().numpy().tobytes()) for part in everyone]

    def wait(self) -> None:
        """Waits until all ranks have called it."""
        self.sum([0.0])

    def close(self) -> None:
        if self._met:
            dist.destroy_process_group()
            self._met = False


def interface_towards(host: str) -> str:
    """Returns the name of the network interface over which this machine reaches a host.

    Raises ConfigError when there is no way to the host.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: it sends nothing
            own = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"the ranks cannot meet at {host}: {error.strerror}",
            where="launcher",
            todo="check that this node reaches it: ip route get <address>",
        ) from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            return str(name)
    raise ConfigError(f"no interface has the address {own}", where="launcher")
