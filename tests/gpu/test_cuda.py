"""What has been written for CUDA, on a GPU: each part of benchmarks/gpu.py holds its bars.

Nothing of it has been run on CUDA yet. Where there is none, each test is skipped and says why.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ("gpu", "report", "swap", "engine_overhead", "engine_pairs")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(BENCHMARKS)  # it imports what lies beside it
        yield importlib.import_module("gpu")
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("part", ["learns", "bfloat16", "ipc", "sleep", "busy", "tokens", "vllm"])
def test_a_part_holds_its_bars_on_cuda(part: str, gpu: ModuleType, tmp_path: Path) -> None:
    if reason := gpu.missing(part):
        pytest.skip(reason)
    claims = gpu.PARTS[part](gpu.Setting(device="cuda", folder=tmp_path))
    assert claims
    assert [claim for claim in claims if claim.missed] == []
