from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from gcore_tools.export.of_run import export

from gcore_core import cli
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.run.saved_weights import INDEX, tensor_names


def _safetensors(path: Path, header: dict[str, object], data: bytes) -> None:
    """Writes the format by its specification: u64 length, JSON header, data."""
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def _header(**spans: tuple[int, int]) -> dict[str, object]:
    tensors = {
        n: {"dtype": "F32", "shape": [(b - a) // 4], "data_offsets": [a, b]}
        for n, (a, b) in spans.items()
    }
    return {"__metadata__": {"format": "pt"}, **tensors}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = tmp_path / "runs/digits/001"
    (run / "weights").mkdir(parents=True)
    (run / "config.yaml").touch()
    _safetensors(
        run / "weights/a.safetensors",
        _header(x=(0, 16), y=(16, 24), empty=(24, 24)),
        bytes(range(24)),
    )
    _safetensors(run / "weights/b.safetensors", _header(z=(0, 4)), b"1234")
    index = {"weight_map": {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (run / "weights" / INDEX).write_text(json.dumps(index))
    (run / "weights/config.json").write_text("{}")
    return run


def _content(directory: Path) -> dict[str, bytes]:
    files = [file for file in directory.rglob("*") if file.is_file()]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def test_an_export_is_byte_for_byte_the_final_weights(run_dir: Path, tmp_path: Path) -> None:
    latest = run_dir.parent / "latest"
    latest.symlink_to("001")
    copied = export(latest, tmp_path / "out/model")
    assert _content(tmp_path / "out/model") == _content(run_dir / "weights")
    assert copied == sum(map(len, _content(run_dir / "weights").values()))
    assert [child.name for child in (tmp_path / "out").iterdir()] == ["model"]


def test_a_role_that_the_run_has_not_trained_is_told_with_those_that_it_has(
    run_dir: Path, tmp_path: Path
) -> None:
    (run_dir / "weights").rename(run_dir / "weights-critic")
    (run_dir / "weights").mkdir()
    _safetensors(run_dir / "weights/a.safetensors", _header(x=(0, 4)), b"1234")
    with pytest.raises(ConfigError) as caught:
        export(run_dir, tmp_path / "out", "critc")
    assert str(caught.value) == (
        "g-core export --role: no role 'critc' is trained in this run (did you mean 'critic'?).\n"
        "  there are: policy, critic"
    )
    assert not (tmp_path / "out").exists()


def test_a_file_written_by_the_safetensors_library_is_accepted(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    import numpy as np

    tensors = {
        "scalar": np.array(1.0),
        "half": np.ones((3, 5), np.float16),
        "bytes": np.ones(7, np.uint8),
    }
    numpy.save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    assert tensor_names(tmp_path / "m.safetensors") == set(tensors)


def _cut(weights: Path) -> None:
    file = weights / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _cut_header(weights: Path) -> None:
    (weights / "a.safetensors").write_bytes((weights / "a.safetensors").read_bytes()[:20])


def _empty(weights: Path) -> None:
    (weights / "a.safetensors").write_bytes(b"")


def _longer(weights: Path) -> None:
    with (weights / "a.safetensors").open("ab") as file:
        file.write(b"!")


def _garbled(weights: Path) -> None:
    (weights / "a.safetensors").write_bytes(struct.pack("<Q", 4) + b"{x: ")


def _unknown_dtype(weights: Path) -> None:
    _safetensors(
        weights / "a.safetensors",
        {"x": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}},
        b"1234",
    )


def _wrong_shape(weights: Path) -> None:
    _safetensors(
        weights / "a.safetensors",
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        b"1234",
    )


def _gap(weights: Path) -> None:
    _safetensors(weights / "a.safetensors", _header(x=(0, 4), y=(8, 12)), bytes(12))


def _lost_shard(weights: Path) -> None:
    (weights / "b.safetensors").unlink()


def _bad_index(weights: Path) -> None:
    (weights / INDEX).write_text('{"weight_map": 3}')


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_cut, "incomplete metadata, file not fully covered"),
        (_cut_header, "invalid header length"),
        (_empty, "header too small"),
        (_longer, "incomplete metadata, file not fully covered"),
        (_garbled, "invalid JSON in header"),
        (_unknown_dtype, "unknown variant `F3`"),
        (_wrong_shape, "invalid shape, data type, or offset for tensor"),
        (_gap, "invalid offset for tensor `y`"),
        (_lost_shard, "tensor 'z' is not in 'b.safetensors'"),
        (_bad_index, "the index does not parse"),
    ],
)
def test_damaged_weights_are_never_exported(
    run_dir: Path, tmp_path: Path, damage, why: str
) -> None:  # type: ignore[no-untyped-def]
    damage(run_dir / "weights")
    with pytest.raises(DataError, match="this file of weights is damaged") as caught:
        export(run_dir, tmp_path / "out")
    assert (
        why in caught.value.why
        and caught.value.where.startswith(str(run_dir / "weights"))
        and caught.value.todo
    )
    assert not (tmp_path / "out").exists()


def test_a_run_that_did_not_end_cannot_be_exported(run_dir: Path, tmp_path: Path) -> None:
    for file in (run_dir / "weights").iterdir():
        file.unlink()
    with pytest.raises(DataError) as caught:
        export(run_dir, tmp_path / "out")
    assert str(caught.value).splitlines() == [
        f"{run_dir}: this run has no final weights.",
        "  weights/ is written when a run ends well; this one has not",
        f"  start it again: g-core run {run_dir / 'config.yaml'} run.dir=null",
    ]


def test_a_run_that_has_saved_something_is_gone_on_with(run_dir: Path, tmp_path: Path) -> None:
    for file in (run_dir / "weights").iterdir():
        file.unlink()
    (run_dir / "checkpoints/step-000002").mkdir(parents=True)
    with pytest.raises(DataError) as caught:
        export(run_dir, tmp_path / "out")
    assert caught.value.todo == (
        f"go on with it: g-core resume {run_dir}; or export what it has saved: --step N, of "
        f"g-core checkpoint list {run_dir}"
    )


def test_a_role_that_was_not_trained_is_named(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "weights-critic").mkdir()
    with pytest.raises(ConfigError, match="no role 'reference' is trained") as caught:
        export(run_dir, tmp_path / "out", "reference")
    assert caught.value.why == "there are: policy, critic"


def test_a_pipeline_is_exported_with_all_its_parts(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (run_dir / "weights").iterdir():
        file.unlink()
    part = run_dir / "weights/transformer"
    part.mkdir()
    (run_dir / "weights/model_index.json").write_text("{}")
    _safetensors(part / "diffusion_pytorch_model.safetensors", _header(x=(0, 4)), b"1234")
    assert cli.main(["export", str(run_dir), "--to", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 0.0 MB\n"
    assert _content(tmp_path / "out") == _content(run_dir / "weights")
    (part / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match="this file of weights is damaged"):
        export(run_dir, tmp_path / "again")


def test_a_directory_that_is_missing_or_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such run directory"):
        export(tmp_path / "gone", tmp_path / "out")
    with pytest.raises(DataError, match="this directory holds no run"):
        export(tmp_path, tmp_path / "out")


def test_an_existing_target_is_left_as_it_is(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="g-core export: .*out exists already") as caught:
        export(run_dir, tmp_path / "out")
    assert caught.value.todo and not list((tmp_path / "out").iterdir())


def test_a_target_that_cannot_be_written_leaves_nothing_behind(
    run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="could not be copied") as caught:
        export(run_dir, tmp_path / "file/out")
    assert "Not a directory" in caught.value.why or "File exists" in caught.value.why
