"""The notebook of the tutorials runs from its first cell to its last, and learns."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import REPOSITORY

NOTEBOOK = Path("docs/tutorials/notebook.ipynb")
PATIENCE_S = 1200


def outputs(notebook: Any) -> list[dict[str, Any]]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def texts(notebook: Any) -> str:
    """All that the notebook shows as text."""
    shown = [output.get("text", "") for output in outputs(notebook)]
    shown += [output.get("data", {}).get("text/plain", "") for output in outputs(notebook)]
    return "\n".join(shown)


def test_the_stored_output_is_of_a_run_that_ended_and_names_no_place() -> None:
    nbformat = pytest.importorskip("nbformat")
    stored = nbformat.read(REPOSITORY / NOTEBOOK, as_version=4)
    cells = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert any("image/png" in output.get("data", {}) for output in outputs(stored))
    assert "step 60/60" in texts(stored) and "weights_sha256" in texts(stored)
    assert "/tmp" not in texts(stored) and "/home" not in texts(stored)
    assert not [output for output in outputs(stored) if output.output_type == "error"]


@pytest.mark.slow
def test_the_notebook_of_the_tutorials_trains_plots_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    folder = tmp_path / NOTEBOOK.parent
    folder.mkdir(parents=True)
    shutil.copytree(REPOSITORY / "recipes", tmp_path / "recipes")
    notebook = nbformat.read(REPOSITORY / NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    check = nbformat.v4.new_code_cell(
        "first, *_, last = run.metrics['evaluation/greedy/right'].dropna()\nfirst, last"
    )
    notebook.cells.append(check)
    nbclient.NotebookClient(
        notebook,
        timeout=PATIENCE_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    assert "step 60/60" in texts(notebook)
    first, last = eval(notebook.cells[-1].outputs[0]["data"]["text/plain"])  # noqa: S307
    assert first < 0.5 < last
