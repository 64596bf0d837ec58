"""Replays a function on a GPU by a CUDA graph, so that its kernels are launched by one call.

A pass over one token launches hundreds of kernels of a few microseconds each. Launched one by one,
they wait for the processor; a graph holds all of them. On a CPU the function is called each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

#: How many rows a graph is made for, up to 32; beyond that every multiple of 32.
_FEW_ROWS = (1, 2, 4, 8, 16, 24, 32)


def rows_of_graph(rows: int, capacity: int) -> int:
    """Returns the rows of the graph that serves so many; at most ``capacity``."""
    fitting = next((few for few in _FEW_ROWS if few >= rows), -(-rows // 32) * 32)
    return min(fitting, capacity)


class Pool:
    """Memory that graphs share. What a graph leaves there is lost when another one is replayed.

    device: where the graphs run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle() if device.type == "cuda" else None


class Replay(Generic[Result]):
    """A function with fixed tensors as inputs and outputs.

    inputs: name -> tensor, which the caller fills before each ``run``.

    function: what is replayed; it takes ``inputs`` and has no other inputs that change place.
    pool: of the graph.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        function: Callable[[Mapping[str, Tensor]], Result],
        pool: Pool,
    ) -> None:
        self.inputs = inputs
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None
        if pool.device.type == "cuda":
            self._capture(pool)

    def _capture(self, pool: Pool) -> None:
        # a library makes its handles and workspaces in the first call, which must not be captured
        aside = torch.cuda.Stream(pool.device)
        aside.wait_stream(torch.cuda.current_stream(pool.device))
        with torch.cuda.stream(aside):
            self._function(self.inputs)
        torch.cuda.current_stream(pool.device).wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool.handle):
            self._result = self._function(self.inputs)

    def run(self) -> Result:
        """Returns what the function returns for the inputs as they are now.

        Its tensors are the same ones each time: they change with the next ``run`` of any function
        of the same pool.
        """
        if self._graph is None or self._result is None:
            return self._function(self.inputs)
        self._graph.replay()
        return self._result
