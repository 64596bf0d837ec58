"""Data that cannot be opened are told before anything starts; nothing is downloaded for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gcore_testing.installed import InstalledPlugins

from gcore_core import cli

JOB = """\
launcher: {{use: core/inline}}
data: {{use: {use}, config: {{path: {path}}}}}
advantage: {{use: letters}}
objective: {{use: letters}}
roles: {{policy: {{use: letters}}, rollout: {{use: letters}}}}
rewards: {{letters: {{use: letters}}}}
"""
Told = Callable[..., str]


@pytest.fixture
def told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Told]:
    """Returns what ``g-core check`` says is wrong with a job of these data; "": nothing."""

    def check(use: str, path: object, *overrides: str) -> str:
        job = tmp_path / "job.yaml"
        job.write_text(JOB.format(use=use, path=path))
        code = cli.main(["check", str(job), *overrides])
        said = capsys.readouterr().err
        assert code == (2 if said else 0)
        return said

    with InstalledPlugins(tmp_path / "plugins") as installed:
        installed.add("letters", "from gcore_testing.fake import *\n")
        yield check


def test_a_parquet_file_that_is_missing_or_has_no_prompt_is_told_with_its_columns(
    tmp_path: Path, told: Told
) -> None:
    file = tmp_path / "rows.parquet"
    assert told("data/parquet", file).startswith(f"data.config.path: {file}: no such file")
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), file)
    problem = told("data/parquet", file)
    assert "row 0: no field 'prompt'; it has: question, answer; set data.config.prompt" in problem
    assert told("data/parquet", file, "data.config.prompt=question") == ""


def test_a_row_in_the_middle_that_cannot_be_read_is_told_with_its_number(
    tmp_path: Path, told: Told
) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", None, "c"]}), file)
    problem = told("data/parquet", file)
    where = f"data.config.path: {file}, row 2: "
    assert problem.startswith(f"{where}field 'prompt' is None, neither a text")
    assert problem.rstrip().endswith("[plugin data]")


def test_a_name_on_the_hub_is_looked_for_only_where_the_hub_may_not_be_asked(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    assert told("data/hub", "org/nowhere") == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # it reads its variable once
    problem = told("data/hub", "org/nowhere")
    assert problem.startswith("data.config.path: org/nowhere") and "in the cache: " in problem
