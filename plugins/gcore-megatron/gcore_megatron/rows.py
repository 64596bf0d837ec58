"""A micro-batch as Megatron-Core's model takes it: widths that can be split, this rank's positions,
a boolean mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gcore_language.packing import Batch
from torch import Tensor

from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.library import parallel_state


def own_positions(width: int, rank: int, ranks: int) -> Tensor:
    """int64[width / ranks]: the positions of one context-parallel rank. Of 2 ``ranks`` pieces it
    has the one that is its number from the front and the one that is its number from the back, so
    that all have as many pairs to attend.
    """
    first, second = torch.arange(width).view(2 * ranks, -1)[[rank, 2 * ranks - 1 - rank]]
    return torch.cat([first, second])


class Rows:
    """B rows; of their positions the S that are this rank's.

    ids int64[B, S]; positions int64[B or 1, S]; mask bool, true where a position sees another, or
    None for causal.
    predict: places in hidden states [S B, D] that predict actions, those of ``own_actions`` int64,
        or of all (None).
    """

    def __init__(self, batch: Batch, config: MegatronTrainerConfig) -> None:
        self.batch = batch
        rows, before = batch.ids.shape
        ranks, device = config.context_parallel, batch.ids.device
        multiple = (config.tensor_parallel if config.sequence_parallel else 1) * (
            2 * ranks if ranks > 1 else 1
        )
        width = -(-before // multiple) * multiple
        # positions that are filled in lie on the right, where nothing looks, and see themselves
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
            self.ids, self.positions = self.ids[:, own], own[None]
            self.mask = (own[:, None] >= seen)[None, None]
            place = torch.full((width,), -1, device=device)
            place[own] = torch.arange(len(own), device=device)
            position = place[position]
            self.own_actions = (position >= 0).nonzero().flatten()
            row, position = row[self.own_actions], position[self.own_actions]
        self.predict = position * rows + row
