"""Contracts that need more than a provider's name; ``g-core conformance offline`` adds the plain
ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gcore_testing import (
    ControllerContract,
    DatasetContract,
    GeneratorContract,
    ObjectiveContract,
)
from gcore_testing.contracts.objective import LENGTHS, make_batch

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt

# -- step programs ---------------------------------------------------------------------------------


class OfflineContract(ControllerContract):
    config: ClassVar[dict[str, Any]] = {"prompts": 4, "minibatches": 2}


class TestSft(OfflineContract):
    provider = "offline/sft"
    job = replace(ControllerContract.job, samples=1)


class TestPairs(OfflineContract):
    provider = "offline/pairs"
    job = replace(ControllerContract.job, samples=2)


class TestScores(OfflineContract):
    provider = "offline/scores"
    job = replace(ControllerContract.job, samples=1)


# -- datasets --------------------------------------------------------------------------------------


class RowsContract(DatasetContract):
    rows: ClassVar[list[dict[str, Any]]]

    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Iterator[Any]:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        dataset = self.build(path=str(file))
        yield dataset
        dataset.close()


class TestChatRows(RowsContract):
    provider = "offline/chat"
    rows: ClassVar[list[dict[str, Any]]] = [
        {"prompt": "1+2=", "completion": "3"},
        {
            "messages": [
                {"role": "user", "content": "2+2="},
                {"role": "assistant", "content": "4"},
            ]
        },
        {"text": "3+3=6"},
    ]


class TestPairRows(RowsContract):
    provider = "offline/pairs"
    rows: ClassVar[list[dict[str, Any]]] = [
        {"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(5)
    ]


class TestScoredRows(RowsContract):
    provider = "offline/scores"
    rows: ClassVar[list[dict[str, Any]]] = [
        {"prompt": "1+2=", "completion": str(i), "score": -i} for i in range(5)
    ]


# -- objectives ------------------------------------------------------------------------------------


class TestBradleyTerry(ObjectiveContract):
    """Trained terms are the states after the last actions: what else there is has no influence."""

    provider = "offline/bradley-terry"
    config: ClassVar[dict[str, Any]] = {"margin": 0.5, "centring": 0.1}

    @pytest.fixture
    def batch(self, objective: Any) -> Any:
        batch = make_batch((*LENGTHS, 2) if "group" in objective.requires else LENGTHS)
        return {**batch, "mask": batch["end"].clone()}


class TestScalar(TestBradleyTerry):
    provider = "offline/scalar"
    config: ClassVar[dict[str, Any]] = {"centring": 0.1}


# -- readers ---------------------------------------------------------------------------------------


class TestAnswers(GeneratorContract):
    """A reader's seeds mean nothing."""

    provider = "offline"
    reads = True

    @pytest.fixture
    def context(self, tmp_path: Path) -> WorkerContext:
        from gcore_language.tiny import save_model

        save_model(tmp_path, "llama")
        return WorkerContext(role="rollout", model={"path": str(tmp_path)})

    @pytest.fixture
    def prompts(self) -> list[Prompt]:
        pairs = [("1+2=", "3", "4"), ("7", "7", "8"), ("12+34=", "46", "4"), ("5+6+7=", "18", "1")]
        return [
            Prompt(row=row, text=text, fields={"chosen": chosen, "rejected": rejected})
            for row, (text, chosen, rejected) in enumerate(pairs)
        ]

    @pytest.fixture
    def requests(self, prompts: list[Prompt]) -> list[SampleRequest]:
        return [
            SampleRequest(ordinal=prompt.row, sample=sample, seed=0, prompt=prompt)
            for prompt in prompts
            for sample in range(2)
        ]


class TestTexts(TestAnswers):
    provider = "offline/texts"
