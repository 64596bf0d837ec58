"""What a worker is told arrives as what it was made: the class decides the kind of worker."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.job_settings import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    RewardSettings,
    RunSettings,
)
from gcore_core.contract.placement import Device, Need
from gcore_core.node.worker import own_dtype
from gcore_core.runtime.messages import StorePlace, Versions, WorkerSpec
from gcore_core.runtime.worker_settings import (
    AnySettings,
    GeneratorSettings,
    JobFacts,
    PlacementFacts,
    PlainContext,
    ScorerSettings,
    TrainedFacts,
    TrainerSettings,
)
from gcore_core.wire.service import encode

DECODER = msgspec.msgpack.Decoder(WorkerSpec)
RUN = RunSettings(name="arithmetic", steps=3, seed=7, patience_s=1.5)
CONTEXT = PlainContext(devices=(0, 1), model={"path": "/model"}, directory="/run")
FACTS = JobFacts(
    run=RUN,
    shard=1,
    shards=2,
    rows={"train": 16},
    replicas=["rollout.0"],
    trained={"policy": TrainedFacts(ranks=[["policy.0"]])},
    scorers={"scorer.0": ["exact"]},
    rewards={
        "exact": RewardSettings(use="core/function", normalise="group", when={"kind": ["sum"]})
    },
    of_groups=["exact"],
    evaluation=EvaluationSettings(every=2, data=DataSettings(config={"path": "rows.jsonl"})),
    checkpoint=CheckpointSettings(every=5),
    placement=PlacementFacts(
        devices=[Device(index=0, kind="cpu")],
        slots={"rollout": 1},
        needs={"rollout": Need(kind="generator", follows="policy")},
        engines={"rollout": [[0]]},
        sleeps=["rollout"],
    ),
)
TOLD: dict[str, AnySettings] = {
    "trainer": TrainerSettings(run=RUN, shards=2, context=CONTEXT, resume="/saved"),
    "generator": GeneratorSettings(run=RUN, context=CONTEXT, follows=True),
    "scorer": ScorerSettings(run=RUN, rewards={"exact": RewardSettings(timeout_s=2.0)}),
    "controller": FACTS,
}


def spec(settings: AnySettings) -> WorkerSpec:
    return WorkerSpec(
        role="policy",
        rank=0,
        ranks=1,
        peers={},
        factories={},
        secret=b"",
        settings=settings,
        store=StorePlace("/store", "node0", "agent.0"),
        versions=Versions("3.11", "0.3.0", {}),
    )


@dataclass(frozen=True)
class Halved:
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Numbered:
    dtype: int = 16


@pytest.mark.parametrize(("config", "dtype"), [(Halved, "bfloat16"), (Numbered, ""), (None, "")])
def test_the_dtype_of_a_backend_is_read_where_its_config_names_one(
    config: type | None, dtype: str
) -> None:
    """Its default too, which nobody wrote."""
    config_class = "" if config is None else f"{__name__}:{config.__name__}"
    factories = {"backend": FactorySpec("anything:Backend", config_class)}
    assert own_dtype(msgspec.structs.replace(spec(FACTS), factories=factories)) == dtype


@pytest.mark.parametrize("kind", TOLD)
def test_settings_of_a_worker_survive_the_wire(kind: str) -> None:
    told = spec(TOLD[kind])
    heard = DECODER.decode(encode(told))
    assert heard == told
    assert heard.kind == kind


@pytest.mark.parametrize(
    "change",
    [{"kind": "cook"}, {"run": {"steps": "three"}}, {"context": {"devices": "all"}}],
    ids=["no such kind", "no number of steps", "no list of devices"],
)
def test_malformed_settings_of_a_worker_are_refused(change: dict[str, object]) -> None:
    plain = msgspec.to_builtins(spec(TOLD["trainer"]), builtin_types=(bytes,))
    plain["settings"] |= change
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(encode(plain))
