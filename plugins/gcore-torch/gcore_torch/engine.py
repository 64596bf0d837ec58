"""Runs forward, backward and update on plain torch.

A single rank holds the model as it is. Several ranks shard it by FSDP2, over gloo on CPUs and over
NCCL on CUDA, where it has not been tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from gcore_language.alignment import align
from gcore_language.device_clock import DeviceClock
from gcore_language.model_files import open_model_files
from gcore_language.models import (
    DTYPES,
    choose_device,
    load_model,
    load_value_model,
    refuse_engine,
    save_model,
)
from gcore_language.packing import Batch, stand_in
from gcore_language.policy import Entropy, Policy, check_layouts
from gcore_language.prompts import copy_tokenizer, load_tokenizer
from gcore_language.ranks import Ranks
from gcore_language.saving import PendingSave, Staging, local_rows, save_rank
from gcore_language.state_files import MOMENTS, load_numbers, load_parts
from gcore_language.training import LossOf, keeps_reference
from gcore_language.value_training import check_value_objective, refuse_reference_of_values
from gcore_language.values import ValueModel, trains_values
from gcore_language.weights import flat_bytes, full, like, named_tensors, spec_of, to_bytes
from torch import Tensor

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import TensorSpec
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.gradients import (
    ExactGradients,
    Gradients,
    PlainGradients,
    ShardedExactGradients,
)


class TorchEngine:
    """Trains on plain torch; see ``gcore_language.training.TrainingEngine``."""

    def __init__(self, config: TorchTrainerConfig, context: WorkerContext) -> None:
        self._config = config
        self._context = context
        check_value_objective(context)
        refuse_engine(context)
        files = open_model_files(context)
        self.device = choose_device(config.device, context, config.threads)
        self.ranks = Ranks(context, self.device)
        self.clock = DeviceClock(self.device)
        self._mesh = (
            dist.init_device_mesh(self.device.type, (self.ranks.count,))
            if self.ranks.count > 1
            else None
        )
        self.sums_exactly = context.deterministic
        self._path = str(files.directory)
        self._policy = self._open(self._path)
        model = self._policy.model
        embedded = model.get_input_embeddings().weight.shape[0]
        trust = config.trust_remote_code
        self._tokenizer = load_tokenizer(
            self._path, embedded, threads=config.threads, trust_remote_code=trust
        )
        self.layouts = self._policy.layouts
        self.hidden_size = int(model.config.get_text_config().hidden_size)
        self._reference = None
        if keeps_reference(config, context):
            refuse_reference_of_values(context)
            path = open_model_files(context, config.reference_path).directory
            self._reference = self._open(str(path)).requires_grad_(False)
        self._tensors = named_tensors(model)
        self._parameters = [t for t in self._tensors.values() if t.requires_grad]
        self._optimizer = self._make_optimizer()
        self._gradients = self._add_gradients()
        self.staging = Staging()

    def _open(self, path: str) -> Policy:
        """Opens a model as a policy on this device, sharded over the ranks.

        Its layouts are tried before it is sharded.
        """
        config = self._config
        policy = self._load(path)
        model = policy.model
        if self.sums_exactly:
            align(model)
        if config.gradient_checkpointing:
            # checkpointing needs training mode, in which dropout would change log-probs
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            model.gradient_checkpointing_enable()
            model.train()
        exact = config.dtype == "float32"
        with self._autocast():
            check_layouts(
                policy,
                self.device,
                may_flat=exact and self.device.type == "cpu" and config.packing != "padded",
                tolerance=1e-4 if exact else 5e-2,
            )
        self._shard(policy, set(model._no_split_modules or ()))
        return policy

    def _load(self, path: str) -> Policy:
        """Loads a model onto this device; with a value head where the objective requires values."""
        config = self._config
        attention, trust = config.attn_implementation, config.trust_remote_code
        if trains_values(self._context):
            return ValueModel(
                load_value_model(
                    path,
                    std=config.value_head_std,
                    seed=self._context.seed,
                    attn_implementation=attention,
                    trust_remote_code=trust,
                ).to(self.device)
            )
        return Policy(
            load_model(
                path,
                dtype="float32",
                attn_implementation=attention,
                trust_remote_code=trust,
                images=True,
            ).to(self.device)
        )

    def _shard(self, policy: Policy, blocks: set[str]) -> None:
        """Shards the policy by FSDP2; does nothing for a single rank.

        blocks: names of classes. Each module of these classes is gathered by itself, the other
            parameters with the root.
        """
        if self._mesh is None:
            return
        from torch.distributed.fsdp import fully_shard

        for module in [m for m in policy.modules() if type(m).__name__ in blocks]:
            fully_shard(module, mesh=self._mesh)
        fully_shard(policy, mesh=self._mesh)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Makes AdamW (Loshchilov and Hutter, 2019); weights with one dimension have no weight
        decay.

        Its learning rate is 0 until ``update`` sets one.
        """
        config = self._config
        matrices = [p for p in self._parameters if p.dim() > 1]
        vectors = [p for p in self._parameters if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        betas = (config.betas[0], config.betas[1])
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=betas,
            eps=config.eps,
            fused=True,
        )

    def _add_gradients(self) -> Gradients:
        """Returns how gradients are added: exactly in a deterministic run."""
        if not self.sums_exactly:
            return PlainGradients(self.ranks)
        if self.ranks.count > 1:
            return ShardedExactGradients(self._policy, self.ranks, self._context.role)
        return ExactGradients(self._parameters, self.ranks)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Returns the context in which forward passes run: bfloat16 where the settings ask for
        it.
        """
        autocast: AbstractContextManager[Any] = torch.autocast(
            self.device.type, torch.bfloat16, enabled=self._config.dtype == "bfloat16"
        )
        return autocast

    def _forward(
        self, policy: Policy, batch: Batch | None, entropy: Entropy
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log-probs and entropies of a batch.

        For None it runs a stand-in, because the ranks of a sharded model must all go forward.
        """
        self._context.progress()
        with self._autocast(), self.clock.running():
            parts: tuple[Tensor, Tensor | None] = policy(
                stand_in(self.device) if batch is None else batch, entropy
            )
        return parts

    # -- a step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(
        self, batches: Sequence[Batch | None], model: Literal["policy", "reference"]
    ) -> Sequence[Tensor | None]:
        """See ``TrainingEngine.logprobs``. Raises RuntimeError when there is no reference model."""
        policy = self._policy if model == "policy" else self._reference
        if policy is None:
            raise RuntimeError("there is no reference model")
        return [self._forward(policy, batch, "none")[0] for batch in batches]

    def accumulate(self, batches: Sequence[Batch | None], loss: LossOf, entropy: Entropy) -> None:
        """See ``TrainingEngine.accumulate``.

        For a batch that is None the backward pass runs with a loss of 0, because the ranks of a
        sharded model must all go backward.
        """
        for place, batch in enumerate(batches):
            last = place == len(batches) - 1
            logp, entropies = self._forward(self._policy, batch, entropy)
            value = logp.sum() * 0.0 if batch is None else loss(batch, logp, entropies)
            with self.clock.running():
                self._gradients.expect(last=last)
                value.backward()
                self._gradients.passed(last=last)

    def update(self, rate: float, clip: float) -> float:
        """See ``TrainingEngine.update``. Returns the norm of the gradients before clipping.

        Nothing is updated when the norm is not finite.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        scale = self._gradients.scale
        norm = self._gradients.norm(gradients)
        if math.isfinite(norm):
            self.staging.wait()  # until a save in the background has its copy of the weights
            factor = scale * (min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0)
            if factor != 1:
                torch._foreach_mul_(gradients, factor)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self.discard()
        return norm

    def gradient(self) -> dict[str, Tensor]:
        """See ``ShowsGradient.gradient``."""
        named = ((name, tensor.grad) for name, tensor in self._tensors.items())
        return {name: grad for name, grad in named if grad is not None}

    def set_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        """See ``ShowsGradient.set_gradient``."""
        for name, saved in gradient.items():
            self._tensors[name].grad = saved

    def weights(self) -> Mapping[str, Tensor]:
        """See ``ShowsWeights.weights``."""
        return self._tensors

    def discard(self) -> None:
        """Drops the gradients."""
        self._gradients.discard()
        self._optimizer.zero_grad(set_to_none=True)

    # -- weights -----------------------------------------------------------------------------------

    def weight_specs(self) -> list[TensorSpec]:
        return [
            spec_of(name, tensor, DTYPES[self._config.dtype])
            for name, tensor in self._tensors.items()
        ]

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """Yields every tensor of a push with its bytes, uint8[nbytes]; ranks besides 0 yield no
        bytes.
        """
        for spec, tensor in zip(self.weight_specs(), self._tensors.values(), strict=True):
            full_tensor = full(tensor)
            yield (
                spec,
                to_bytes(full_tensor, DTYPES[self._config.dtype])
                if self.ranks.rank == 0
                else np.empty(0, np.uint8),
            )

    def export_tensors(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """See ``gcore_language.device_push.DeviceEngine``."""
        for spec, tensor in zip(self.weight_specs(), self._tensors.values(), strict=True):
            yield spec, flat_bytes(full(tensor), DTYPES[self._config.dtype])

    def save(self, directory: Path, numbers: dict[str, Any]) -> None:
        """See ``TrainingEngine.save``. Returns when all ranks have saved."""
        save_rank(directory, self.ranks, self.rows(), self._counted(numbers))
        self.ranks.wait()

    def begin_save(self, directory: Path, numbers: dict[str, Any]) -> PendingSave:
        """See ``SavingEngine.begin_save``."""
        numbers_to_save = self._counted(numbers)

        def write(rows: Mapping[str, Tensor], wrote: Callable[[], None]) -> None:
            save_rank(directory, self.ranks, rows, numbers_to_save, wrote)

        return self.staging.save(self.rows(), write, self._context.progress)

    def _counted(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """Returns the numbers and, by tensor, how many steps the optimizer has made with it."""
        steps = {
            name: float(s["step"])
            for name, t in self._tensors.items()
            if (s := self._optimizer.state.get(t))
        }
        return {**numbers, "optimizer_steps": steps}

    def rows(self) -> dict[str, Tensor]:
        """Returns what this rank saves: its rows of weights and moments.

        The keys are those of ``state_files``.
        """
        local: dict[str, Tensor | None] = {}
        for name, tensor in self._tensors.items():
            parts = {"weight": tensor} | {
                part: self._optimizer.state.get(tensor, {}).get(part) for part in MOMENTS
            }
            for part, state in parts.items():
                if state is not None:
                    local[f"{part}/{name}"] = local_rows(state, first=self.ranks.rank == 0)
        return {key: rows for key, rows in local.items() if rows is not None}

    @torch.no_grad()
    def load(self, directory: Path) -> dict[str, Any]:
        """See ``TrainingEngine.load``. Returns the numbers that were saved."""
        self.staging.wait()
        numbers = load_numbers(directory)
        steps = numbers.pop("optimizer_steps")
        self._optimizer.state.clear()  # a state from before the first update has no moments
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        for part, name, full_tensor in load_parts(directory, shapes):
            tensor = self._tensors[name]
            if part == "weight":
                tensor.copy_(like(full_tensor, tensor))
            else:
                state = self._optimizer.state[tensor]
                state["step"] = torch.tensor(float(steps[name]), device=tensor.device)
                state[part] = like(full_tensor, tensor).clone()
        return numbers

    def save_pretrained(self, directory: Path) -> None:
        """Writes the model and its tokenizer as transformers saves them; rank 0 writes."""
        directory.mkdir(parents=True, exist_ok=True)
        weights: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            full_tensor = full(tensor)
            if self.ranks.rank == 0:
                weights[name] = full_tensor
        if self.ranks.rank == 0:
            save_model(self._policy.model, directory, weights, DTYPES[self._config.dtype])
            copy_tokenizer(self._path, directory, self._tokenizer)
        self.ranks.wait()

    def close(self) -> None:
        self.ranks.close()
