"""Two processes over gloo against plain torch, against one process, and against the torch
trainer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_testing.runs import run_together

from tests.support import deepspeed_trainers as tools
from tests.support import language_models as tiny
from tests.support import lockstep_ranks

pytestmark = pytest.mark.engine

LIMIT_S = 540
#: family, then the settings; every stage, and what is kept in host memory
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("qwen2", {"stage": 1}),
    "zero2": ("llama", {"stage": 2}),
    "zero3": ("qwen2", {"stage": 3}),
    "zero1-offload": ("llama", {"stage": 1, "offload_optimizer": True}),
    "zero2-offload": ("qwen2", {"stage": 2, "offload_optimizer": True}),
    "zero3-offload": ("llama", {"stage": 3, "offload_optimizer": True, "offload_params": True}),
    "zero2-universal": ("qwen2", {"stage": 2, "checkpoint": "universal"}),
    "zero3-universal": ("llama", {"stage": 3, "checkpoint": "universal", "packing": "padded"}),
}
_COMPILERS = ("c++", "g++", "gcc", "cc", "clang", "clang++", "nvcc", "ninja", "hipcc")


def run_ranks(cases: list[dict[str, Any]], ranks: int, room: Path) -> None:
    """Runs the cases in ``ranks`` processes, in which every compiler is one that leaves a note and
    fails.
    """
    room.mkdir()
    stubs = room / "compilers"
    stubs.mkdir()
    for name in _COMPILERS:
        (stubs / name).write_text(f"#!/bin/sh\ntouch {stubs}/called-{name}\nexit 1\n")
        (stubs / name).chmod(0o755)
    spec = room / "cases.json"
    spec.write_text(json.dumps(cases))
    programs = [
        ["-m", "tests.support.deepspeed_ranks", str(rank), str(ranks), str(spec)]
        for rank in range(ranks)
    ]
    path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
    run_together(programs, LIMIT_S, PATH=path, COMPILERS=str(stubs))


@pytest.fixture(scope="module")
def case_of(
    model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    def make(do: str, name: str, **more: Any) -> dict[str, Any]:
        family, config = RUNS[name]
        work = tmp_path_factory.mktemp(f"{do}-{name}")
        return {
            "do": do,
            "model": str(model_dirs[family]),
            "config": config,
            "work": str(work),
        } | more

    return make


@pytest.fixture(scope="module")
def together(
    case_of: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    """(what, run) -> where its two ranks left what they found."""
    cases = {("updates", name): case_of("updates", name) for name in RUNS}
    cases |= {
        ("spoiled", name): case_of("spoiled", name) for name in RUNS if "universal" not in name
    }
    everything = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    cases["gathered", "zero3"] = case_of("gathered", "zero3", engine=everything)
    cases["gathered", "zero3"]["config"] = {"stage": 3, "bucket_elements": 9000}
    run_ranks(list(cases.values()), 2, tmp_path_factory.mktemp("together") / "room")
    return {key: Path(case["work"]) for key, case in cases.items()}


@pytest.fixture(scope="module")
def plain(model_dirs: dict[str, Path]) -> Callable[[str], dict[str, Any]]:
    """What plain torch makes of the same two updates, by family."""
    outcomes: dict[str, dict[str, Any]] = {}

    def of(family: str) -> dict[str, Any]:
        if family not in outcomes:
            model = tools.Plain(model_dirs[family], tools.SETTINGS)
            records = tools.make_records(seed=0)
            outcome: dict[str, Any] = {"start": model.weights()}
            outcome["logprobs"] = [model.logp(record).detach().numpy() for record in records]
            for name, seed in (("first", 0), ("second", 1)):
                batch = tools.make_records(seed=seed)
                metrics = model.update(
                    batch, tiny.make_advantages(batch, seed=seed), tiny.Reinforce()
                )
                outcome[name] = model.weights()
                outcome[f"{name}-told"] = metrics
            outcomes[family] = outcome
        return outcomes[family]

    return of


def left(work: Path, name: str) -> Any:
    if name.endswith(".npz"):
        return dict(np.load(work / name))
    return json.loads((work / f"{name}-rank0.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_log_probs_match_plain_torch(name: str, together: Any, plain: Any) -> None:
    logprobs = left(together["updates", name], "updates")["logprobs"]
    expected = [logp for i, logp in enumerate(plain(RUNS[name][0])["logprobs"]) if i % 4]
    assert len(logprobs) == len(expected) == 12
    for one, other in zip(logprobs, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_updates_match_plain_torch(name: str, together: Any, plain: Any) -> None:
    """Loss, gradient norm before clipping and weights, with unequal shares of the records."""
    work = together["updates", name]
    expected = plain(RUNS[name][0])
    metrics = left(work, "updates")["metrics"]
    for step_metrics, when in zip(metrics, ("first", "second"), strict=True):
        assert (step_metrics["loss"], step_metrics["grad_norm"]) == pytest.approx(
            expected[f"{when}-told"], abs=1e-5, rel=1e-5
        )
        assert tools.largest_difference(left(work, f"{when}.npz"), expected[when]) < 1e-5
    assert metrics[0]["grad_norm"] > tools.SETTINGS["clip_grad_norm"]
    assert tools.largest_difference(expected["first"], expected["start"]) > 1e-3


def test_training_compiles_no_extension(together: Any) -> None:
    """The ranks themselves fail when a compiler was called."""
    for (what, _), work in together.items():
        if what == "updates":
            assert left(work, "updates")["built"] == []


def test_an_exported_model_directory_holds_the_weights(together: Any) -> None:
    from safetensors.numpy import load_file

    for (what, _), work in together.items():
        if what == "updates":
            stored = load_file(work / "pretrained" / "model.safetensors")
            expected = left(work, "second.npz")
            assert stored.keys() == expected.keys()
            assert all(stored[name].tobytes() == expected[name].tobytes() for name in stored)
            assert (work / "pretrained" / "tokenizer.json").is_file()


def test_export_gathers_at_most_one_bucket_at_a_time(together: Any) -> None:
    gathered = left(together["gathered", "zero3"], "gathered")
    assert gathered["before"] == 0
    assert all(
        total <= max(9000, most)
        for total, most in zip(gathered["sums"], gathered["most"], strict=True)
    )
    exported = left(together["gathered", "zero3"], "exported.npz")
    assert tools.largest_difference(exported, left(together["gathered", "zero3"], "whole.npz")) == 0
    assert sum(array.size for array in exported.values()) > 5 * max(gathered["sums"])


@pytest.mark.parametrize("name", [name for name in RUNS if "universal" not in name])
def test_non_finite_numbers_change_no_weights(name: str, together: Any, plain: Any) -> None:
    """Nor does an update in which nothing is trained; none of them has a part in the next one."""
    work = together["spoiled", name]
    expected = plain(RUNS[name][0])
    gradient, masked, loss, after = left(work, "spoiled")["told"]
    assert "gradient norm inf in update 0 of step 0" in gradient
    assert masked == 0
    assert "loss nan in update 0 of step 0" in loss
    assert after == pytest.approx(expected["first-told"][1], rel=1e-5)
    for when in ("gradient", "masked", "loss"):
        assert tools.largest_difference(left(work, f"{when}.npz"), expected["start"]) == 0, when
    assert tools.largest_difference(left(work, "after.npz"), expected["first"]) < 1e-5


@pytest.fixture
def open_torch(model_dirs: dict[str, Path]) -> Callable[[str], Any]:
    from gcore_torch.config import TorchTrainerConfig
    from gcore_torch.trainer import TorchTrainer

    def make(family: str) -> Any:
        return TorchTrainer(
            TorchTrainerConfig(**tools.SETTINGS),
            tiny.make_context(model_dirs[family], tiny.Reinforce()),
        )

    return make


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3-offload"])
def test_the_torch_trainer_continues_from_a_saved_state(
    name: str, together: Any, plain: Any, open_torch: Any
) -> None:
    family = RUNS[name][0]
    trainer = open_torch(family)
    trainer.load(together["updates", name] / "state")
    assert trainer.version == 1
    records = tools.make_records(seed=1)
    tools.train(trainer, records, tiny.make_advantages(records, seed=1), step=1)
    after = tools.weights_of(trainer)
    assert tools.largest_difference(after, left(together["updates", name], "second.npz")) < 1e-5
    assert tools.largest_difference(after, plain(family)["second"]) < 1e-5


def test_deepspeed_continues_from_a_state_of_the_torch_trainer(
    case_of: Any, plain: Any, open_torch: Any, tmp_path: Path
) -> None:
    trainer = open_torch("qwen2")
    records = tools.make_records(seed=0)
    tools.train(trainer, records, tiny.make_advantages(records, seed=0))
    trainer.save(tmp_path / "state")
    cases = [
        case_of("resume", name, state=str(tmp_path / "state"))
        for name in ("zero1", "zero3", "zero2-offload")
    ]
    run_ranks(cases, 2, tmp_path / "room")
    for case in cases:
        assert (
            tools.largest_difference(
                left(Path(case["work"]), "resumed.npz"), plain("qwen2")["second"]
            )
            < 1e-5
        )


def test_one_rank_continues_from_a_state_of_two(
    together: Any, case_of: Any, tmp_path: Path
) -> None:
    names = ["zero1", "zero3", "zero2-universal", "zero3-universal"]
    cases = [
        case_of("resume", name, state=str(together["updates", name] / "state")) for name in names
    ]
    run_ranks(cases, 1, tmp_path / "room")
    for name, case in zip(names, cases, strict=True):
        resumed = left(Path(case["work"]), "resumed.npz")
        assert (
            tools.largest_difference(resumed, left(together["updates", name], "second.npz")) < 1e-5
        ), name


def test_ranks_pack_so_that_they_wait_less_than_first_come(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    as_packed, first_come = lockstep_ranks.waits_of("deepspeed", model_dirs["qwen2"], tmp_path)
    assert as_packed < first_come
