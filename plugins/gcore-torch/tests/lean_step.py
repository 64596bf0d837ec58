"""Samples, trains and pushes once in this process, and prints which of some modules it has.

python lean_step.py MODEL MODULE ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.trainer import TorchTrainer

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt
from gcore_core.contract.trainer import TrainRecord


class Reinforce:
    """-advantage * logp, summed over actions."""

    requires = frozenset[str]()

    def loss(self, columns: Any, current: Any) -> Any:
        loss = -(columns["advantage"] * current["logp"]).sum()
        return loss, columns["mask"].float().sum(), {}

    def weight(self, columns: Any) -> Any:
        return columns["mask"].float().sum()


def main() -> None:
    model, modules = Path(sys.argv[1]), sys.argv[2:]

    def context(role: str, **parts: Any) -> WorkerContext:
        directory = str(model / "run")
        return WorkerContext(
            role=role, steps=2, model={"path": str(model)}, directory=directory, parts=parts
        )

    generator = TorchGenerator(TorchGeneratorConfig(max_new_tokens=4), context("rollout"))
    trainer = TorchTrainer(
        TorchTrainerConfig(learning_rate=1e-3), context("policy", objective=Reinforce())
    )
    prompt = Prompt(row=0, text="12+3=")
    generator.submit([SampleRequest(ordinal=0, sample=i, seed=i, prompt=prompt) for i in range(2)])
    finished = []
    while len(finished) < 2:
        finished += generator.step()
    records = [
        TrainRecord(ordinal=0, sample=i, minibatch=0, columns=one.columns)
        for i, one in enumerate(finished)
    ]
    trainer.prepare(records, frozenset())
    trained = trainer.train(0, np.array([1.0, -1.0]), 1, 1)
    assert trained["grad_norm"] > 0
    print(*sorted(module for module in modules if module in sys.modules))


if __name__ == "__main__":
    main()
