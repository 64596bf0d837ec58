"""Has the contracts that ``g-core conformance core`` runs on some built-in providers.

These are the providers that need settings or have a known gap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gcore_core.contract.scorer import ScoredRecord
from gcore_testing.contracts.balancer import BalancerContract
from gcore_testing.contracts.controller import ControllerContract
from gcore_testing.contracts.dataset import DatasetContract
from gcore_testing.contracts.scorer import ScorerContract, scored_record

_REWARD = """\
def share_of_a(record):
    return record.text.count("a") / len(record.text)
"""


class TestJsonLines(DatasetContract):
    provider = "core/jsonl"

    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Any:
        file = tmp_path / "rows.jsonl"
        rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return self.build(path=str(file))


class TestFunction(ScorerContract):
    provider = "core/function"

    @pytest.fixture
    def scorer(self, context: Any, tmp_path: Path) -> Any:
        file = tmp_path / "rewards.py"
        file.write_text(_REWARD, encoding="utf-8")
        return self.build(context, path=str(file), name="share_of_a")

    @pytest.fixture
    def unscorable(self) -> ScoredRecord:
        """Gives a record without letters: the function divides by their number."""
        return scored_record(99, "", {})


class TestInOrder(BalancerContract):
    provider = "core/in-order"
    known_gaps = {
        "test_it_is_never_worse_than_dealing_in_turn[sorted]": (
            "it keeps the order and does not look at costs"
        ),
    }


class TestSync(ControllerContract):
    provider = "core/sync"
    config: ClassVar[Mapping[str, Any]] = {"prompts": 8, "minibatches": 2, "push_bucket_bytes": 1}
