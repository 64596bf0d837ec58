"""The flat layout of a micro-batch: A actions of R records, one after the other or mixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from torch import Tensor


def keep_trained(
    mask: Tensor, columns: Mapping[str, Tensor], names: Iterable[str]
) -> dict[str, Tensor]:
    """Returns the named columns without the actions whose ``mask`` is False.

    Leaving them out, rather than multiplying them by zero, keeps even their NaNs out of values and
    gradients.
    """
    if bool(mask.all()):
        return {name: columns[name] for name in names}
    index = mask.nonzero().squeeze(1)
    return {name: columns[name].index_select(0, index) for name in names}


class Records:
    """Sums over each record's trained actions; nothing is computed before it is asked for.

    index: int64[A], the record of each action, counted from 0.
    like: a tensor that gives dtype and device.
    """

    def __init__(self, index: Tensor, like: Tensor) -> None:
        self.index = index
        self._like = like

    @cached_property
    def _zeros(self) -> Tensor:
        return self._like.new_zeros(int(self.index.max()) + 1 if self.index.numel() else 0)

    @property
    def actions(self) -> Tensor:
        """How many trained actions all records have, 0-d."""
        return self._like.new_full((), self.index.numel())

    @cached_property
    def lengths(self) -> Tensor:
        """How many trained actions each record has, float[R]."""
        return self.sums(self._like.new_ones(self.index.numel()))

    def sums(self, values: Tensor) -> Tensor:
        """Returns float[R], each record's sum of ``values`` float[A]."""
        return self._zeros.index_add(0, self.index, values)

    def spread(self, values: Tensor) -> Tensor:
        """Returns float[A]: each action gets its record's of ``values`` float[R]."""
        return values.index_select(0, self.index)
