"""Reaches into DeepSpeed's ZeRO optimizers where DeepSpeed has no function for it.

That is how gradients are discarded, how weights and moments are read and set, and what lies in
memory from step to step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from gcore_language.state_files import MOMENTS
from torch import Tensor


def discard_gradient(zero: Any, stage: int) -> None:
    """Forgets the gradients that backward passes have left in a ZeRO optimizer.

    It resets what the optimizer's own step resets.
    """
    zero.zero_grad(set_to_none=True)
    offloaded = zero.offload_optimizer if stage == 3 else zero.cpu_offload
    if offloaded:
        zero.reset_cpu_buffers()
    if stage == 3:
        zero._offload_boundary_param_ids = set()
        return  # the next backward pass overwrites the partitions
    zero.micro_step_id = -1
    if offloaded:
        zero._offload_accumulated_param_ids = set()
    for gradients in (zero.averaged_gradients, zero.all_grad_tensors):
        for group in gradients:
            gradients[group] = None


def rows_of(parameter: Tensor) -> Iterator[Tensor]:
    """Yields what this rank holds of a parameter: as it is now, and its parts with stage 3."""
    yield parameter
    for part in ("ds_tensor", "ds_secondary_tensor"):
        held = getattr(parameter, part, None)
        if held is not None:
            yield held


def scratch_of(zero: Any, stage: int) -> Iterator[Tensor]:
    """Yields the buffers of a ZeRO optimizer whose numbers no later backward pass needs."""
    offloaded = zero.offload_optimizer if stage == 3 else zero.cpu_offload
    if stage == 3:
        yield zero.grad_partitions_flat_buffer
        buckets = [bucket.buffer for bucket in zero.ipg_buckets.values()]
        yield from (buffer for buffer in buckets if buffer is not None)
    elif offloaded:
        yield zero.temp_grad_buffer_for_cpu_offload
        yield zero.temp_grad_buffer_for_gpu_offload
        yield from zero.accumulated_grads_in_cpu.values()
    if offloaded:
        yield from (flat.grad for flat in partitions(zero, stage) if flat.grad is not None)


def partitions(zero: Any, stage: int) -> list[Tensor]:
    """Returns this rank's flat float32 partition of every parameter group."""
    return list(
        zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    )


class OptimizerState:
    """Weights and AdamW's moments of a ZeRO optimizer, as whole float32 tensors.

    Each rank holds one flat partition of every parameter group, and AdamW counts steps once for
    each partition.

    stage: ZeRO's stage.
    tensors: Hugging Face name -> the model's tensor.
    shapes: Hugging Face name -> shape of the whole tensor.
    """

    def __init__(self, zero: Any, stage: int, tensors: Mapping[str, Tensor]) -> None:
        self._zero = zero
        self.stage = stage
        self.tensors = tensors
        # a tensor that stage 3 has shared out is empty here; ds_shape is the shape of the whole
        self.shapes = {name: tuple(getattr(t, "ds_shape", t.shape)) for name, t in tensors.items()}

    @property
    def steps(self) -> int:
        """How many steps AdamW has made."""
        return max(
            (int(state.get("step", 0)) for state in self._zero.optimizer.state.values()), default=0
        )

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yields ("part/name", whole tensor), one at a time; every rank must iterate.

        There are no moments before the first step.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        moments = MOMENTS if self.steps else ()
        if moments:
            self._link()
        for name, tensor in self.tensors.items():
            if not tensor.requires_grad:
                yield f"weight/{name}", tensor
                continue
            yield f"weight/{name}", safe_get_full_fp32_param(tensor)
            yield from (
                (f"{part}/{name}", safe_get_full_optimizer_state(tensor, part)) for part in moments
            )

    @torch.no_grad()
    def set(self, part: str, name: str, whole: Tensor) -> None:
        """Sets a weight or a moment; every rank calls it with the whole tensor.

        ``prepare`` must have been called before.

        part: "weight", or the name of a moment.
        """
        import deepspeed

        tensor = self.tensors[name]
        whole = whole.to(tensor.device, tensor.dtype)
        if part == "weight":
            with deepspeed.zero.GatheredParameters(
                [tensor], modifier_rank=0, enabled=self.stage == 3
            ):
                tensor.copy_(whole)
        if tensor.requires_grad:
            self._set_master(tensor, whole, "" if part == "weight" else part)

    def _set_master(self, tensor: Tensor, whole: Tensor, moment: str) -> None:
        """Sets the optimizer's own float32 weights, or a moment.

        moment: name of the moment; empty for the weights.
        """
        if self.stage < 3:
            # what deepspeed.utils.safe_set_full_... calls
            tensor.set_full_hp_param(whole, moment or None)
            return
        # The last rank's part may be padded, for which safe_set_full_... fails: so pad the tensor
        # to whole parts and set this rank's.
        size = tensor.ds_tensor.numel()
        padded = torch.nn.functional.pad(
            whole.flatten(), (0, size * dist.get_world_size() - whole.numel())
        )
        partition = padded.narrow(0, size * dist.get_rank(), size)
        self._zero.set_local_hp_param(partition, tensor, moment or None)

    def prepare(self, steps: int) -> None:
        """Makes moments of zeros that count this many steps; for 0 that is a new optimizer."""
        state = self._zero.optimizer.state
        state.clear()
        for flat in partitions(self._zero, self.stage):
            state[flat] = {name: torch.zeros_like(flat) for name in MOMENTS}
            state[flat]["step"] = torch.tensor(float(steps), device=flat.device)
        self._link()

    def _link(self) -> None:
        """Makes stages 1 and 2 look up the moments of every parameter.

        By themselves they look after the first step of the first parameter group, when the other
        groups have no moments yet.
        """
        if self.stage < 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def held(self) -> Iterator[Tensor]:
        """Yields what this rank holds: its flat partitions of weights and moments."""
        yield from partitions(self._zero, self.stage)
        for state in self._zero.optimizer.state.values():
            yield from (state[part] for part in MOMENTS if part in state)
