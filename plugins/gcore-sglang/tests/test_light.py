"""What needs no engine: settings, names of server arguments, files of a push, the check before a
run.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gcore_sglang
import numpy as np
import pytest
from gcore_language.images import Images
from gcore_sglang.arguments import ARGUMENTS
from gcore_sglang.buckets import bucket_directory
from gcore_sglang.client import Event
from gcore_sglang.config import SglangGeneratorConfig
from gcore_sglang.engine import SglangGenerator
from gcore_sglang.pixels import PixelFiles, check_patches

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.deadlines import Deadlines
from gcore_core.contract.errors import ConfigError, DataError, WorkerError
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt, TensorSpec
from gcore_core.testing.installed import Wheel, empty_venv
from gcore_core.testing.safetensors_files import Tensors, read_safetensors

KNOWN = ["attention_backend", "chunked_prefill_size", "mem_fraction_static", "port"]
TENSORS: Tensors = [
    (TensorSpec("a.weight", "F32", (2, 3), 24), np.arange(24, dtype=np.uint8)),
    (TensorSpec("b.bias", "BF16", (5,), 10), np.arange(10, dtype=np.uint8)),
]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"kv_cache_tokens": 0}, "kv_cache_tokens: must be positive, is 0"),
        ({"start_timeout_s": 0.0}, r"start_timeout_s: must be positive, is 0\.0"),
        ({"push_timeout_s": -1.0}, r"push_timeout_s: must be positive, is -1\.0"),
        ({"top_p": 2.0}, r"top_p: must be in 0\.\.1"),
    ],
)
def test_a_setting_out_of_range_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SglangGeneratorConfig(**setting)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dtype",
            r"(?s)engine\.dtype: this argument is set by another key"
            r".*Set roles\.rollout\.config\.dtype",
        ),
        ("model_path", r"Set roles\.rollout\.model\.path"),
        ("random_seed", r"Set run\.seed"),
        ("tp_size", r"(?s)this argument is fixed.*on one device"),
        ("api_key", r"(?s)this argument is fixed.*drawn anew"),
        ("host", r"(?s)this argument is fixed.*its own worker only"),
    ],
)
def test_an_engine_argument_that_cannot_be_set_is_refused(name: str, message: str) -> None:
    ARGUMENTS.check_set_here({"port": 1, "mem_fraction_static": 0.5}, "rollout")
    with pytest.raises(ConfigError, match=message):
        ARGUMENTS.check_set_here({"port": 1, name: 1}, "rollout")


def test_an_engine_argument_that_sglang_does_not_have_is_refused() -> None:
    ARGUMENTS.check_known({"port": 1}, KNOWN, "rollout")
    with pytest.raises(
        ConfigError,
        match=r"engine\.mem_fraction: SGLang has no server argument.*did you mean 'mem_fr",
    ):
        ARGUMENTS.check_known({"port": 1, "mem_fraction": 0.5}, KNOWN, "rollout")


def test_a_bucket_is_a_private_file_that_is_removed_after_use(tmp_path: Path) -> None:
    with bucket_directory(tmp_path, TENSORS) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        (file,) = directory.iterdir()
        found = read_safetensors(file)
        assert [spec for spec, _ in found] == [spec for spec, _ in TENSORS]
        for (_, one), (_, other) in zip(found, TENSORS, strict=True):
            np.testing.assert_array_equal(one, other)
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_that_was_not_loaded_is_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no"), bucket_directory(tmp_path, TENSORS):
        raise RuntimeError("no")
    assert list(tmp_path.iterdir()) == []


def test_error_for_a_bucket_without_room_names_its_size(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerError, match=r"(?s)a bucket of 34 bytes cannot be written.*shared memory"
    ):
        with bucket_directory(tmp_path / "missing", TENSORS):
            pass


def test_pixels_share_one_file_until_their_last_sample_ends(tmp_path: Path) -> None:
    files = PixelFiles(tmp_path)
    one, other = (
        Images(pixels=np.full((4, 2), i, np.float32), grid=np.array([[1, 2, 2]])) for i in range(2)
    )
    shown = [files.show(images) for images in (one, other, one)]
    assert len({*shown}) == len(list(tmp_path.iterdir())) == 2
    files.release(one)
    with np.load(shown[0]) as told:
        np.testing.assert_array_equal(told["pixels"], one.pixels)
        np.testing.assert_array_equal(told["grid"], one.grid)
    files.release(one)
    assert [str(file) for file in tmp_path.iterdir()] == [shown[1]]


def test_error_for_pixels_without_room_names_their_size(tmp_path: Path) -> None:
    images = Images(pixels=np.zeros((4, 2), np.float32), grid=np.array([[1, 2, 2]]))
    with pytest.raises(
        WorkerError, match=r"(?s)pixels of 32 bytes cannot be written.*shared memory"
    ):
        PixelFiles(tmp_path / "missing").show(images)


def test_a_model_whose_patches_sglang_would_misread_is_refused() -> None:
    vision = {"in_channels": 3, "temporal_patch_size": 2, "patch_size": 14}
    check_patches(SimpleNamespace(vision_config=SimpleNamespace(**vision)), "model")
    with pytest.raises(
        DataError,
        match="model: SGLang does not encode this model's images: a patch has 1536 numbers",
    ):
        check_patches(
            SimpleNamespace(vision_config=SimpleNamespace(**vision | {"patch_size": 16})), "model"
        )


def python_with(root: Path, distribution: str, version: str) -> str:
    """The interpreter of a virtual environment that has one distribution."""
    wheel = Wheel(distribution=distribution, version=version, requires=())
    empty_venv(root).add("none", wheel=wheel)
    return str(root / "bin" / "python")


def test_a_run_is_checked_for_the_engine_in_the_roles_interpreter(tmp_path: Path) -> None:
    versions = {"right": ("sglang", "0.5.23"), "old": ("sglang", "0.4.9"), "none": ("numpy", "2.0")}
    pythons = {name: python_with(tmp_path / name, *versions[name]) for name in versions}
    roles = {name: {"use": "sglang", "python": python} for name, python in pythons.items()}
    roles["policy"] = {"use": "torch", "python": pythons["none"]}
    old, none = gcore_sglang.gcore_check({"roles": roles})
    assert old.startswith(
        f"roles.old.python: {pythons['old']} has sglang 0.4.9, but this needs sglang>=0.5.23,<0.6;"
    )
    assert none.startswith(
        f"roles.none.python: {pythons['none']} has no SGLang, but this needs sglang"
    )


def test_sleep_is_refused_where_there_is_no_cuda() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    pytest.importorskip("aiohttp")
    from gcore_sglang.sleeping import SleepingSglangGenerator

    with pytest.raises(
        ConfigError,
        match=r"(?s)roles\.rollout\.use: this engine can sleep only with CUDA.*Use sglang\.",
    ):
        SleepingSglangGenerator(SglangGeneratorConfig(), WorkerContext(role="rollout"))


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_message_of_a_running_sample_is_progress_and_silence_is_not(goes_on: bool) -> None:
    """A long answer tells of itself every so many actions; a server that hangs tells nothing."""
    shown: list[str] = []
    generator = SglangGenerator.__new__(SglangGenerator)
    generator._inbox = SimpleNamespace(check_idle=lambda: None)  # type: ignore[assignment]
    generator._context = WorkerContext(role="rollout", progress=lambda: shown.append("progress"))
    generator._ended = []
    generator._begun = {"0"}
    generator._running = {"0": SimpleNamespace()}  # type: ignore[dict-item]
    generator._server = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
    generator._tokenizer = None
    events = [Event("0", {}, ended=False)] if goes_on else []
    generator._client = SimpleNamespace(wait=lambda wait_s: events)  # type: ignore[assignment]
    generator._finish = lambda ended: ended  # type: ignore[method-assign, assignment, return-value]
    assert generator.step() == []
    assert shown == ["progress"] * goes_on


def test_a_sample_tells_of_itself_often_enough_for_a_slow_engine() -> None:
    """At ten actions a second it does so several times within the default patience."""
    generator = SglangGenerator.__new__(SglangGenerator)
    generator._config = SglangGeneratorConfig()
    generator._ends = []
    request = SampleRequest(ordinal=0, sample=0, seed=1, prompt=Prompt(row=0, text=""))
    interval = generator._parameters(request, 8)["stream_interval"]
    assert interval / 10 < Deadlines().patience_s / 5
