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
    rows: int64[A], the column ``rows``: how many rows each action's record was cut into. Each row
        has a number of its own in ``index``. None: no record was cut.
    """

    def __init__(self, index: Tensor, like: Tensor, rows: Tensor | None = None) -> None:
        self.index = index
        self._like = like
        self._rows = rows

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

    @property
    def count(self) -> Tensor:
        """How many records have trained actions, 0-d; each of a record's n rows counts 1 / n.

        Where rows are counted it is float64: a third three times is 1.
        """
        if self._rows is None:
            return self.lengths.count_nonzero().to(self.lengths.dtype)
        shares = self._rows.double().reciprocal()
        return self._zeros.double().index_copy(0, self.index, shares).sum()

    def means(self, values: Tensor) -> Tensor:
        """Returns float[A], ``values`` float[A] over the number of their record's actions.

        Of a record that was cut into n rows each row gets a mean of its own, and 1 / n of it.
        """
        means = values / self.spread(self.lengths)
        return means if self._rows is None else means / self._rows

    def sums(self, values: Tensor) -> Tensor:
        """Returns float[R], each record's sum of ``values`` float[A]."""
        return self._zeros.index_add(0, self.index, values)

    def spread(self, values: Tensor) -> Tensor:
        """Returns float[A]: each action gets its record's of ``values`` float[R]."""
        return values.index_select(0, self.index)
