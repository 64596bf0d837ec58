"""Checks a push of an adapter alone against the model that a generator has. Light: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.records import AdapterFacts
from gcore_language.model_files import weights_sha256

#: peft's beginning of every tensor's name in an adapter's file.
PREFIX = "base_model.model."


def tensor_names(target: str) -> tuple[str, str]:
    """Returns the names that A and B of a target have in peft's files."""
    return f"{PREFIX}{target}.lora_A.weight", f"{PREFIX}{target}.lora_B.weight"


def weight_name(name: str) -> str:
    """Returns the name of the weight that a tensor of an adapter changes."""
    return name.removeprefix(PREFIX).rpartition(".lora_")[0] + ".weight"


class AdapterBooks:
    """Says which tensors a push of an adapter must bring.

    Every refusal is a WeightMismatch.

    role: the generator's, for errors.
    directory: the model's. Its files are hashed at the first push.
    shapes: Hugging Face name -> shape of the model's tensors.
    """

    def __init__(self, role: str, directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._role = role
        self._directory = directory
        self._shapes = shapes
        self._base_sha256 = ""

    def expected(self, facts: AdapterFacts) -> dict[str, tuple[int, ...]]:
        """Returns name -> shape of the adapter's tensors.

        Raises WeightMismatch for an adapter of another base, or of modules that the model does not
        have.
        """
        self._check_base(facts)
        expected: dict[str, tuple[int, ...]] = {}
        for target in facts.targets:
            shape = self._shapes.get(f"{target}.weight", ())
            if len(shape) != 2:
                raise self.mismatch(
                    f"the adapter is for {target}, which this model does not have as a matrix.",
                    tensor=f"{target}.weight",
                )
            first, second = tensor_names(target)
            expected[first] = (facts.rank, shape[1])
            expected[second] = (shape[0], facts.rank)
        return expected

    def _check_base(self, facts: AdapterFacts) -> None:
        if not self._base_sha256:
            self._base_sha256 = weights_sha256(self._directory)
        if facts.base != self._base_sha256:
            raise self.mismatch(
                "the adapter is for another base than this generator has.",
                why=f"It is for weights_sha256 {facts.base[:12]}, the files of this role's model "
                f"have {self._base_sha256[:12]}.",
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
