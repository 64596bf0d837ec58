"""The provider ``torch`` of kind trainer: AdamW on a Hugging Face causal language model.

One rank holds the model as it is; several share it by FSDP2 over gloo (CPU) or NCCL (CUDA; not tested there).

The gradient of an update is sum(loss_sum) / sum(weight_sum) over all its micro-batches and ranks, whatever their
number: each micro-batch adds its unnormalised gradient, and the sum is divided once.

Metrics ``logprob_gap_max`` and ``logprob_gap_mean`` compare rollout and trainer log-probs where both have the same
weights: over the first minibatch of a step, and over the others too when the objective requires ``old_logp``.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcore_core.errors import ConfigError, NonFiniteLoss
from gcore_core.protocols import TrainRecord, WorkerContext
from gcore_core.records import TensorSpec
from gcore_torch import checkpoint
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.model import DTYPES, choose_device, load_model, load_tokenizer, model_path
from gcore_torch.packing import (
    FLAT_ROW_TOKENS,
    Batch,
    Layout,
    Sample,
    cheapest_layout,
    micro_batches,
    stand_in,
)
from gcore_torch.policy import Entropy, Policy, check_layouts
from gcore_torch.progress import Progress
from gcore_torch.ranks import Ranks
from gcore_torch.schedule import rate_at
from gcore_torch.weights import full, named_tensors, spec_of, to_bytes

#: What an objective may require.
_SUPPLIED = frozenset({"old_logp", "ref_logp", "entropy"})
#: Scalar -> per-action term of d = logp - ref_logp (Schulman 2020, "Approximating KL divergence").
_SCALARS = {
    "kl_k1": lambda d: d,
    "kl_k2": lambda d: d * d / 2,
    "kl_k3": lambda d: torch.exp(-d) - 1 + d,
}


@dataclass(kw_only=True)
class _Prepared:
    """The records of a step. minibatches: the micro-batches of each, padded with None to one number on every rank.

    Log-probs and advantages join the columns of the micro-batches as they become known.
    """

    records: Sequence[TrainRecord]
    minibatches: list[list[Batch | None]]
    has_old_logp: bool = False

    def all(self, first: int = 0) -> list[Batch | None]:
        return [batch for part in self.minibatches[first:] for batch in part]


class TorchTrainer:
    """One data-parallel rank of a policy; see ``gcore_core.protocols.Trainer``."""

    def __init__(self, config: TorchTrainerConfig, context: WorkerContext) -> None:
        self.version = 0
        self._config, self._context = config, context
        self._objective = context.parts["objective"]
        self._check_requirements()
        self._device = choose_device(config.device, context, config.threads)
        self._path = model_path(context)
        self._ranks = Ranks(context, self._device)
        self._policy = self._open(self._path)
        trust = config.trust_remote_code
        self._tokenizer = load_tokenizer(self._path, self._policy.model, trust_remote_code=trust)
        self._layouts = self._allowed_layouts()
        self._reference = self._open(config.reference_path or self._path) if self._keeps_reference() else None
        if self._reference is not None:
            self._reference.requires_grad_(False)
        self._tensors = named_tensors(self._policy.model)
        self._parameters = [t for t in self._tensors.values() if t.requires_grad]
        self._optimizer = self._make_optimizer()
        self._updates = 0
        self._prepared: _Prepared | None = None

    # -- opening ------------------------------------------------------------------------------------------------------

    def _check_requirements(self) -> None:
        unknown = sorted(frozenset(self._objective.requires) - _SUPPLIED)
        if unknown:
            raise ConfigError(
                f"the objective requires {', '.join(unknown)}, which this trainer does not compute.",
                where=f"roles.{self._context.role}.use",
                why=f"It computes {', '.join(sorted(_SUPPLIED))}.",
            )

    def _keeps_reference(self) -> bool:
        config = self._config
        return config.reference or bool(config.reference_path) or "ref_logp" in self._objective.requires

    def _open(self, path: str) -> Policy:
        config = self._config
        model = load_model(
            path,
            dtype="float32",
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        ).to(self._device)
        if config.gradient_checkpointing:
            for module in model.modules():  # checkpointing needs training mode, in which dropout would change log-probs
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            model.gradient_checkpointing_enable()
            model.train()
        policy = Policy(model)
        exact = config.dtype == "float32"
        with self._autocast():
            check_layouts(
                policy,
                self._device,
                may_flat=exact and self._device.type == "cpu" and config.packing != "padded",
                tolerance=1e-4 if exact else 5e-2,
            )
        self._ranks.shard(policy, set(model._no_split_modules or ()))
        return policy

    def _allowed_layouts(self) -> frozenset[Layout]:
        found, packing = self._policy.layouts, self._config.packing
        if packing == "padded":
            return frozenset({"padded"})
        if packing == "auto":
            return found
        if found == {"padded"}:
            raise ConfigError(
                "packing: shared_prompt does not give this model's log-probs.",
                where=f"roles.{self._context.role}.config.packing",
                why="Its positions or attention windows ignore position_ids or a 4-D mask.",
                todo="Use packing: auto or padded.",
            )
        return found - {"padded"}

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self._config
        matrices = [p for p in self._parameters if p.dim() > 1]
        vectors = [p for p in self._parameters if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        betas = (config.betas[0], config.betas[1])
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=config.eps, fused=True
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.dtype == "bfloat16")

    # -- preparation --------------------------------------------------------------------------------------------------

    def prepare(self, records: Sequence[TrainRecord], scalars: frozenset[str]) -> list[dict[str, float]]:
        """See ``Trainer.prepare``; scalars: kl_k1, kl_k2, kl_k3, each summed over a record's trained actions."""
        unknown = sorted(scalars - _SCALARS.keys())
        if unknown:
            raise ConfigError(
                f"no preparation scalar named {', '.join(unknown)}.",
                where=f"roles.{self._context.role}.use",
                why=f"This trainer computes {', '.join(_SCALARS)}.",
            )
        if scalars and self._reference is None:
            raise ConfigError(
                f"{', '.join(sorted(scalars))} need a reference model.",
                where=f"roles.{self._context.role}.config.reference",
                todo="Set it to true.",
            )
        self._prepared = prepared = self._pack(records)
        if self._reference is not None and (scalars or "ref_logp" in self._objective.requires):
            self._fill(prepared.all(), "ref_logp", self._reference)
        found: list[dict[str, float]] = [dict.fromkeys(scalars, 0.0) for _ in records]
        if scalars:
            self._fill(prepared.all(), "old_logp", self._policy)
            prepared.has_old_logp = True
            for batch in filter(None, prepared.all()):
                for name in scalars:
                    for place, value in zip(batch.index.tolist(), _sum_terms(batch, name), strict=True):
                        found[place][name] = value
        return found

    def _pack(self, records: Sequence[TrainRecord]) -> _Prepared:
        parts: list[list[Sample]] = []
        for index, record in enumerate(records):
            while len(parts) <= record.minibatch:
                parts.append([])
            if len(record.columns.get("action_ids", ())):  # a record without actions teaches nothing
                prompt = record.columns["prompt_ids"]
                parts[record.minibatch].append(
                    Sample(index=index, ordinal=record.ordinal, prompt=prompt, columns=record.columns)
                )
        layout = self._layout([sample for part in parts for sample in part])
        budget = self._config.budget_tokens
        batches: list[list[Batch | None]] = [list(micro_batches(p, layout, budget, self._device)) for p in parts]
        minibatches = int(self._ranks.max([len(batches)])[0])
        batches += [[] for _ in range(minibatches - len(batches))]
        for batch, count in zip(batches, self._ranks.max([len(batch) for batch in batches]), strict=True):
            batch += [None] * (int(count) - len(batch))
        return _Prepared(records=records, minibatches=batches)

    def _layout(self, samples: Sequence[Sample]) -> Layout:
        if not samples:
            return "padded"
        longest = max(len(s.prompt) for s in samples) + max(s.fed for s in samples)
        if "flat" in self._layouts and longest <= FLAT_ROW_TOKENS:
            return "flat"
        if self._layouts >= {"shared", "padded"}:
            return cheapest_layout(samples, int(self._policy.model.config.get_text_config().hidden_size))
        return "shared" if "shared" in self._layouts else "padded"

    @torch.no_grad()
    def _fill(self, batches: Sequence[Batch | None], name: str, policy: Policy) -> None:
        for batch in batches:
            logp = self._forward(policy, batch, "none")[0]
            if batch is not None:
                batch.columns[name] = logp

    def _forward(self, policy: Policy, batch: Batch | None, entropy: Entropy) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies; for None those of a stand-in, because sharded ranks must all go forward."""
        self._context.progress()
        with self._autocast():
            return policy(stand_in(self._device) if batch is None else batch, entropy)

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, step: int, advantages: np.ndarray, minibatches: int, epochs: int) -> dict[str, float]:
        """See ``Trainer.train``. Besides the promised metrics gives those of the objective, actions and updates.

        ``kl``, unless the objective gives one, is the k3 estimate of KL(rollout policy, current policy).
        """
        prepared = self._prepared
        if prepared is None or len(advantages) != len(prepared.records):
            count = "none" if prepared is None else str(len(prepared.records))
            raise ValueError(f"{len(advantages)} advantages for {count} prepared records")
        progress = Progress(step=step)
        for batch in filter(None, prepared.all()):
            by_record = torch.from_numpy(advantages[batch.index].astype(np.float32)).to(self._device)
            batch.columns["advantage"] = by_record[batch.columns["record"]]
        if "old_logp" in self._objective.requires:
            # the first minibatch needs no pass of its own: its first update starts from these very weights
            if not prepared.has_old_logp:
                self._fill(prepared.all(first=1), "old_logp", self._policy)
            for batch in filter(None, prepared.all(first=1)):
                progress.compare(batch.columns["old_logp"], batch)
        for epoch in range(epochs):
            for minibatch in range(minibatches):
                part = prepared.minibatches[minibatch] if minibatch < len(prepared.minibatches) else []
                self._update(prepared, part, progress, first=epoch == 0 and minibatch == 0)
        self._prepared = None
        self.version = step + 1
        return progress.metrics(self._ranks.add_up(progress.sums), self._ranks.max([progress.gap])[0])

    def _update(self, prepared: _Prepared, part: Sequence[Batch | None], progress: Progress, *, first: bool) -> None:
        rate = rate_at(self._config, self._updates, self._context.steps * self._context.updates_per_step)
        self._optimizer.zero_grad(set_to_none=True)
        own_loss = own_weight = 0.0
        broken: list[Batch | None] = []
        for batch in part:
            batch_loss, batch_weight = self._backward(batch, progress, first=first)
            own_loss, own_weight = own_loss + batch_loss, own_weight + batch_weight
            if not math.isfinite(batch_loss):
                broken.append(batch)
        loss, weight = self._ranks.sum([own_loss, own_weight])
        norm = self._scale_gradients(weight) if weight > 0 else 0.0
        if not math.isfinite(loss):
            raise self._not_finite(prepared, broken, progress, f"loss {loss}")
        if not math.isfinite(norm):
            raise self._not_finite(prepared, part, progress, f"gradient norm {norm}")
        if weight > 0:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._updates += 1
        progress.updated(loss / weight if weight > 0 else 0.0, norm, rate)

    def _backward(self, batch: Batch | None, progress: Progress, *, first: bool) -> tuple[float, float]:
        """Adds the gradient of one micro-batch's loss_sum; returns loss_sum and weight_sum."""
        entropy: Entropy = "gradient" if "entropy" in self._objective.requires else "metric"
        logp, entropies = self._forward(self._policy, batch, entropy)
        if batch is None:
            (logp.sum() * 0.0).backward()
            return 0.0, 0.0
        if first:
            progress.compare(logp.detach(), batch)
            batch.columns.setdefault("old_logp", logp.detach())
        current = {"logp": logp} | ({"entropy": entropies} if entropy == "gradient" else {})
        loss, weight, metrics = self._objective.loss(batch.columns, current)
        loss.backward()
        progress.observe(logp.detach(), entropies.detach(), batch, metrics)
        return float(loss.detach()), float(weight)

    def _scale_gradients(self, weight: float) -> float:
        """Makes summed gradients those of the normalised loss, clips them, and returns their norm before clipping."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        scale = self._ranks.count / weight  # FSDP2 has averaged over the ranks; the rule says sum
        norm = scale * float(full(torch.nn.utils.get_total_norm(gradients)))
        if not math.isfinite(norm):
            return norm
        limit = self._config.clip_grad_norm
        clip = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        torch._foreach_mul_(gradients, scale * clip)
        return norm

    def _not_finite(
        self, prepared: _Prepared, batches: Sequence[Batch | None], progress: Progress, what: str
    ) -> NonFiniteLoss:
        """Writes the columns of the batches to a file and names it in the error."""
        from safetensors.numpy import save_file

        rank, update = self._context.rank, len(progress.rates)
        directory = Path(self._config.dump_dir or self._context.directory)
        path = directory / f"nonfinite-step{progress.step}-update{update}-rank{rank}.safetensors"
        arrays: dict[str, np.ndarray] = {}
        for batch in batches:
            for index in [] if batch is None else batch.index.tolist():
                record = prepared.records[index]
                for name, column in record.columns.items():
                    arrays[f"{record.ordinal}/{record.sample}/{name}"] = np.ascontiguousarray(column)
        if arrays:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(arrays, path)
        return NonFiniteLoss(
            f"{what} in update {update} of step {progress.step}, rank {rank}.",
            where=f"roles.{self._context.role}",
            why=f"The records that led to it are in {path}." if arrays else "This rank had no part in it.",
            todo="Look for infinite log-probs or advantages there, or lower learning_rate.",
            step=progress.step,
            rank=rank,
            update=update,
            file=str(path) if arrays else "",
        )

    # -- weights ------------------------------------------------------------------------------------------------------

    def weight_specs(self) -> list[TensorSpec]:
        return [spec_of(name, tensor, DTYPES[self._config.dtype]) for name, tensor in self._tensors.items()]

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """Weights by Hugging Face name; an array is a view of live memory on one CPU rank, valid until ``train``."""
        for spec, tensor in zip(self.weight_specs(), self._tensors.values(), strict=True):
            whole = full(tensor)
            yield spec, to_bytes(whole, DTYPES[self._config.dtype]) if self._ranks.rank == 0 else np.empty(0, np.uint8)

    def save(self, directory: Path) -> None:
        """Safetensors of whole float32 weights and moments, and JSON."""
        numbers = {"version": self.version, "updates": self._updates}
        checkpoint.save_state(directory, self._tensors, self._optimizer, numbers, self._ranks)

    def load(self, directory: Path) -> None:
        numbers = checkpoint.load_state(directory, self._tensors, self._optimizer, self._ranks)
        self.version, self._updates = int(numbers["version"]), int(numbers["updates"])

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        weights: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            whole = full(tensor)
            if self._ranks.rank == 0:
                dtype = DTYPES[self._config.dtype] if whole.is_floating_point() else whole.dtype
                weights[name] = whole.to("cpu", dtype).contiguous()
        if self._ranks.rank == 0:
            model = self._policy.model
            model.save_pretrained(directory, state_dict=weights)
            self._save_tokenizer(directory)
        self._ranks.wait()

    def _save_tokenizer(self, directory: Path) -> None:
        """Copies the files as they are; transformers would write its own reading of them."""
        source = Path(self._path)
        if not source.is_dir():  # a model of the hub
            self._tokenizer.save_pretrained(directory)
            return
        for file in sorted(source.iterdir()):
            if file.is_file() and ("token" in file.name or file.name in _TOKENIZER_FILES):
                shutil.copy2(file, directory / file.name)

    def close(self) -> None:
        self._prepared = None
        self._ranks.close()


_TOKENIZER_FILES = frozenset({"vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja"})


def _sum_terms(batch: Batch, name: str) -> list[float]:
    """A preparation scalar of each of the batch's records."""
    columns = batch.columns
    terms = _SCALARS[name](columns["old_logp"] - columns["ref_logp"]) * columns["mask"]
    return torch.zeros(len(batch.index), device=terms.device).index_add_(0, columns["record"], terms).tolist()
