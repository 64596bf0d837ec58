"""Episodes in processes keep the contract of environments, around an engine that is scripted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from gcore_environments.scripted import ScriptedEngine
from gcore_testing import EnvironmentContract, PluginContract

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.factories import import_file
from gcore_core.contract.records import Prompt

HERE = Path(__file__).parent

ADDER = """
from gcore_environments import Observation


class Adder:
    '''Says the sum so far, three times.'''

    async def reset(self, row, seed):
        self.left, self.sum = 3, seed % 7
        return Observation(messages=[{"role": "user", "content": row["prompt"]}])

    async def step(self, reply):
        self.left -= 1
        self.sum += len(reply.text)
        if not self.left:
            return Observation(rewards={"sum": float(self.sum)}, done=True)
        return Observation(messages=[{"role": "user", "content": f"{self.sum}+1="}])

    async def close(self):
        pass
"""


class TestPlugin(PluginContract):
    provider = "environments"


class TestEpisodes(EnvironmentContract):
    provider = "environments"
    samples = 2
    config: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def generator(self) -> ScriptedEngine:
        transformers = pytest.importorskip("transformers")
        task = import_file(HERE.parents[2] / "recipes" / "quickstart" / "arithmetic.py")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=task._tokenizer(),
            pad_token="<pad>",
            bos_token="<bos>",
            eos_token="<eos>",
            unk_token="<unk>",
        )
        return ScriptedEngine(tokenizer, lambda text: str(len(text) % 10))

    @pytest.fixture
    def prompts(self) -> list[Prompt]:
        return [Prompt(row=row, text=f"{row}+2=") for row in range(3)]

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "adder.py").write_text(ADDER)
        settings = {"environment": f"{tmp_path / 'adder.py'}:Adder", "hosts": 2}
        monkeypatch.setattr(type(self), "config", settings)

    @pytest.fixture
    def context(self, tmp_path: Path) -> WorkerContext:
        return WorkerContext(role="rollout", deterministic=True, directory=str(tmp_path))


class TestGamesOfTwo(TestEpisodes):
    player = "2"

    @pytest.fixture(autouse=True)
    def _file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(self), "config", {"environment": f"{HERE / 'seats.py'}:Seats"})
