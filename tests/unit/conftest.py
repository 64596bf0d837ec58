from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins

FAKE = """
from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_fake_config import AdvantageConfig, EngineConfig, ObjectiveConfig

@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(summary="trains", factory="gcore_fake_engine:make", config=EngineConfig)

@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(summary="samples", factory="gcore_fake_engine:make", config=EngineConfig)
    yield p.GeneratorProvider(name="async", summary="samples", factory="gcore_fake_engine:make")

@hookimpl
def gcore_advantages():
    yield p.AdvantageProvider(name="mean", summary="r - mean", factory="gcore_fake_engine:make", config=AdvantageConfig)

@hookimpl
def gcore_objectives():
    yield p.ObjectiveProvider(name="pg", summary="loss", factory="gcore_fake_engine:make", config=ObjectiveConfig)

@hookimpl
def gcore_rewards():
    yield p.RewardProvider(name="length", summary="length", factory="gcore_fake_engine:make")

@hookimpl
def gcore_datasets():
    yield p.DatasetProvider(name="rows", summary="rows", factory="gcore_fake_engine:make", config=RowsConfig)

from gcore_fake_config import RowsConfig
"""  # noqa: E501

FAKE_CONFIG = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Any, Literal

from gcore_core.contract.traits import Traits

@dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 1e-3

@dataclass(frozen=True)
class EngineConfig:
    tensor_parallel: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer: Optimizer = field(default_factory=Optimizer)
    limit: float | None = None

    def __post_init__(self):
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel must be at least 1, not {self.tensor_parallel}")

@dataclass(frozen=True)
class AdvantageConfig:
    group_size: int = 4
    scalars: list[str] = field(default_factory=list)

    def traits(self):
        return Traits(requires=frozenset(self.scalars))

@dataclass(frozen=True)
class ObjectiveConfig:
    clip: float = 0.2
    values: bool = False

    def traits(self):
        return Traits(requires={"old_logp", "values"} if self.values else {"old_logp"})

@dataclass(frozen=True)
class RowsConfig:
    path: str
    limit: int = 0
"""

FAKE_ENGINE = """
def make(config, *args):
    return config, args
"""

JOB = """\
data: {use: fake/rows, config: {path: rows.jsonl}}
advantage: {use: fake/mean}
objective: {use: fake/pg}
roles:
  policy: {use: fake, slots: 2, model: {path: org/name}}
  rollout:
    use: fake
    config:
      tensor_parallel: 2
rewards:
  length: {use: fake/length}
"""


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[InstalledPlugins]:
    """Fabricated distributions on ``sys.path``; the plugin ``fake`` offers one provider of most
    kinds.
    """
    with InstalledPlugins(tmp_path / "site") as plugins:
        plugins.add(
            "fake",
            FAKE,
            files={"gcore_fake_config.py": FAKE_CONFIG, "gcore_fake_engine.py": FAKE_ENGINE},
        )
        yield plugins


@pytest.fixture
def job(tmp_path: Path, installed: InstalledPlugins) -> Callable[[str], Path]:
    """Writes a job file: the given text after a complete one, in which later top-level keys win
    over earlier ones.
    """

    def write(extra: str = "", base: str = JOB) -> Path:
        heads = {
            line.partition(":")[0] for line in extra.splitlines() if line and not line[0].isspace()
        }
        kept, keep = [], True
        for line in base.splitlines():
            if not line[0].isspace():
                keep = line.partition(":")[0] not in heads
            if keep:
                kept.append(line)
        file = tmp_path / "job.yaml"
        file.write_text("\n".join([*kept, extra]) + "\n", encoding="utf-8")
        return file

    return write
