"""Opening models: what comes with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gcore_language.tiny import save_model


def test_opening_a_model_does_not_import_scikit_learn(tmp_path: Path) -> None:
    """transformers would, for a way of generating that nothing here uses."""
    pytest.importorskip("sklearn")
    save_model(tmp_path, "llama")
    program = (
        "import sys; from gcore_language.models import load_model; "
        f"load_model({str(tmp_path)!r}, dtype='float32'); "
        "from transformers import utils; assert utils.is_sklearn_available(); "
        "print('sklearn' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "False\n", done.stderr[-2000:]
