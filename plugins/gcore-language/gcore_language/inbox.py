"""Keeps the books of a weight push at its receiver: which tensors are awaited and what is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.records import TensorSpec, WeightPlan


class WeightInbox:
    """Keeps the books of the pushes to one generator.

    Every refusal is a WeightMismatch that names the tensor.

    shapes: Hugging Face name -> shape, of every tensor of a push.
    version: version of the weights that the generator holds.
    """

    def __init__(self, role: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.version = 0
        self._role = role
        self._shapes = dict(shapes)
        self._awaited: set[str] | None = None  # tensors yet to come, while a push is open
        self._is_complete = False  # all of them came; only a commit or another plan may follow

    def begin(
        self, plan: WeightPlan, expected: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Compares the plan with the model, then awaits all tensors anew.

        expected: name -> shape of the tensors that must come, where it is not the whole model.

        Raises WeightMismatch for an older version, and when names or shapes differ from the
        model's.
        """
        if plan.version < self.version:
            raise self.mismatch(
                f"weights version {plan.version} is older than {self.version}, which is loaded.",
                todo="Push a newer one.",
                tensor=plan.tensors[0].name if plan.tensors else "",
            )
        offered = {spec.name: tuple(spec.shape) for spec in plan.tensors}
        shapes = self._shapes if expected is None else expected
        for name in sorted(offered.keys() - shapes.keys()):
            raise self.mismatch(
                f"the plan has tensor {name}, which the model does not have.", tensor=name
            )
        for name, shape in shapes.items():
            if name not in offered:
                raise self.mismatch(f"the plan lacks tensor {name}.", tensor=name)
            if offered[name] != shape:
                raise self.mismatch(
                    f"tensor {name} has shape {offered[name]} in the plan and {shape} here.",
                    tensor=name,
                )
        self._awaited = set(shapes)
        self._is_complete = False

    def take(
        self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]
    ) -> Sequence[tuple[TensorSpec, np.ndarray]]:
        """Checks tensors off and returns them in a list; each may come once in a push.

        Raises WeightMismatch for a tensor that comes before its plan or is not as planned.
        """
        if self._awaited is None or self._is_complete:
            raise self.mismatch("tensors came before their plan.")
        received = list(tensors)
        for spec, array in received:
            if spec.name not in self._awaited or array.nbytes != spec.nbytes:
                raise self.mismatch(f"tensor {spec.name} is not as planned.", tensor=spec.name)
            self._awaited.discard(spec.name)
        return received

    def complete(self) -> None:
        """Checks that all tensors have come.

        The push stays open until ``commit``. If loading fails before that, all tensors come again.
        Raises WeightMismatch when one is missing.
        """
        if self._awaited is None or self._awaited:
            lacking = sorted(self._awaited or self._shapes)
            raise self.mismatch(
                f"tensor {lacking[0]} has not come.",
                why=f"{len(lacking)} are missing.",
                tensor=lacking[0],
            )
        self._is_complete = True

    def commit(self, version: int) -> None:
        """Ends the push; call it when the tensors are loaded and nothing is left that depended on
        the old ones.
        """
        self._awaited = None
        self.version = version

    def check_idle(self) -> None:
        """Raises WeightMismatch while a push has begun and is not committed."""
        if self._awaited is not None:
            raise self.mismatch(
                "a weight push has begun and was not committed.", todo="Push all tensors again."
            )

    def mismatch(
        self,
        what: str,
        *,
        why: str = "",
        todo: str = "Make both roles from one model directory.",
        tensor: str = "",
    ) -> WeightMismatch:
        """Makes the error of a refusal; its ``where`` is the role."""
        return WeightMismatch(what, where=f"roles.{self._role}", why=why, todo=todo, tensor=tensor)
