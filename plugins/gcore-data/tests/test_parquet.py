from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gcore_data
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gcore_data import parquet
from gcore_data.config import ParquetConfig
from gcore_data.parquet import Parquet
from omegaconf import OmegaConf

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import DataError, GcoreError

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
CHAT = [{"role": "user", "content": "1+1="}]


def table(rows: int, start: int = 0) -> pa.Table:
    numbers = range(start, start + rows)
    return pa.table(
        {"prompt": [str(n) for n in numbers], "answer": list(numbers), "chat": [CHAT] * rows}
    )


def parquet_file(path: Path, rows: int, start: int = 0) -> Path:
    pq.write_table(table(rows, start), path, row_group_size=10)
    return path


def arrow_file(path: Path, rows: int, start: int = 0) -> None:
    with pa.ipc.new_stream(str(path), (content := table(rows, start)).schema) as out:
        out.write_table(content, max_chunksize=7)


def saved_to_disk(folder: Path) -> Path:
    """What ``save_to_disk`` of Hugging Face datasets writes: Arrow streams, and their names in
    state.json.
    """
    folder.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    arrow_file(folder / names[0], 20)
    arrow_file(folder / names[1], 5, start=20)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )
    return folder


def parquet_directory(folder: Path) -> Path:
    folder.mkdir()
    parquet_file(folder / "b.parquet", 5, start=20)
    parquet_file(folder / "a.parquet", 20)
    return folder


def opened(path: Path, **config: Any) -> Parquet:
    return Parquet(ParquetConfig(path=str(path), **config))


def message(error: pytest.ExceptionInfo[GcoreError]) -> str:
    text = str(error.value)
    assert len(text.splitlines()) <= 6
    return text


@pytest.mark.parametrize(
    "make", [lambda path: parquet_file(path, 25), parquet_directory, saved_to_disk]
)
def test_all_layouts_hold_the_same_rows(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    rows = opened(make(tmp_path / "rows"))
    assert isinstance(rows, Dataset)
    assert [row.text for row in rows] == [str(n) for n in range(25)]
    assert rows[24].fields == {"answer": 24, "chat": CHAT}
    for row in (-1, 25):
        with pytest.raises(IndexError):
            rows[row]


def test_settings_messages_and_limit_are_applied(tmp_path: Path) -> None:
    rows = opened(parquet_file(tmp_path / "rows", 25), messages="chat", limit=3)
    assert len(rows) == 3 and rows[2].messages == CHAT


def test_a_row_group_is_read_once_while_it_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = opened(parquet_file(tmp_path / "rows", 100))
    rows._table.cache_clear()
    read: list[int] = []
    original = parquet._row_group
    monkeypatch.setattr(
        parquet, "_row_group", lambda file, g: (read.append(g), original(file, g))[1]
    )
    assert [rows[row].text for row in range(100)] == [str(n) for n in range(100)]
    assert read == list(range(10))


def test_error_for_a_missing_column_lists_existing_columns(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        opened(parquet_file(tmp_path / "rows", 5), prompt="question")
    assert "no field 'question'" in message(error) and "it has: prompt, answer, chat" in message(
        error
    )


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    parquet_file(tmp_path / "rows.parquet", 1)
    with pytest.raises(
        DataError, match=r"row\.parquet: no such file \(did you mean 'rows.parquet'\?\)"
    ):
        opened(tmp_path / "row.parquet")


@pytest.mark.parametrize(("name", "kind"), [("rows.parquet", "Parquet"), ("rows.arrow", "Arrow")])
def test_a_file_of_another_format_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(b"something else, long enough to have a footer")
    with pytest.raises(DataError, match=f"is not a {kind} file"):
        opened(tmp_path / name)


def test_a_directory_of_splits_is_refused_until_one_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="holds the splits train, test"):
        opened(tmp_path)


def test_a_directory_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no Parquet files in this directory"):
        opened(tmp_path)


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no rows"):
        opened(parquet_file(tmp_path / "rows", 0))


def test_the_config_comes_from_yaml_and_from_the_wire() -> None:
    tree = OmegaConf.merge(OmegaConf.structured(ParquetConfig), {"path": "x", "limit": 3})
    plain = OmegaConf.to_container(tree)
    assert msgspec.convert(plain, ParquetConfig) == ParquetConfig(path="x", limit=3)


def test_needs_checked_before_a_run_are_declared_dependencies() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["hub"]]
    for provider in gcore_data.gcore_datasets():
        assert set(provider.needs) <= set(requirements)


def test_image_paths_in_a_row_are_relative_to_the_file(tmp_path: Path) -> None:
    rows = pa.table({"prompt": ["?", "!"], "pictures": [["a.png", "b/c.png"], None]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    for path in (tmp_path, tmp_path / "rows.parquet"):
        read = Parquet(ParquetConfig(path=str(path), images="pictures"))
        assert read[0].images == [str(tmp_path / "a.png"), str(tmp_path / "b/c.png")]
        assert read[1].images == [] and read[1].fields == {}


def test_a_narrow_float_is_its_shortest_decimal_wherever_it_stands(tmp_path: Path) -> None:
    from gcore_data.config import HubConfig
    from gcore_data.hub import Hub

    narrow = pa.float32()
    columns = {
        "prompt": pa.array(["?", "?"]),
        "n": pa.array([3.14, None], narrow),
        "half": pa.array([0.5, 0.1], pa.float32()).cast(pa.float16()),
        "many": pa.array([[1.1, None], None], pa.list_(narrow)),
        "inner": pa.array([{"x": 1.1}, None], pa.struct([("x", narrow)])),
        "wide": pa.array([3.140000104904175, 2.0]),
    }
    expected = [
        {"n": 3.14, "half": 0.5, "many": [1.1, None], "inner": {"x": 1.1}},
        {"n": None, "half": 0.1, "many": None, "inner": None},
    ]
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns), file)
    for rows in (Parquet(ParquetConfig(path=str(file))), Hub(HubConfig(path=str(file)))):
        found = [rows[row].fields for row in range(2)]
        assert [values.pop("wide") for values in found] == [3.140000104904175, 2.0]
        assert found == expected
    more = {"map": pa.array([[("a", 1.1)]], pa.map_(pa.string(), narrow))}
    more["word"] = pa.array([3.14], narrow).dictionary_encode()
    pq.write_table(pa.table({"prompt": ["?"], **more}), file)
    assert Parquet(ParquetConfig(path=str(file)))[0].fields == {"map": [("a", 1.1)], "word": 3.14}


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train-00000-of-00001", "test-00000-of-00001"], "test, train"),
        (["train_sft", "test_sft"], "test_sft, train_sft"),
        (["train_sft-00000-of-00001-a3e", "train_gen-00000-of-00001"], "train_gen, train_sft"),
        (["train-00000-of-00002-deadbeef", "train-00001-of-00002-feedface"], ""),
        (["train", "train-extra"], "train, train_extra"),
        (["a-train-part-1", "b-train-part2", "train0", "train_00000_9f1b2c3d"], ""),
        (["gsm8k-validation", "gsm8k.train"], "train, validation"),
        (["train-00000-of-00002", "train-00001-of-00002"], ""),
        (["latest", "contest", "trains"], ""),
        (["0000", "0001"], ""),
    ],
)
def test_a_directory_with_files_of_several_splits_is_refused(
    tmp_path: Path, names: list[str], splits: str
) -> None:
    for name in names:
        parquet_file(tmp_path / f"{name}.parquet", 2)
    if not splits:
        assert len(Parquet(ParquetConfig(path=str(tmp_path)))) == 2 * len(names)
        return
    with pytest.raises(DataError, match=f"several splits: {splits}") as error:
        Parquet(ParquetConfig(path=str(tmp_path)))
    assert "data/hub" in str(error.value) and "data.config.split" in str(error.value)
    assert len(Parquet(ParquetConfig(path=str(tmp_path / f"{names[0]}.parquet")))) == 2
