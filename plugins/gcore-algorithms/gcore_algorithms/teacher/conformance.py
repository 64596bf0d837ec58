"""Contracts that need more than a provider's name; ``g-core conformance teacher`` adds the plain
ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from gcore_testing import AnnotatorContract, ObjectiveContract
from gcore_testing.contracts.objective import make_batch

from gcore_algorithms.teacher.config import TOP_IDS, TOP_LOGP
from gcore_core.contract.columns import ColumnSpec

if TYPE_CHECKING:
    from torch import Tensor

K = 4


def distilled_batch(k: int = K) -> dict[str, Any]:
    """Returns the kit's random batch, float64, with a teacher's columns of k tokens."""
    torch = pytest.importorskip("torch")
    batch = make_batch()
    draw = torch.Generator().manual_seed(1)
    actions = len(batch["record"])

    def top(scale: float) -> Tensor:
        """Log-probs of k tokens out of 3 k."""
        logits = scale * torch.randn(actions, 3 * k, generator=draw, dtype=torch.float64)
        return logits.log_softmax(-1)[:, :k]

    return {
        **batch,
        "teacher_logp": batch["logp"] + torch.randn(actions, generator=draw, dtype=torch.float64),
        TOP_IDS: torch.arange(k).repeat(actions, 1),
        TOP_LOGP: top(2.0),
        f"logp@{TOP_IDS}": top(1.5),
    }


class OnLlama(AnnotatorContract):
    """Has a tiny random model of the Llama family, which is the policy's too."""

    provider = "teacher"

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        from gcore_language.tiny import save_model

        directory = tmp_path_factory.mktemp("llama")
        save_model(Path(directory), "llama")
        return {"path": str(directory)}


class TestReference(OnLlama):
    columns = ("ref_logp",)


class TestTeacher(OnLlama):
    config: ClassVar[dict[str, Any]] = {"top_k": K}
    columns = (
        "teacher_logp",
        ColumnSpec(name=TOP_IDS, dtype="int32", wide=True, k=K),
        ColumnSpec(name=TOP_LOGP, wide=True, k=K),
    )


class OnTeacher(ObjectiveContract):
    @pytest.fixture
    def batch(self) -> Mapping[str, Tensor]:
        return distilled_batch()


class TestReverseKl(OnTeacher):
    provider = "teacher/reverse-kl"


class TestReverseKlWithReward(OnTeacher):
    provider = "teacher/reverse-kl"
    config: ClassVar[dict[str, Any]] = {
        "reward_weight": 0.5,
        "old_logprobs": "recompute",
        "normalise": "sequence",
    }


class TestJensenShannon(OnTeacher):
    provider = "teacher/jsd"


class TestJensenShannonWithReward(OnTeacher):
    provider = "teacher/jsd"
    config: ClassVar[dict[str, Any]] = {
        "reward_weight": 0.5,
        "old_logprobs": "recompute",
        "beta": 1.0,
        "normalise": "sequence",
    }
