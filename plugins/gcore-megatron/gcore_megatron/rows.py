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
    """

    def __init__(self, batch: Batch, config: MegatronTrainerConfig) -> None:
        self.batch = batch
        rows, before = batch.ids.shape
        ranks = config.context_parallel
        device = batch.ids.device
        multiple = (config.tensor_parallel if config.sequence_parallel else 1) * (
            2 * ranks if ranks > 1 else 1
        )
        width = -(-before // multiple) * multiple
        # Padding lies on the right, where no token looks. Each padded position sees itself alone.
        self.ids = F.pad(batch.ids, (0, width - before))
        row, position = batch.predict // before, batch.predict % before
        self.own_actions: Tensor | None = None
        self.mask: Tensor | None = None
        if batch.mask is not None and batch.positions is not None:
            self.positions = F.pad(batch.positions, (0, width - before))
            self.mask = torch.eye(width, dtype=torch.bool, device=device).repeat(rows, 1, 1, 1)
            self.mask[:, :, :before, :before] = batch.mask == 0
        else:
            self.positions = torch.arange(width, device=device)[None]
        if ranks > 1:
            own = own_positions(width, parallel_state.get_context_parallel_rank(), ranks).to(device)
            seen = torch.cat([own_positions(width, rank, ranks) for rank in range(ranks)]).to(
                device
            )
            self.ids = self.ids[:, own]
            self.positions = own[None]
            # keys are gathered rank by rank (``seen``), so causal attention needs an explicit mask
            self.mask = (own[:, None] >= seen)[None, None]
            # position -> its place on this rank, -1 for positions of other ranks
            place = torch.full((width,), -1, device=device)
            place[own] = torch.arange(len(own), device=device)
            position = place[position]
            self.own_actions = (position >= 0).nonzero().flatten()
            row, position = row[self.own_actions], position[self.own_actions]
        self.predict = position * rows + row
