"""Keeps parts of a trainer in host memory, by the ways of torch.

state        FSDP2's CPUOffloadPolicy: weights, gradients and moments
activations  ``torch.autograd.graph.save_on_cpu``: what a forward pass keeps for the backward pass

On CUDA that host memory is pinned. ``state`` has run on one GPU (the part ``offload`` of
``benchmarks/gpu.py``); no run of ``activations`` on a GPU is recorded. On a CPU device all is the
same memory: nothing is saved, and every number stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from gcore_language.policy import Policy
from torch.autograd.graph import save_on_cpu

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_torch.offload_settings import OffloadSettings


def refuse_exact_sums(settings: OffloadSettings, context: WorkerContext) -> None:
    """Raises ConfigError for a deterministic run whose state would lie in host memory."""
    if settings.state and context.deterministic:
        raise ConfigError(
            "a state in host memory does not go with a deterministic run.",
            where=f"roles.{context.role}.config.offload.state",
            why="Gradients that are added up exactly have not been tested there.",
            todo="Set it to false.",
        )


def offload_policy(device: torch.device) -> Any:
    """Returns the policy by which FSDP2 keeps a model's state in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def offload_layers(policy: Policy, device: torch.device) -> None:
    """Has a policy with checkpointed layers keep their inputs in host memory.

    Its output embedding stays out of it: that keeps the last hidden states on the device.
    """
    policy.around_layers = _keeping_on_host(device)


def _keeping_on_host(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    pins = device.type == "cuda"
    return lambda: save_on_cpu(pin_memory=pins)


def check_head(policy: Policy, role: str) -> None:
    """Raises ConfigError for a policy whose layers cannot be told from its output embedding."""
    if not policy.head_apart:
        raise ConfigError(
            "the activations of this model cannot be kept in host memory.",
            where=f"roles.{role}.config.offload.activations",
            why="Its logits are more than the output embedding of its last hidden states.",
            todo="Set it to false.",
        )
