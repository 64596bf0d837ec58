"""What has been written for CUDA, on a GPU: each part of benchmarks/gpu.py holds its bars.

Where there is no CUDA device, each test is skipped and says why.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.gpu_benchmark import MODULES, PARTS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(BENCHMARKS)  # it imports what lies beside it
        yield importlib.import_module("gpu")
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_holds_its_bars_on_cuda(part: str, gpu: ModuleType, tmp_path: Path) -> None:
    if reason := gpu.missing(part):
        pytest.skip(reason)
    claims = gpu.PARTS[part](gpu.Setting(device="cuda", folder=tmp_path))
    assert claims
    assert [claim for claim in claims if claim.missed] == []
