"""What a job names is known by its content: a copy is the same, and a change is seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gcore_core.contract.errors import ConfigError
from gcore_core.runtime import named_files as module
from gcore_core.runtime.named_files import digest_of, named_files, refuse_changed

MODEL = "roles.policy.config.lora.path"


def model(directory: Path) -> Path:
    """Writes a directory like that of a model."""
    (directory / "part").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "weights.safetensors").write_bytes(bytes(10_000))
    (directory / "part" / "more.safetensors").write_bytes(bytes(5_000))
    return directory


def test_a_copy_of_a_directory_has_its_digest_and_what_is_hidden_is_no_part_of_it(
    tmp_path: Path,
) -> None:
    one = model(tmp_path / "one")
    other = tmp_path / "other"
    shutil.copytree(one, other)
    (other / ".cache").mkdir()
    (other / ".cache" / "lock").touch()
    (other / "__pycache__").mkdir()
    (other / "__pycache__" / "model.pyc").touch()
    assert digest_of(one) == digest_of(other)


@pytest.mark.parametrize("change", ["a byte", "a name", "a file less", "a file more"])
def test_each_change_of_a_directory_is_seen(change: str, tmp_path: Path) -> None:
    directory = model(tmp_path / "model")
    before = digest_of(directory)
    weights = directory / "part" / "more.safetensors"
    match change:
        case "a byte":
            weights.write_bytes(bytes(4_999) + b"1")
        case "a name":
            weights.rename(directory / "part" / "most.safetensors")
        case "a file less":
            weights.unlink()
        case "a file more":
            (directory / "part" / "empty").touch()
    assert digest_of(directory) != before


def test_of_what_is_large_small_files_are_read_whole_and_pieces_of_all_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WHOLE_BYTES", 1_000)
    monkeypatch.setattr(module, "_SAMPLES", 10)
    monkeypatch.setattr(module, "_SAMPLE_BYTES", 16)
    directory = model(tmp_path / "model")
    before = digest_of(directory)
    stride = (15_002 - 1_000) // 10
    for name, size in (("weights.safetensors", 10_000), ("part/more.safetensors", 5_000)):
        file = directory / name
        for begin in range(0, size - stride, stride):
            content = bytearray(size)
            content[begin : begin + stride] = b"1" * stride
            file.write_bytes(content)
            assert digest_of(directory) != before, f"{name} from {begin} on"
        file.write_bytes(bytes(size))
    assert digest_of(directory) == before
    (directory / "config.json").write_text("[]")
    assert digest_of(directory) != before


def test_directories_of_models_and_rows_are_known_and_no_other(tmp_path: Path) -> None:
    """A reward may write into a directory, and a run writes into those above its own."""
    directory = str(model(tmp_path / "model"))
    file = f"{directory}/config.json"
    config = {
        "data": {"config": {"path": directory}},
        "evaluation": {"data": {"config": {"path": [file, directory]}}},
        "rewards": {"human": {"config": {"path": directory}}},
        "roles": {
            "policy": {"config": {"lora": {"path": directory}, "x": {"path": f"{tmp_path}"}}}
        },
    }
    assert list(named_files(config, tmp_path / "runs" / "001")) == [
        "data.config.path",
        "evaluation.data.config.path.0",
        "evaluation.data.config.path.1",
        MODEL,
    ]


def test_a_process_that_starts_later_refuses_another_file_and_names_its_key(
    tmp_path: Path,
) -> None:
    directory = model(tmp_path / "model")
    config = {"roles": {"policy": {"config": {"lora": {"path": str(directory)}}}}}
    files = named_files(config, tmp_path / "runs")
    refuse_changed(files)
    (directory / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="was changed while the run goes on") as error:
        refuse_changed(files)
    assert error.value.where == MODEL
    shutil.rmtree(directory)
    refuse_changed(files)  # whoever opens it says what is missing
