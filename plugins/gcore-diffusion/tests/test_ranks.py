"""Several slots hold the model each and train as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file


def test_two_ranks_train_as_one(kit: Any, tiny_dir: Path, tmp_path: Path) -> None:
    """Unequal shares of the records: the same metrics and weights."""
    (tmp_path / "meet").mkdir()
    records = kit.records_of(kit.sampled(kit.make_generator(tiny_dir), kit.make_requests(4, 3)))
    held = {
        f"{i}/{name}": np.array(array, copy=True)
        for i, record in enumerate(records)
        for name, array in {**record.columns, **record.media}.items()
    }
    save_file(held, tmp_path / "records.safetensors")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    for ranks in (1, 2):
        command = [sys.executable, str(Path(__file__).with_name("two_ranks.py"))]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), str(tiny_dir), str(tmp_path)], env=environment, stderr=subprocess.PIPE
            )
            for rank in range(ranks)
        ]
        try:
            errors = [process.communicate(timeout=200)[1].decode()[-3000:] for process in processes]
            assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)
        finally:
            for process in processes:
                process.kill()
    one, two = (json.loads((tmp_path / f"metrics-{ranks}.json").read_text()) for ranks in (1, 2))
    for alone, together in zip(one, two, strict=True):
        told = {name: value for name, value in alone.items() if name not in ("diversity", "replay_gap")}
        assert told == pytest.approx({name: together[name] for name in told}, rel=1e-3, abs=1e-6)
    alone, together = (load_file(tmp_path / f"weights-{ranks}.safetensors") for ranks in (1, 2))
    for name, values in alone.items():
        np.testing.assert_allclose(values, together[name], atol=1e-5, err_msg=name)
