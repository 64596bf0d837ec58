"""DeepSpeed in this process, as one rank, against plain torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_language.state_files import write_numbers
from gcore_language.tiny import VOCABULARY

from gcore_core.contract.errors import ConfigError, DataError
from tests.support import deepspeed_trainers as tools
from tests.support import language_models as tiny

pytestmark = pytest.mark.engine


@pytest.fixture
def open_trainer(model_dirs: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a trainer, and closes it after the test."""
    from gcore_deepspeed.config import DeepSpeedTrainerConfig
    from gcore_deepspeed.trainer import DeepSpeedTrainer

    trainers = []

    def make(
        family: str = "llama", objective: Any = None, engine: Any = None, **config: Any
    ) -> Any:
        settings = DeepSpeedTrainerConfig(**{**tools.SETTINGS, **config})
        passed = (tools.SHARED_OUT if settings.stage == 3 else {}) if engine is None else engine
        objective = tiny.Reinforce() if objective is None else objective
        context = tiny.make_context(
            model_dirs[family], objective, engine=passed, directory=str(tmp_path)
        )
        trainers.append(DeepSpeedTrainer(settings, context))
        return trainers[-1]

    yield make
    for trainer in reversed(trainers):
        trainer.close()


def gradients(trainer: Any, records: Any, advantages: np.ndarray) -> tuple[dict[str, float], Any]:
    """Metrics and the gradient of a first update, which is its first moment divided by 1 -
    beta1.
    """
    metrics = tools.train(trainer, records, advantages)
    parts = trainer._engine._optimizer.parts()
    scale = 1 - tools.SETTINGS["betas"][0]
    return metrics, {
        k.removeprefix("exp_avg/"): t.numpy() / scale for k, t in parts if k.startswith("exp_avg/")
    }


def test_the_imported_library_is_deepspeed() -> None:
    import deepspeed

    version = importlib.metadata.version("deepspeed")
    assert version == "0.19.8" == deepspeed.__version__
    files = importlib.metadata.files("deepspeed") or []
    assert Path(deepspeed.__file__) in {Path(str(file.locate())) for file in files}


def test_the_names_that_the_check_knows_are_those_of_deepspeed() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.profiling import constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from gcore_deepspeed.arguments import SECTIONS
    from gcore_deepspeed.engine import names_of

    kinds: dict[str, Any] = {
        "comms_logger": CommsLoggerConfig,
        "csv_monitor": CSVConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "zero_optimization": DeepSpeedZeroConfig,
    }
    names = {section: tuple(sorted(names_of(kind))) for section, kind in kinds.items()}
    profiler = {
        value
        for name, value in vars(constants).items()
        if name.startswith("FLOPS_PROFILER_") and not name.endswith(("_DEFAULT", "_FORMAT"))
    }
    names["flops_profiler"] = tuple(sorted(profiler))
    names["timers"] = ("throughput",)
    assert names == SECTIONS


@pytest.mark.parametrize("packing", ["padded", "shared_prompt", "split"])
@pytest.mark.parametrize("name", ["ppo-clip", "gspo", "cispo"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_objectives_match_value_and_gradient_of_plain_torch(
    stage: int, name: str, packing: str, open_trainer: Any, model_dirs: dict[str, Path]
) -> None:
    """Records that share prompts, padded, or in micro-batches of one record."""
    from gcore_algorithms.config import CispoConfig, GspoConfig, PpoClipConfig
    from gcore_algorithms.objectives import Cispo, Gspo, PpoClip

    objective = {
        "ppo-clip": PpoClip(PpoClipConfig(clip_low=0.2, clip_high=0.28)),
        "gspo": Gspo(GspoConfig(clip_low=0.1, clip_high=0.1)),
        "cispo": Cispo(CispoConfig(clip_low=0.2, clip_high=0.2)),
    }[name]
    plain = tools.Plain(model_dirs["qwen2"], tools.SETTINGS)
    records = plain.near(tools.make_records())
    advantages = tiny.make_advantages(records)
    loss, norm = plain.backward(records, advantages, objective)
    how = {
        "packing": "auto" if packing == "split" else packing,
        "budget_tokens": 1 if packing == "split" else 16384,
    }
    metrics, grads = gradients(
        open_trainer("qwen2", objective, stage=stage, clip_grad_norm=0.0, **how),
        records,
        advantages,
    )
    assert (metrics["loss"], metrics["grad_norm"]) == pytest.approx(
        (loss, norm), abs=1e-5, rel=1e-5
    )
    assert 0.05 < metrics["clip_share"] < 0.95
    expected = plain.gradients()
    assert max(float(np.abs(g).max()) for g in expected.values()) > 0.01
    assert tools.largest_difference(grads, expected) < 1e-5


@pytest.mark.parametrize("stage", [2, 3])
def test_activation_checkpointing_and_vocabulary_chunks_keep_the_gradient(
    stage: int, open_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tools.make_records()
    advantages = tiny.make_advantages(records)
    plain_metrics, expected = gradients(open_trainer("qwen2", stage=stage), records, advantages)
    monkeypatch.setattr("gcore_language.policy._CHUNK_LOGITS", 7 * VOCABULARY)
    trainer = open_trainer("qwen2", stage=stage, gradient_checkpointing=True)
    metrics, grads = gradients(trainer, records, advantages)
    assert metrics == pytest.approx(plain_metrics, abs=1e-5, rel=1e-5)
    assert tools.largest_difference(grads, expected) < 1e-6


@pytest.mark.parametrize("stage", [1, 3])
def test_bfloat16_with_float32_weights_learns_like_float32(stage: int, open_trainer: Any) -> None:
    records = tools.make_records()
    advantages = tiny.make_advantages(records)
    _, exact = gradients(open_trainer(stage=stage), records, advantages)
    trainer = open_trainer(stage=stage, dtype="bfloat16")
    _, rough = gradients(trainer, records, advantages)
    for name in exact:
        one = exact[name].ravel()
        other = rough[name].ravel()
        cosine = float(one @ other / np.sqrt((one @ one) * (other @ other)))
        assert cosine > 0.98, name  # 8 bits of mantissa through two layers
        assert np.abs(one - other).max() > 0
    assert {spec.dtype for spec in trainer.weight_specs()} == {"BF16"}
    assert {str(t.dtype) for _, t in trainer._engine._optimizer.parts()} == {"torch.float32"}


@pytest.mark.parametrize("stage", [2, 3])
def test_the_reference_keeps_the_initial_policy_weights(
    stage: int, open_trainer: Any, model_dirs: dict[str, Path]
) -> None:
    trainer = open_trainer("qwen2", stage=stage, reference=True, learning_rate=0.01)
    records = tools.make_records()
    assert trainer.prepare(records, frozenset({"kl_k1"})) == [{"kl_k1": 0.0}] * len(records)
    trainer.train(0, tiny.make_advantages(records), 1, 1)
    second = trainer.prepare(records, frozenset({"kl_k1"}))
    initial = tools.Plain(model_dirs["qwen2"], tools.SETTINGS)
    for record, logp, ref_logp in zip(
        records, tools.logprobs_of(trainer, len(records)), second, strict=True
    ):
        gap = (logp - initial.logp(record).detach().numpy()) * record.columns["action_mask"]
        assert ref_logp["kl_k1"] == pytest.approx(float(gap.sum()), abs=1e-5)
    assert max(abs(row["kl_k1"]) for row in second) > 1e-2


def test_flat_layout_is_offered_only_in_stage_1(open_trainer: Any) -> None:
    assert open_trainer(stage=1)._layouts == {"flat", "shared", "padded"}
    assert open_trainer(stage=2)._layouts == {"shared", "padded"}
    assert open_trainer(stage=3)._layouts == {"shared", "padded"}


@pytest.mark.parametrize("stage", [2, 3])
def test_loading_a_state_without_updates_clears_moments(
    stage: int, open_trainer: Any, tmp_path: Path
) -> None:
    trainer = open_trainer(stage=stage)
    records = tools.make_records()
    trainer.save(tmp_path / "state")
    for _ in range(2):
        tools.train(trainer, records, tiny.make_advantages(records))
        after = tools.weights_of(trainer)
        trainer.load(tmp_path / "state")
        assert tools.largest_difference(tools.weights_of(trainer), after) > 1e-4
    tools.train(trainer, records, tiny.make_advantages(records))
    assert tools.largest_difference(tools.weights_of(trainer), after) == 0


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "zero", "message"),
    [
        (
            2,
            {"sub_group_size": -1},
            r"zero_optimization\.sub_group_size: DeepSpeed refuses this: Input should be",
        ),
        (
            1,
            {"overlap_comm": True},
            r"zero_optimization\.overlap_comm: stage 1 has nothing to overlap communication with",
        ),
        (2, {"overlap_com": True}, r"did you mean 'overlap_comm'"),
        (3, {"stage3_param_persistance": 1}, r"did you mean 'stage3_param_persistence_threshold'"),
    ],
)
def test_a_setting_that_deepspeed_refuses_is_named(
    stage: int, zero: Any, message: str, open_trainer: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_trainer(stage=stage, engine={"zero_optimization": zero})


def test_an_unsupported_version_of_deepspeed_is_refused(
    open_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore_deepspeed.library.importlib.metadata.version", lambda _: "0.18.0")
    with pytest.raises(ConfigError, match="needs deepspeed .*, but found 0.18.0"):
        open_trainer()


def test_an_unmet_requirement_of_the_objective_is_named(open_trainer: Any) -> None:
    class Surprised(tiny.Reinforce):
        requires = frozenset({"surprise"})

    with pytest.raises(ConfigError, match="requires surprise, which this trainer does not compute"):
        open_trainer(objective=Surprised())


def test_a_state_of_another_model_or_format_is_refused(open_trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="trainer state cannot be read"):
        open_trainer().load(tmp_path)
    open_trainer("qwen2").save(tmp_path)
    with pytest.raises(DataError, match="trainer state is of another model"):
        open_trainer("llama").load(tmp_path)
    open_trainer("qwen2", stage=3, checkpoint="universal").save(tmp_path / "shared out")
    with pytest.raises(
        DataError,
        match="universal state was saved with stage 3, and DeepSpeed cannot load it with 2",
    ):
        open_trainer("qwen2", stage=2).load(tmp_path / "shared out")
    write_numbers(tmp_path, {}, "distributed")
    with pytest.raises(
        DataError, match="in the format distributed, which this trainer cannot load"
    ):
        open_trainer("qwen2").load(tmp_path)
