"""Weights that are exported otherwise than they are trained are named."""

from __future__ import annotations

import torch
from gcore_language.exported import diagnose_export
from gcore_language.weights import spec_of, to_bytes

NAMES = ("a", "b", "c")


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 4, generator=draw) for name in NAMES}


def exported(tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    return [(spec_of(name, t, dtype), to_bytes(t, dtype)) for name, t in tensors.items()]


def test_weights_that_are_exported_as_they_are_give_no_finding() -> None:
    held = weights()
    for dtype in (torch.float32, torch.bfloat16):
        assert diagnose_export(exported(held, dtype), held, 0.01) == []


def test_a_tensor_that_is_exported_otherwise_is_named() -> None:
    held = weights()
    (finding,) = diagnose_export(exported(held | {"b": held["b"].T.contiguous()}), held, 0.01)
    assert "in 1 of 3 tensors: b;" in finding.text and "before the last" not in finding.text


def test_weights_of_before_an_update_are_told_as_such() -> None:
    held = weights()
    before = {name: tensor - 0.009 for name, tensor in held.items()}
    (finding,) = diagnose_export(exported(before), held, 0.01)
    assert "in 3 of 3 tensors" in finding.text and "before the last one" in finding.text
    (finding,) = diagnose_export(exported(before), held, 0.001)
    assert "before the last one" not in finding.text


def test_weights_that_are_no_numbers_are_not_those_of_before_an_update() -> None:
    held = weights()
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in held.items()}
    (finding,) = diagnose_export(exported(broken), held, 0.01)
    assert "they are inf apart" in finding.text and "before the last one" not in finding.text
