"""Whole runs on the virtual clock: the real supervisor, controllers, shells and store; seconds are
the model's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from gcore_placement.sim.command import run
from gcore_placement.sim.config import GeneratorConfig, JudgeConfig, Payload, TrainerConfig
from gcore_placement.sim.generator import SimGenerator
from gcore_placement.sim.judge import SimJudge

from gcore_core.config.plan import load_plan
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt, Ref
from gcore_core.contract.scorer import ScoredRecord
from gcore_core.controllers.generation.scoring import WAIT_S

pytestmark = pytest.mark.rest

PROMPT, ANSWER, GROUPS, SAMPLES = 500, 2000, 4, 2
GIVEN = {"data": {"config": {"prompt_tokens": [PROMPT], "answer_tokens": [ANSWER]}}}


@pytest.fixture
def measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_job: Callable[..., Path]
) -> Callable[..., dict[str, float]]:
    """Runs the job on virtual time and gives the metrics of its last step; its directory is
    ``run``, or as told.
    """
    monkeypatch.chdir(tmp_path)

    def go(*words: str, directory: str = "run", **sections: Any) -> dict[str, float]:
        assert run([str(write_job(**sections)), f"run.dir={directory}", *words]) == 0
        last = json.loads(Path(directory, "metrics.jsonl").read_text().splitlines()[-1])
        return dict(last["metrics"])

    return go


def records(directory: str = "run") -> list[dict[str, Any]]:
    """What the controllers wrote down of each record."""
    lines = [
        json.loads(line) for file in Path(directory, "trace").iterdir() for line in file.open()
    ]
    return [line for line in lines if line["what"] == "record"]


def rollout_s() -> float:
    """Of one replica: every group's prompt once, then all answers together, which end with the same
    token.
    """
    profile, running = GeneratorConfig().profile, GROUPS * SAMPLES
    cached = [running * (PROMPT + n) for n in range(ANSWER)]
    return GROUPS * PROMPT * profile.prefill_s + sum(
        profile.step_s(running, tokens) for tokens in cached
    )


def judge_s() -> float:
    judge = SimJudge(JudgeConfig(), WorkerContext(role="scorer"))
    columns = {"prompt_ids": memoryview(bytes(PROMPT)), "action_ids": memoryview(bytes(ANSWER))}
    sized = {name: type("Sized", (), {"size": len(column)}) for name, column in columns.items()}
    return sum(
        judge.seconds(
            ScoredRecord(
                ordinal=o,
                sample=s,
                prompt=Prompt(row=0, text=""),
                text="",
                status="",
                columns=sized,
            )
        )
        for o in range(GROUPS)
        for s in range(SAMPLES)
    )


def test_each_stage_takes_exactly_the_time_of_its_cost_model(
    measured: Callable[..., dict[str, float]],
) -> None:
    began_s = time.monotonic()
    metrics = measured(**GIVEN)
    trainer, generator = TrainerConfig(), GeneratorConfig()
    epoch_s = GROUPS * SAMPLES * trainer.record_seconds(PROMPT + ANSWER)
    expected = {
        "rollout": rollout_s() + WAIT_S + judge_s(),
        "prepare": trainer.prepare_share * epoch_s,
        "train": epoch_s + 2 * trainer.update_s,
        "push": generator.weights_gb * generator.push_s_per_gb,
    }
    assert {name: metrics[f"seconds/{name}"] for name in expected} == pytest.approx(
        expected, abs=1e-6
    )
    assert metrics["length"] == ANSWER and metrics["logprob_gap_max"] == 0
    assert time.monotonic() - began_s < sum(expected.values()), (
        "a virtual second should not take one"
    )


def test_times_are_scaled_only_by_an_explicit_override(
    measured: Callable[..., dict[str, float]],
) -> None:
    """A job's own scale is for real time; an override is for both."""
    scaled = {"policy": {"config": {"time_scale": 0.5}}}
    metrics = measured("roles.rollout.config.time_scale=0", roles=scaled, **GIVEN)
    assert metrics["seconds/rollout"] == pytest.approx(WAIT_S + judge_s(), abs=1e-6)
    assert metrics["seconds/push"] == pytest.approx(0, abs=1e-6)
    epoch_s = GROUPS * SAMPLES * TrainerConfig().record_seconds(PROMPT + ANSWER)
    assert metrics["seconds/train"] == pytest.approx(epoch_s + 1.0, abs=1e-6)


def test_many_ranks_replicas_and_shards_repeat_to_the_last_bit(
    measured: Callable[..., dict[str, float]],
) -> None:
    sections: dict[str, Any] = {
        "run": {"steps": 2},
        "controller": {"shards": 4, "config": {"prompts": 32}},
        "roles": {"policy": {"slots": 8}, "rollout": {"slots": 16}},
    }
    found = []
    for name in ("one", "other"):
        metrics = measured(directory=name, **sections)
        told = {
            key: value
            for key, value in metrics.items()
            if not key.startswith(("cpu_seconds", "memory_mib"))
        }
        found.append(
            (told, sorted((r["ordinal"], r["sample"], r["n_actions"]) for r in records(name)))
        )
    assert found[0] == found[1]
    assert len(found[0][1]) == 2 * 32 * SAMPLES


@pytest.mark.parametrize("reads", [False, True])
def test_payload_goes_through_the_store(
    reads: bool, measured: Callable[..., dict[str, float]]
) -> None:
    roles = {
        "rollout": {"config": {"payload": {"nbytes": 50_000}}},
        "policy": {"config": {"reads": reads}},
    }
    measured(roles=roles, **GIVEN)

    assert [record["media_bytes"] for record in records()] == [50_000] * GROUPS * SAMPLES


def test_a_judge_that_reads_payload_detects_what_was_not_stored() -> None:
    shown = np.arange(4, dtype=np.uint8)
    record = ScoredRecord(
        ordinal=7,
        sample=0,
        prompt=Prompt(row=0, text="x"),
        text="",
        status="finished",
        columns={"prompt_ids": shown, "action_ids": shown},
        media={"payload": shown},
        refs={"payload": Ref("", "", 0, 4, xxhash.xxh3_64_intdigest(shown.data), b"")},
    )
    judge = SimJudge(JudgeConfig(time_scale=0, reads=True), WorkerContext(role="scorer"))
    assert len(judge.score([record])) == 1
    with pytest.raises(DataError, match="ordinal 7: 'payload' is not what was stored"):
        judge.score([replace(record, media={"payload": shown[::-1].copy()})])


@pytest.mark.parametrize("shared", [True, False])
def test_records_carry_the_same_payload_only_when_it_is_shared(shared: bool) -> None:
    settings = GeneratorConfig(payload=Payload(nbytes=3000, shared=shared), time_scale=0)
    generator = SimGenerator(settings, WorkerContext(role="rollout"))
    keys = [(0, 0), (0, 1), (1, 0)]
    generator.submit(
        [
            SampleRequest(ordinal=o, sample=s, seed=o + s, prompt=Prompt(row=o, text=""))
            for o, s in keys
        ]
    )
    media = {}
    while len(media) < len(keys):
        for record in generator.step():
            media[record.request.ordinal, record.request.sample] = record.media["payload"].tobytes()
    assert (media[0, 0] == media[0, 1]) is shared
    assert media[0, 0] != media[1, 0]


def test_groups_with_equal_rewards_are_filtered_out(
    measured: Callable[..., dict[str, float]],
) -> None:
    rewards = {"judged": {"config": {"decided": 0.5}}}
    metrics = measured(
        filter={"use": "core/varied"},
        rewards=rewards,
        advantage={"config": {"group_size": 8}},
        controller={"config": {"prompts": 32}},
        **GIVEN,
    )
    share = metrics["groups/kept"] / metrics["groups/issued"]
    assert metrics["groups/kept"] == 32
    assert 0.25 < share < 0.75  # 1 of 128 groups of eight is alike by chance


def test_a_trainer_whose_ranks_communicate_is_refused(write_job: Callable[..., Path]) -> None:
    roles = {"policy": {"slots": 2, "config": {"learning_rate": 0.1}}}
    with pytest.raises(
        ConfigError, match=r"roles.policy.config.learning_rate: ranks .* do not meet"
    ):
        run([str(write_job(roles=roles))])


def test_a_judge_that_takes_too_long_is_restarted(
    measured: Callable[..., dict[str, float]],
) -> None:
    """All records end together, so they are one call, which takes twice as long as it may."""
    sections = {
        "rewards": {"judged": {"timeout_s": judge_s() / 2}},
        "controller": {"config": {"failure_limit": 1.0, "max_rounds": 2, "max_skipped_steps": 1}},
    }
    assert measured(**GIVEN, **sections)["skipped"] == 1
    log = Path("run", "logs", "supervisor.log").read_text()
    assert log.count("the scorer is started again") == 2
    assert log.count("scorer.0 is up") == 3  # and twice again; the step ends without a group


def test_the_recipe_has_256_devices() -> None:
    plan = load_plan(Path(__file__).parents[2] / "recipes" / "256.yaml")
    assert (
        sum(role["slots"] for role in plan.config["roles"].values())
        == plan.config["cluster"]["devices"]
        == 256
    )
    assert plan.provided["launcher"].reference == "sim/crowd"
