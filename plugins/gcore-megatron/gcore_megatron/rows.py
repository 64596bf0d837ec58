"""Makes a micro-batch ready for Megatron-Core's model.

Its rows are padded to a width that the ranks can split, each context-parallel rank keeps its own
positions, and the mask becomes boolean.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gcore_language.packing import Batch
from torch import Tensor

from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.library import parallel_state


def own_positions(width: int, rank: int, ranks: int) -> Tensor:
    """Returns the positions of one context-parallel rank, int64[width / ranks].

    A row is cut into 2 x ``ranks`` pieces. A rank gets two of them, the one at its number from the
    front and the one at its number from the back: with 2 ranks, rank 0 gets pieces 0 and 3, rank 1
    pieces 1 and 2. So under causal attention all ranks have equally many pairs to attend.
    """
    first, second = torch.arange(width).view(2 * ranks, -1)[[rank, 2 * ranks - 1 - rank]]
    return torch.cat([first, second])


class Rows:
    """The B rows of a micro-batch, with the S positions of each that this rank holds.

    batch: the micro-batch.
    ids: int64[B, S], tokens.
    positions: int64[B or 1, S], position of each token.
    mask: bool, true where a query sees a key; None for causal attention.
    own_actions: int64, which of the batch's actions this rank predicts; None when it predicts all.
    predict: int64, the places in the hidden states, flattened to [S B, D], that predict those
        actions.
    uses: float32[S, B], how many records each position serves; None for a model without experts.
        With sequence parallelism only this rank's part of S.
    routing: int16[S, B, L, k] of the same positions, the experts that are taken; None where routers
        choose.
    """

    def __init__(
        self, batch: Batch, config: MegatronTrainerConfig, *, has_experts: bool = False
    ) -> None:
        self.batch = batch
        rows, batch_width = batch.ids.shape
        ranks = config.context_parallel
        device = batch.ids.device
        multiple = (config.tensor_parallel if config.sequence_parallel else 1) * (
            2 * ranks if ranks > 1 else 1
        )
        width = -(-batch_width // multiple) * multiple
        # Padding lies on the right, where no token looks. Each padded position sees itself alone.
        self.ids = F.pad(batch.ids, (0, width - batch_width))
        row = batch.predict // batch_width
        position = batch.predict % batch_width
        self.own_actions: Tensor | None = None
        self.mask: Tensor | None = None
        if batch.mask is not None and batch.positions is not None:
            self.positions = F.pad(batch.positions, (0, width - batch_width))
            self.mask = torch.eye(width, dtype=torch.bool, device=device).repeat(rows, 1, 1, 1)
            self.mask[:, :, :batch_width, :batch_width] = batch.mask == 0
        else:
            self.positions = torch.arange(width, device=device)[None]
        if ranks > 1:
            rank_positions = own_positions(
                width, parallel_state.get_context_parallel_rank(), ranks
            ).to(device)
            key_positions = torch.cat(
                [own_positions(width, rank, ranks) for rank in range(ranks)]
            ).to(device)
            self.ids = self.ids[:, rank_positions]
            self.positions = rank_positions[None]
            # keys are gathered rank by rank (``key_positions``), so causal attention needs an
            # explicit mask
            self.mask = (rank_positions[:, None] >= key_positions)[None, None]
            # position -> its place on this rank, -1 for positions of other ranks
            place = torch.full((width,), -1, device=device)
            place[rank_positions] = torch.arange(len(rank_positions), device=device)
            position = place[position]
            self.own_actions = (position >= 0).nonzero().flatten()
            row = row[self.own_actions]
            position = position[self.own_actions]
        self.predict = position * rows + row
        self.uses: Tensor | None = None
        self.routing: Tensor | None = None
        if has_experts:
            self._lay_experts(config, width)

    def _lay_experts(self, config: MegatronTrainerConfig, width: int) -> None:
        """Sets ``uses`` and ``routing``.

        Padding serves no record, and gets the experts 0 .. k - 1.
        """
        batch = self.batch
        rows, batch_width = batch.ids.shape
        if batch.uses is None:
            raise RuntimeError("a flat batch does not go through experts")
        start, stop = 0, width
        if config.sequence_parallel:
            part = width // config.tensor_parallel
            start = part * parallel_state.get_tensor_model_parallel_rank()
            stop = start + part
        uses = F.pad(batch.uses.view(rows, batch_width), (0, width - batch_width))
        self.uses = uses.t()[start:stop].contiguous()
        if batch.routing is None or config.router_replay == "never":
            return
        experts = batch.routing.view(rows, batch_width, *batch.routing.shape[1:])
        filled = torch.arange(experts.shape[3], device=experts.device, dtype=experts.dtype)
        whole = filled.expand(rows, width, *experts.shape[2:]).clone()
        whole[:, :batch_width] = experts
        self.routing = whole.transpose(0, 1)[start:stop].contiguous()
