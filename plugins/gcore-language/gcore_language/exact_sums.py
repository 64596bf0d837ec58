"""Sums that have the same bits in any order.

A sum of floating-point numbers depends on its order, because every addition rounds. It does not
where every addition is exact. So each addend is first rounded to a grid, coarse enough for the sum
to fit into the 53 bits of a float64; that rounding looks at the addend alone. What it cuts off goes
to a second sum on a finer grid. The method is that of Demmel and Nguyen, "Fast Reproducible
Floating-Point Summation" (ARITH 2013), with two grids.

    addend   1.0000003   =   1.0          (a multiple of the coarse grid)
                         +   0.0000003    (a multiple of the fine grid; the rest is below it)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

#: Steps of the two grids of ``ExactSum``, as exponents of two.
_COARSE = -20
_FINE = -62
#: A float64 holds whole multiples of a grid's step up to this power of two times the step.
_DIGITS = 53
#: Additions are exact while the magnitudes of all addends add up to less.
LARGEST_SUM = 2.0 ** (_COARSE + _DIGITS - 1)
#: Numbers that are added at once, so that what lies between stays in a processor's cache.
_CHUNK = 2**16
_CHUNK_ON_DEVICE = 2**24


class Collectives(Protocol):
    """Sums and maxima over ranks, element by element; see ``Ranks``."""

    def sum(self, values: list[float]) -> list[float]: ...
    def max(self, values: list[float]) -> list[float]: ...


class ExactSum:
    """Adds float32 vectors so that the result has the same bits in any order.

    An addend loses what is below 2^-63, about 1e-19. The largest magnitudes of all vectors must
    add up to less than ``LARGEST_SUM``, about 4e9.

    size: numbers in a vector.
    device: where the sums are kept, in 16 bytes a number.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._sums = torch.zeros(2, size, dtype=torch.float64, device=device)
        self._bound = 0.0  # no element of a sum has a larger magnitude, at any time
        self._chunk = _CHUNK if device.type == "cpu" else _CHUNK_ON_DEVICE

    def add(self, vector: Tensor) -> None:
        """Adds a vector, float32[size]."""
        coarse_sum, fine_sum = self._sums
        if len(vector):
            least, most = torch.aminmax(vector)  # a tenth of the time of a maximum norm; nan is nan
            self._bound += max(-float(least), float(most))
        for start in range(0, len(vector), self._chunk):
            span = slice(start, start + self._chunk)
            rest = vector[span].double()
            coarse = _round_to(rest, _COARSE)
            coarse_sum[span] += coarse
            fine_sum[span] += _round_to(rest.sub_(coarse), _FINE)

    def take(self) -> Tensor:
        """Returns the sum, float32[size], and begins a new one.

        All of it is nan where vectors were too large for an exact sum, or not finite.
        """
        total = (self._sums[0] + self._sums[1]).float()
        if not self._bound < LARGEST_SUM:
            total.fill_(math.nan)
        self.clear()
        return total

    def clear(self) -> None:
        """Begins a new sum."""
        self._sums.zero_()
        self._bound = 0.0


def _round_to(values: Tensor, exponent: int) -> Tensor:
    """Returns float64 values rounded to multiples of 2^exponent, half to even.

    It adds a number so large that the float64s around it are one step apart, and takes it away
    again. Values of 2^(exponent + 51) and more come back as they are or off the grid.
    """
    anchor = 1.5 * 2.0 ** (exponent + _DIGITS - 1)
    return (values + anchor).sub_(anchor)


def exact_norm(parts: Sequence[Tensor], ranks: Collectives) -> float:
    """Returns the Euclidean norm of float32 tensors that ranks hold parts of.

    It has the same bits however the numbers are dealt to tensors and ranks. Squares of float32s are
    exact in float64; they are rounded to grids that follow from the largest of them and from how
    many there are. It is nan where a number is inf or nan.

    parts: this rank's; together they hold every number once.
    ranks: sums and maxima over all ranks; all of them must call this function.
    """
    largest = max((float(part.abs().max()) for part in parts if part.numel()), default=0.0)
    finite = math.isfinite(largest)
    (most, broken) = ranks.max([largest if finite else 0.0, 0.0 if finite else 1.0])
    (count,) = ranks.sum([float(sum(part.numel() for part in parts))])
    if broken:
        return math.nan
    if most == 0.0:
        return 0.0
    # every square is below 2^top, and the sum of all of them below 2^(top + room)
    top = 2 * math.frexp(most)[1]
    room = max(2, math.ceil(math.log2(count)) + 1)
    coarse_step = top + room - _DIGITS
    fine_step = coarse_step - 1 + room - _DIGITS
    coarse_sum = fine_sum = 0.0
    for part in parts:
        for chunk in part.flatten().split(_CHUNK_ON_DEVICE):
            rest = chunk.double().square_()
            coarse = _round_to(rest, coarse_step)
            coarse_sum += float(coarse.sum())
            fine_sum += float(_round_to(rest.sub_(coarse), fine_step).sum())
    coarse_sum, fine_sum = ranks.sum([coarse_sum, fine_sum])
    return math.sqrt(coarse_sum + fine_sum)


def sum_of(values: Iterable[float]) -> float:
    """Returns the sum of floats, rounded once, so that it does not depend on their order.

    Where it is not finite it is inf or nan, as it is by plain addition.
    """
    numbers = list(values)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # a partial sum overflows; or inf and -inf meet
        return sum(numbers)
