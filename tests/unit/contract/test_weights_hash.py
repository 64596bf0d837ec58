"""One hash of weights, however they lie."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gcore_core.cli import main
from gcore_core.contract.errors import DataError
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.weights_hash import WeightsHash
from gcore_core.run.saved_weights import weights_sha256

TENSORS = {
    f"layer.{i}.weight": np.random.default_rng(i).normal(size=(3, i + 1)).astype(np.float32)
    for i in range(5)
} | {"empty": np.zeros((0, 4), np.float32), "scalar": np.array(2, np.int64)}


def spec_of(name: str, array: np.ndarray) -> TensorSpec:
    dtype = {"f": "F", "i": "I"}[array.dtype.kind] + str(8 * array.dtype.itemsize)
    return TensorSpec(name, dtype, array.shape, array.nbytes)


def streamed(tensors: dict[str, np.ndarray]) -> str:
    weights = WeightsHash()
    for name, array in tensors.items():
        weights.add(spec_of(name, array), array.reshape(-1).view(np.uint8).data)
    return weights.hexdigest()


def saved(directory: Path, *files: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    for number, tensors in enumerate(files):
        metadata = {"format": "pt", "number": str(number)}
        save_file(tensors, directory / f"model-{number}.safetensors", metadata)
    return directory


def part(*names: str) -> dict[str, np.ndarray]:
    return {name: TENSORS[name] for name in names}


def test_the_hash_does_not_depend_on_files_or_order(tmp_path: Path) -> None:
    names = list(TENSORS)
    one = weights_sha256(saved(tmp_path / "one", TENSORS))
    two = weights_sha256(saved(tmp_path / "two", part(*names[3:]), part(*names[:3])))
    backwards = {name: TENSORS[name] for name in reversed(names)}
    assert one == two == streamed(TENSORS) == streamed(backwards)


def test_every_single_bit_and_every_name_dtype_and_shape_counts() -> None:
    plain = streamed(TENSORS)
    name = "layer.2.weight"
    hashes = {plain}
    content = TENSORS[name].tobytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        array = np.frombuffer(bytes(flipped), np.float32).reshape(TENSORS[name].shape)
        hashes.add(streamed({**TENSORS, name: array}))
    assert len(hashes) == 1 + 8 * len(content)
    others = dict(TENSORS)
    moved = others.pop(name)
    assert streamed({**others, "layer.2.bias": moved}) != plain
    assert streamed({**TENSORS, name: moved.reshape(-1)}) != plain
    assert streamed({**TENSORS, name: moved.view(np.int32)}) != plain
    assert streamed({**TENSORS, "empty": np.zeros((4, 0), np.float32)}) != plain
    assert streamed(others) != plain


def test_the_hash_is_what_the_page_says() -> None:
    lines = []
    for name in sorted(TENSORS):
        array = TENSORS[name]
        sha256 = hashlib.sha256(array.tobytes()).hexdigest()
        fields = [name, spec_of(name, array).dtype, list(array.shape), sha256]
        lines.append(json.dumps(fields, separators=(",", ":"), ensure_ascii=False) + "\n")
    assert streamed(TENSORS) == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_the_program_of_the_page_prints_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/compare.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    saved(tmp_path / "my-model", TENSORS)
    monkeypatch.chdir(tmp_path)
    exec(program, {})  # our own page
    assert capsys.readouterr().out == weights_sha256(tmp_path / "my-model") + "\n"


def test_a_name_that_comes_twice_is_refused() -> None:
    weights = WeightsHash()
    spec = spec_of("scalar", TENSORS["scalar"])
    weights.add(spec, TENSORS["scalar"].tobytes())
    with pytest.raises(ValueError, match="tensor 'scalar' comes twice"):
        weights.add(spec, TENSORS["scalar"].tobytes())


def test_the_command_prints_it_of_a_directory_and_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    saved(run / "weights", TENSORS)
    for path in (run, run / "weights"):
        assert main(["hash", str(path)]) == 0
        assert capsys.readouterr().out == streamed(TENSORS) + "\n"


def test_a_directory_without_weights_or_with_damaged_ones_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=r"there is no \*.safetensors file in it"):
        weights_sha256(tmp_path)
    file = saved(tmp_path / "weights", TENSORS) / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["hash", str(tmp_path / "weights")]) == 4
    assert "this file of weights is damaged" in capsys.readouterr().err
