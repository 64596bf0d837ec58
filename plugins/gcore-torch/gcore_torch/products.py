"""The form of a product with a weight matrix, by device, type and number of rows.

A decoder multiplies few rows, one for each running sample. Torch hands such products to a library
that is made for many rows. On a CPU oneDNN computes 4 to 32 rows up to twice as fast, once it has
copied the weights into an order of its own: they are *packed*.

One or two rows gain nothing, since they wait for the weights to come from memory. More than some
100 rows gain nothing either, since then every form keeps the processor busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Numbers of rows for which packed weights are used.
_ROWS = range(3, 129)
#: The number of rows for which oneDNN chooses its order. The same order serves the others.
_USUAL_ROWS = 32
#: Numbers of the smallest matrix that is packed. A call of oneDNN takes some 10 microseconds more,
#: which a small matrix does not win back.
LEAST_NUMBERS = 2**18


class Products:
    """Computes x W^T + b for the decoders of one model.

    A matrix is packed when it is first multiplied with a fitting number of rows. The copy takes as
    much memory as the matrix, and is used until ``forget``.

    may_pack: whether anything is packed at all. A deterministic run keeps torch's own form.
    nbytes: what the packed copies take.
    """

    def __init__(self, *, may_pack: bool) -> None:
        self.nbytes = 0
        # These two are what torch.compile calls for frozen weights; torch has no public name for
        # them. A build without oneDNN does not have them.
        has_form = hasattr(torch.ops.mkldnn, "_linear_pointwise")
        self._may_pack = may_pack and has_form and torch.backends.mkldnn.is_available()
        # (address, shape) -> the weight, and packed. A matrix that joins others begins where the
        # first of them does.
        self._packed: dict[tuple[int, torch.Size], tuple[Tensor, Tensor]] = {}
        self._decodes = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the product [..., outputs] of rows [..., inputs].

        weight: [outputs, inputs]. bias: [outputs].
        """
        if not self._fits(x, weight):
            return F.linear(x, weight, bias)
        packed = self._of(weight)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return product

    def _fits(self, x: Tensor, weight: Tensor) -> bool:
        return (
            self._may_pack
            and x.numel() // x.shape[-1] in _ROWS
            and weight.numel() >= LEAST_NUMBERS
            and weight.dtype == torch.float32
            and weight.device.type == "cpu"
        )

    def _of(self, weight: Tensor) -> Tensor:
        key = weight.data_ptr(), weight.shape
        if key not in self._packed:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _USUAL_ROWS)
            self._packed[key] = weight, packed
            self.nbytes += weight.nbytes
        return self._packed[key][1]

    def forget(self) -> None:
        """Drops the packed copies; called whenever weights change, move or are dropped."""
        self._packed = {}
        self.nbytes = 0

    def differing(self) -> list[str]:
        """Returns the packed copies that are not what the weights are now, bit for bit."""
        return [
            f"a packed matrix {list(weight.shape)}"
            for weight, packed in self._packed.values()
            if not torch.equal(packed.to_dense(), weight)
        ]

    def install(self, model: nn.Module) -> None:
        """Has the linear layers of a model compute by this form within ``decoding``."""
        if self._may_pack:
            for module in model.modules():
                if type(module) is nn.Linear:
                    module.forward = partial(self._linear, module)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Is around a decoder's forward passes. Others, which score, keep torch's form."""
        self._decodes = True
        try:
            yield
        finally:
            self._decodes = False

    def _linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        if self._decodes:
            return self(x, module.weight, module.bias)
        return F.linear(x, module.weight, module.bias)
