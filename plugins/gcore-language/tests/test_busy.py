"""On an accelerator a rank's own work cannot be told from its waiting, and a trainer says so."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gcore_language.settings import TrainerSettings
from gcore_language.training import LanguageTrainer

from gcore_core.contract.context import WorkerContext


@pytest.mark.parametrize("device, told", [("cpu", None), ("cuda", 0.0)])
def test_busy_time_is_reported_only_where_the_device_measures_it(device, told):
    ranks = SimpleNamespace(count=1, sum=np.array, max=np.array, add_up=dict)
    engine = SimpleNamespace(
        device=torch.device(device), layouts=frozenset({"padded"}), ranks=ranks, hidden_size=8
    )
    context = WorkerContext(
        role="policy", parts={"objective": SimpleNamespace(requires=frozenset())}
    )
    trainer = LanguageTrainer(TrainerSettings(packing="padded"), context, engine)
    trainer.prepare([], frozenset())
    assert trainer.train(0, np.zeros(0), 1, 1).get("busy_s") == told
