"""What ``g-core conformance environments`` runs besides the plain contracts.

The environments themselves need a class of somebody's: ``gcore_testing.EnvironmentContract``.
"""

from __future__ import annotations

import numpy as np
import pytest
from gcore_testing import ActionAdvantageContract
from gcore_testing.contracts.base import config_of

from gcore_core.contract.algorithms import ActionScalars
from gcore_core.contract.trainer import TrainRecord
from gcore_environments.advantages import TurnAdvantage


class OfOneRecord(TurnAdvantage):
    """Compares each record with an episode that earned nothing."""

    def per_action(self, record: ActionScalars) -> tuple[np.ndarray, np.ndarray]:
        count = len(record.mask)
        ends = np.flatnonzero(record.mask) + 1
        spans = [(end - 1, end, 0, 0) for end in ends]
        columns: dict[str, np.ndarray] = {
            "prompt_ids": np.array([5], np.int32),
            "action_ids": np.zeros(count, np.int32),
            "action_mask": record.mask.astype(np.uint8),
            "turn_reward": np.where(record.mask, record.columns["turn_reward"], 0.0),
            "turns": np.array(spans, np.int32).reshape(-1, 4),
            "sequences": np.array([(0, -1, 1)], np.int32),
        }
        made = TrainRecord(ordinal=0, sample=0, minibatch=0, columns=columns)
        terms = self.terms(made, record.reward)
        sums = {name: (sum(v for v, _ in own), len(own) + 1.0) for name, own in terms.items()}
        return self.compared(made, record.reward, sums)


class TestTurns(ActionAdvantageContract):
    """What is computed of a record beside another keeps the contract."""

    provider = "environments/turns"

    @pytest.fixture
    def advantage(self) -> OfOneRecord:
        return OfOneRecord(config_of(self.description(), self.config))
