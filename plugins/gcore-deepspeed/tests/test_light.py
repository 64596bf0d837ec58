"""What needs no engine: settings, and names of DeepSpeed's configuration."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from gcore_deepspeed.arguments import check_engine, deepspeed_config, problems
from gcore_deepspeed.config import DeepSpeedTrainerConfig
from gcore_language.context.settings import ContextSettings
from gcore_language.lora_settings import LoraSettings

from gcore_core.contract.errors import CheckpointError, ConfigError

#: Four slots share each micro-batch.
SHARED: dict[str, Any] = {"context": ContextSettings(ring=2, ulysses=2)}
ZERO = [
    "stage",
    "overlap_comm",
    "reduce_bucket_size",
    "stage3_max_live_parameters",
    "zero_quantized_weights",
]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"stage": 4}, "stage: must be 1, 2 or 3, is 4"),
        (
            {"stage": 2, "offload_params": True},
            "offload_params: only stage 3 shares the weights out, and stage is 2",
        ),
        ({"bucket_elements": 0}, "bucket_elements: must be positive, is 0"),
        (
            {"attn_implementation": "flash_attention_2"},
            "attn_implementation: flash_attention_2 takes no mask",
        ),
        ({"budget_tokens": 0}, "budget_tokens: must be positive"),
        ({**SHARED, "packing": "padded"}, "packing: must be auto with context"),
        ({**SHARED, "attn_implementation": "eager"}, "attn_implementation: must be auto with"),
        ({**SHARED, "lora": LoraSettings(rank=2)}, "lora: does not go with context"),
    ],
)
def test_a_setting_out_of_range_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeepSpeedTrainerConfig(**setting)


def test_slots_that_share_a_micro_batch_are_one_replica() -> None:
    assert DeepSpeedTrainerConfig(**SHARED).traits().replica_slots == 4


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"gradient_predivide": 2},
            r"engine\.gradient_predivide: DeepSpeed takes no setting .*predivide_factor",
        ),
        (
            {"gradient_clipping": 1.0},
            r"(?s)engine\.gradient_clipping: this argument is set by another key"
            r".*config\.clip_grad_norm",
        ),
        (
            {"bf16": {"enabled": True}},
            r"(?s)this argument is set by another key.*Set roles\.policy\.config\.dtype",
        ),
        (
            {"optimizer": {"type": "AdamW"}},
            r"(?s)this argument is set by another key.*config\.learning_rate",
        ),
        ({"fp16": {"enabled": True}}, r"(?s)this argument is fixed.*loss scale"),
        ({"train_batch_size": 8}, r"(?s)this argument is fixed.*budget_tokens"),
        ({"tensor_parallel": {}}, r"(?s)this argument is fixed.*share data alone"),
        ({"zero_optimization": 3}, r"engine\.zero_optimization: must be a mapping"),
        (
            {"zero_optimization": {"overlap_com": True}},
            r"\.overlap_com: .*did you mean 'overlap_comm'",
        ),
        (
            {"zero_optimization": {"stage": 3}},
            r"(?s)this argument is set by another key.*Set roles\.policy\.config\.stage",
        ),
        (
            {"tensorboard": {"enable": True}},
            r"\.tensorboard\.enable: .*did you mean 'enabled'",
        ),
        ({"flops_profiler": {"steps": 3}}, r"\.flops_profiler\.steps: DeepSpeed takes no setting"),
        ({"timers": 3}, r"engine\.timers: must be a mapping"),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            r"(?s)this argument is fixed.*compiles",
        ),
    ],
)
def test_a_setting_of_deepspeed_that_cannot_be_passed_is_refused(
    engine: dict[str, Any], message: str
) -> None:
    good = {"wall_clock_breakdown": True, "zero_optimization": {"stage3_max_live_parameters": 10}}
    check_engine(good, ZERO, "policy")
    with pytest.raises(ConfigError, match=message):
        check_engine({**good, **engine}, ZERO, "policy")
    assert list(problems(good, "policy")) == []
    (problem,) = problems({**good, **engine}, "policy")
    assert problem.startswith("roles.policy.engine.")


def test_the_check_tells_of_every_name_that_cannot_be_passed() -> None:
    engine = {"bf16": {}, "steps_per_prin": 1, "zero_optimization": {"stage": 3, "stag": 3}}
    places = [problem.partition(":")[0] for problem in problems(engine, "policy")]
    assert places == [
        "roles.policy.engine.bf16",
        "roles.policy.engine.steps_per_prin",
        "roles.policy.engine.zero_optimization.stage",
        "roles.policy.engine.zero_optimization.stag",
    ]


def test_settings_and_engine_arguments_merge_into_one_configuration() -> None:
    settings = {"stage": 3, "offload_params": True, "bucket_elements": 7, "dtype": "bfloat16"}
    config = msgspec.convert(settings, DeepSpeedTrainerConfig)
    made = deepspeed_config(
        config, {"dump_state": True, "zero_optimization": {"overlap_comm": False}}, pin_memory=True
    )
    assert made["dump_state"] is True
    assert made["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": 7,
        "allgather_bucket_size": 7,
        "offload_param": {"device": "cpu", "pin_memory": True},
    }


def test_every_rank_has_the_error_of_a_conversion_that_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from gcore_deepspeed import state

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told = []

    def gather(value: Any) -> list[Any]:
        told.append(value)
        return [value, None]

    monkeypatch.setattr(state, "_convert", full)
    engine, optimizer, ranks = Mock(), Mock(steps=1), Mock(rank=0, gather=gather)
    with pytest.raises(CheckpointError, match="No space left"):
        state.save_universal(engine, optimizer, tmp_path, {}, ranks)
    assert [value is None for value in told] == [True, True, False]  # as often as the other ranks
