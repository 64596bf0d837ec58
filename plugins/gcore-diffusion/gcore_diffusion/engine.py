"""Forward, backward and update of a denoiser; see ``gcore_language.training.TrainingEngine``."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from gcore_language.device_clock import DeviceClock
from gcore_language.models import DTYPES, choose_device, refuse_engine
from gcore_language.packing import Batch, Layout
from gcore_language.policy import Entropy
from gcore_language.ranks import Ranks
from gcore_language.state_files import MOMENTS, load_numbers, load_parts, save_state
from gcore_language.training import LossOf
from gcore_language.weights import spec_of, to_bytes
from torch import Tensor, nn

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import TensorSpec
from gcore_diffusion.config import DiffusionTrainerConfig
from gcore_diffusion.kernel import Kernel, divergence, entropy, log_prob
from gcore_diffusion.models import Denoiser, autocast, open_denoiser, pushed_tensors
from gcore_diffusion.rows import Rows

Model = Literal["policy", "reference"]


class DiffusionEngine:
    """One rank's denoiser, its reference and its optimizer.

    Every rank holds the whole model; gradients are summed over the ranks.

    kernel: the transitions' kernel; set when the first records tell how they were sampled.
    """

    sums_exactly = False
    layouts: frozenset[Layout] = frozenset({"padded"})
    hidden_size = 1
    kernel: Kernel

    def __init__(self, config: DiffusionTrainerConfig, context: WorkerContext) -> None:
        refuse_engine(context)
        self._config = config
        self._context = context
        self.device = choose_device(config.device, context, config.threads)
        self.ranks = Ranks(context, self.device)
        self.clock = DeviceClock(self.device)
        self.denoiser: Denoiser = open_denoiser(config, context, self.device, sampling=False)
        self._tensors = pushed_tensors(self.denoiser.module, config)
        self._parameters = [t for t in self._tensors.values() if t.requires_grad]
        self._reference = self._make_reference()
        self._optimizer = self._make_optimizer()

    def _make_reference(self) -> nn.Module | None:
        """Returns a frozen copy of the model.

        None without a reference, and with LoRA, where the reference is the model with its adapters
        switched off.
        """
        if not self._config.reference or self._config.lora.rank:
            return None
        return copy.deepcopy(self.denoiser.module).requires_grad_(False)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self._config
        groups = [
            {
                "params": [p for p in self._parameters if p.dim() > 1],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in self._parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        betas = (config.betas[0], config.betas[1])
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=betas,
            eps=config.eps,
            fused=True,
        )

    # -- forward -----------------------------------------------------------------------------------

    def _output(self, rows: Rows, part: slice, model: Model) -> Tensor:
        """Runs the policy or the reference on some rows; float32[rows, *D]."""
        self._context.progress()
        denoiser = self.denoiser
        guidance = self._config.guidance
        # recorded rows hold the model's time input; rows of the forward process hold noise levels
        times = rows.times[part] if rows.levels is not None else denoiser.time_of(rows.times[part])
        with autocast(self._config, self.device):
            if model == "policy":
                return denoiser.output(
                    rows.x[part], times, rows.conditions_of(part), guidance
                ).float()
            with _as_reference(denoiser, self._reference):
                return denoiser.output(
                    rows.x[part], times, rows.conditions_of(part), guidance
                ).float()

    def _moments(self, rows: Rows, part: slice, output: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation of some rows' transitions."""
        if rows.levels is None:
            raise RuntimeError("rows of the forward process have no transition")
        return self.kernel.moments(output, rows.x[part], rows.levels.part(part))

    def _logp(self, rows: Rows, part: slice, output: Tensor) -> Tensor:
        """Returns a log-prob for each row, float32[rows], mean over dimensions.

        For a forward-process objective this is minus the squared error of the output.
        """
        if rows.levels is None:
            return -squared(output - rows.following[part])
        return log_prob(rows.following[part], *self._moments(rows, part, output))

    def _parts(self, rows: Rows) -> list[slice]:
        """Splits rows into parts of at most ``budget_rows``."""
        size = self._config.budget_rows
        return [slice(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]

    @torch.no_grad()
    def logprobs(self, batches: Sequence[Any], model: Model) -> Sequence[Tensor | None]:
        """See ``TrainingEngine.logprobs``.

        For a forward-process objective the policy's outputs are kept in ``rows.old``, and its
        log-probs as the rollout's: no sampler has computed them.
        """
        answers: list[Tensor | None] = []
        for rows in batches:
            if rows is None:
                answers.append(None)
                continue
            is_old = rows.levels is None and model == "policy"
            logp_parts = []
            outputs = []
            for part in self._parts(rows):
                output = self._output(rows, part, model)
                logp_parts.append(self._logp(rows, part, output))
                outputs += [output] if is_old else []
            logp = torch.cat(logp_parts)
            answers.append(logp)
            if is_old:
                rows.old = torch.cat(outputs)
                rows.columns["rollout_logp"] = logp
        return answers

    @torch.no_grad()
    def reference_means(self, rows: Rows) -> None:
        """Fills ``rows.reference`` unless it is filled, so that each step computes it once.

        It holds the mean of each transition, or for a forward-process objective the output.
        """
        if rows.reference is None:
            parts = []
            for part in self._parts(rows):
                output = self._output(rows, part, "reference")
                parts.append(
                    output if rows.levels is None else self._moments(rows, part, output)[0]
                )
            rows.reference = torch.cat(parts)

    def _read(self, rows: Rows, part: slice) -> dict[str, Tensor]:
        """Computes what the objective reads of some rows, float32[rows] each, with gradient.

        logp: see ``_logp``.
        kl: KL to the reference; absent without a reference.
        error: squared error of the output; for a forward-process objective only.
        cross: mean product of the old and the new output's errors; likewise.
        """
        output = self._output(rows, part, "policy")
        terms = {"logp": self._logp(rows, part, output)}
        if rows.levels is None:
            if rows.old is None:
                raise RuntimeError("the old policy's outputs are not known")
            target = rows.following[part]
            terms["error"] = squared(output - target)
            terms["cross"] = ((rows.old[part] - target) * (output - target)).flatten(1).mean(1)
            if rows.reference is not None:
                terms["kl"] = squared(output - rows.reference[part])
        elif rows.reference is not None:
            mean, std = self._moments(rows, part, output)
            terms["kl"] = divergence(mean, rows.reference[part], std)
        return terms

    # -- backward ----------------------------------------------------------------------------------

    def accumulate(self, batches: Sequence[Any], loss: LossOf, entropy: Entropy) -> None:
        """See ``TrainingEngine.accumulate``.

        What an objective reads besides log-probs is put into the columns.
        """
        for rows in batches:
            if rows is None:
                continue
            with self.clock.running():
                self._accumulate(rows, loss)

    def _accumulate(self, rows: Rows, loss: LossOf) -> None:
        if self._config.reference:
            self.reference_means(rows)
        if rows.levels is None and rows.old is None:
            self.logprobs([rows], "policy")
        parts = self._parts(rows)
        if len(parts) == 1:
            self._loss(rows, self._read(rows, parts[0]), loss).backward()
        else:
            self._in_parts(rows, parts, loss)

    def _in_parts(self, rows: Rows, parts: Sequence[slice], loss: LossOf) -> None:
        """Adds the gradient of rows that are too many for one forward pass.

        The loss of all rows needs all their log-probs. So a first forward pass without a graph
        computes these, the loss is differentiated with respect to them, and a second forward pass
        takes each part's share of that gradient back to the weights.
        """
        with torch.no_grad():
            part_terms = [self._read(rows, part) for part in parts]
        leaves = {
            name: torch.cat([terms[name] for terms in part_terms]).requires_grad_()
            for name in part_terms[0]
        }
        self._loss(rows, leaves, loss).backward()
        for part in parts:
            live = self._read(rows, part)
            names = [name for name in live if leaves[name].grad is not None]
            torch.autograd.backward(
                [live[name] for name in names], [leaves[name].grad[part] for name in names]
            )

    def _loss(self, rows: Rows, terms: dict[str, Tensor], loss: LossOf) -> Tensor:
        """Computes the loss; what ``_read`` returned is among the columns meanwhile.

        The columns are put back afterwards.
        """
        columns = dict(rows.columns)
        rows.columns |= {name: tensor for name, tensor in terms.items() if name != "logp"}
        if "error" in terms and rows.old is not None:
            rows.columns["old_error"] = squared(rows.old - rows.following)
        # Rows stand for a batch of tokens: the loss reads index and columns alone.
        batch = cast("Batch", rows)
        loss_sum: Tensor = loss(batch, terms["logp"], self.entropies(rows))
        # the training program adds old_logp to the columns, and needs it later
        columns |= {name: rows.columns[name] for name in ("old_logp",) if name in rows.columns}
        rows.columns = columns
        return loss_sum

    @torch.no_grad()
    def entropies(self, rows: Rows) -> Tensor:
        """Returns the entropy of each row's transition, float32[R]; zeros for the forward process.

        It depends on no weight, so any output will do.
        """
        if rows.levels is None:
            return torch.zeros_like(rows.times)
        return entropy(
            self.kernel.moments(torch.zeros_like(rows.x), rows.x, rows.levels)[1], rows.x
        )

    def update(self, rate: float, clip: float) -> float:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self.ranks.count > 1:
            for parameter in self._parameters:
                parameter.grad = (
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
                dist.all_reduce(parameter.grad)
            gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if math.isfinite(norm) and gradients:
            if clip > 0 and norm > clip:
                torch._foreach_mul_(gradients, clip / (norm + 1e-6))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self.discard()
        return norm

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def move_reference(self) -> None:
        """One step of the reference that is a moving average."""
        decay = self._config.reference_decay
        if self._reference is not None and decay < 1:
            for mean, weight in zip(
                self._reference.parameters(), self.denoiser.module.parameters(), strict=True
            ):
                mean.lerp_(weight, 1 - decay)

    # -- weights -----------------------------------------------------------------------------------

    def weight_specs(self) -> list[TensorSpec]:
        return [spec_of(name, tensor, DTYPES["float32"]) for name, tensor in self._tensors.items()]

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        for spec, tensor in zip(self.weight_specs(), self._tensors.values(), strict=True):
            yield (
                spec,
                to_bytes(tensor, DTYPES["float32"])
                if self.ranks.rank == 0
                else np.empty(0, np.uint8),
            )

    def save(self, directory: Path, numbers: dict[str, Any]) -> None:
        steps = {
            name: float(s["step"])
            for name, t in self._tensors.items()
            if (s := self._optimizer.state.get(t))
        }
        try:
            save_state(
                directory,
                self._saved(),
                {**numbers, "optimizer_steps": steps},
                writes=self.ranks.rank == 0,
            )
        finally:  # a save that failed does not end a run
            self.ranks.wait()

    def _saved(self) -> Iterator[tuple[str, Tensor]]:
        reference = dict(self._reference.state_dict()) if self._reference is not None else {}
        for name, tensor in self._tensors.items():
            state = self._optimizer.state.get(tensor, {})
            yield f"weight/{name}", tensor
            yield from ((f"{part}/{name}", state[part]) for part in MOMENTS if part in state)
            if name in reference:
                yield f"reference/{name}", reference[name]

    @torch.no_grad()
    def load(self, directory: Path) -> dict[str, Any]:
        numbers = load_numbers(directory)
        steps = numbers.pop("optimizer_steps")
        self._optimizer.state.clear()  # a state from before the first update has no moments
        reference = self._reference.state_dict() if self._reference is not None else {}
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        for part, name, whole in load_parts(directory, shapes):
            tensor = self._tensors[name]
            if part == "weight":
                tensor.copy_(whole)
            elif part == "reference":
                if name in reference:  # a run may go on without the reference that it had
                    reference[name].copy_(whole)
            else:
                state = self._optimizer.state[tensor]
                state["step"] = torch.tensor(float(steps[name]), device=tensor.device)
                state[part] = whole.to(tensor.device).clone()
        return numbers

    def save_pretrained(self, directory: Path) -> None:
        try:
            if self.ranks.rank == 0:
                self.denoiser.save(directory)
        finally:  # a disk that is full does not end a run
            self.ranks.wait()

    def close(self) -> None:
        self.denoiser.close()
        self.ranks.close()


@contextmanager
def _as_reference(denoiser: Denoiser, reference: nn.Module | None) -> Iterator[None]:
    """Makes the denoiser compute the reference's outputs within the ``with`` block.

    reference: the module to use; None switches off the adapters of the denoiser's own.
    """
    policy: Any = denoiser.module
    if reference is None:
        policy.disable_adapters()
    else:
        denoiser.module = reference
    try:
        yield
    finally:
        denoiser.module = policy
        if reference is None:
            policy.enable_adapters()


def squared(difference: Tensor) -> Tensor:
    """Returns the mean over dimensions of the squared difference, float32[R]."""
    return (difference**2).flatten(1).mean(1)
