"""A model directory is looked at, and refused, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_language.model_files import open_model_files
from gcore_testing.safetensors_files import write_safetensors

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.records import TensorSpec


def save(
    directory: Path,
    *,
    tied: bool = False,
    names: tuple[str, ...] = ("embed.weight", "lm_head.weight"),
) -> Path:
    (directory / "config.json").write_text(
        json.dumps({"vocab_size": 4, "tie_word_embeddings": tied})
    )
    array = np.zeros(4 * 2 * 4, np.uint8)
    write_safetensors(
        directory / "model.safetensors", [(TensorSpec(n, "F32", (4, 2), 32), array) for n in names]
    )
    return directory


def look(directory: Path | str) -> Any:
    return open_model_files(WorkerContext(role="rollout", model={"path": str(directory)}))


def test_pushed_tensors_equal_those_of_the_model_directory(tmp_path: Path) -> None:
    assert look(save(tmp_path)).shapes == {"embed.weight": (4, 2), "lm_head.weight": (4, 2)}


def test_tied_weights_are_pushed_under_one_name(tmp_path: Path) -> None:
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
    with pytest.raises(
        ConfigError, match=r"roles\.rollout\.model\.path: no model directory is given"
    ):
        open_model_files(WorkerContext(role="rollout"))


def test_a_hub_name_is_refused_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="neither a directory nor reachable"):
        look("nobody/nothing")


def test_a_hub_name_that_the_cache_has_is_opened_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    with pytest.raises(DataError, match=r"has no config\.json"):
        open_model_files(
            WorkerContext(role="rollout", model={"path": "org/model", "revision": "abc"})
        )


def test_a_model_directory_without_a_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no config\.json"):
        look(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="model config is not JSON"):
        look(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        DataError, match=r"(?s)no weights in safetensors.*pytorch_model\.bin, which can run code"
    ):
        look(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        DataError, match=r"(?s)half written.*names model-1\.safetensors, which is missing"
    ):
        look(tmp_path)


@pytest.mark.parametrize("kept", [4, 40, -1])
def test_a_half_written_file_is_refused(tmp_path: Path, kept: int) -> None:
    file = save(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(
        DataError, match=r"model\.safetensors: model directory is damaged or half written"
    ):
        look(tmp_path)


def test_a_header_that_is_not_json_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:12] = b"nono"
    file.write_bytes(content)
    with pytest.raises(DataError, match="(?s)half written.*header is not readable"):
        look(tmp_path)
