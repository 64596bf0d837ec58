"""Opening models: what comes with it."""

from __future__ import annotations

import os

import pytest
import torch
from gcore_language.models import choose_device
from gcore_language.packing import counts_of

from gcore_core.contract.context import WorkerContext


def test_a_deterministic_run_on_cuda_has_torch_repeat_and_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for CUDA; on a GPU benchmarks/gpu.py compares the hashes of two runs."""
    told: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", told.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_mem_efficient_sdp", lambda on: None)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    for deterministic in (False, True):
        context = WorkerContext(role="policy", deterministic=deterministic, devices=(1,))
        assert choose_device("auto", context, 1) == torch.device("cuda", 1)
        assert told == [True] * deterministic
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == deterministic
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


def test_numbers_are_counted_as_bincount_does() -> None:
    numbers = torch.tensor([3, 0, 3, 1])
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    assert counts_of(numbers, 5).tolist() == torch.bincount(numbers, minlength=5).tolist()
    assert counts_of(numbers, 5, weights).tolist() == [1.0, 4.0, 0.0, 2.5, 0.0]
