"""Runs forward, backward and update on plain torch.

A single rank holds the model as it is. Several ranks shard it by FSDP2, over gloo on CPUs and over
NCCL on CUDA, where several ranks have not been tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gcore_language.alignment import align
from gcore_language.context.sharing import make_sharing
from gcore_language.cuts import cut_twice, rows_of_rank
from gcore_language.device_clock import DeviceClock
from gcore_language.experts import FAMILIES, CheckpointTensors, cut, expert_names
from gcore_language.host_memory import return_free_pages, return_large_blocks
from gcore_language.lora import (
    ADAPTER,
    NUMBERS,
    Adapters,
    add_adapters,
    check_numbers,
)
from gcore_language.lora_settings import LoraSettings, adapters_of_values
from gcore_language.model_files import open_model_files
from gcore_language.models import (
    DTYPES,
    choose_device,
    enable_checkpointing,
    load_model,
    load_value_model,
    refuse_engine,
    save_model,
    to_host,
)
from gcore_language.offload import Offload, held_bytes
from gcore_language.own_rows import OwnRows
from gcore_language.packing import Batch, Sample, stand_in
from gcore_language.policy import Entropy, Policy, check_layouts
from gcore_language.prompts import copy_other_files, load_tokenizer
from gcore_language.ranks import Ranks
from gcore_language.router_books import RouterBooks
from gcore_language.routing import Routers
from gcore_language.saving import PendingSave, Staging, local_rows, save_rank
from gcore_language.shared_values import PolicyWithValues, check_shared, refuse_shared
from gcore_language.state_files import MOMENTS, load_numbers, load_parts
from gcore_language.training import LossOf, LossOfTokens, keeps_reference, loss_of_columns
from gcore_language.value_training import (
    check_value_objective,
    refuse_reference_of_values,
)
from gcore_language.values import SCORE, ValueModel, trains_values
from gcore_language.vocabularies import refuse_other_tokens
from gcore_language.weights import flat_bytes, full, like, named_tensors, spec_of, to_bytes
from torch import Tensor

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import TensorSpec
from gcore_torch.compiling import compile_layers
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.expert_parallel import experts_of, spread_experts
from gcore_torch.gradients import (
    ExactGradients,
    Gradients,
    PlainGradients,
    ShardedExactGradients,
    SplitGradients,
    SpreadGradients,
    by_mesh,
)
from gcore_torch.mesh import make_mesh, refuse_images
from gcore_torch.offload import check_head, offload_layers, offload_policy, refuse_exact_sums
from gcore_torch.sharding import free_gathered, gathered_for_now, materialise, shard
from gcore_torch.tensor_parallel import split_layers


class TorchEngine:
    """Trains on plain torch; see ``gcore_language.training.TrainingEngine``."""

    def __init__(self, config: TorchTrainerConfig, context: WorkerContext) -> None:
        return_large_blocks()
        self._config = config
        self._context = context
        check_value_objective(context, scores_tokens=True)
        refuse_shared(config.value_head, context)
        refuse_engine(context)
        files = open_model_files(context)
        self.device = choose_device(config.device, context, config.threads)
        refuse_exact_sums(config.offload, context)
        self.ranks = Ranks(
            context,
            self.device,
            always_meet=config.offload.state,
            host_too=config.offload.state,
        )
        self._sharing = make_sharing(config.context, context, self.ranks, self.device)
        self.clock = DeviceClock(self.device)
        self._mesh = make_mesh(
            config.sharding, context, self.ranks, self.device, always=config.offload.state
        )
        if self._mesh is not None and not self._mesh.speaks:
            self.ranks.speaks = False
        self._splits = config.sharding.tensor > 1
        self._spreads = config.sharding.experts > 1
        self.sums_exactly = context.deterministic
        self._path = str(files.directory)
        self._adapters: Adapters | None = None
        self._policy = self._open(self._path, config.lora)
        model = self._policy.model
        embedded = model.get_input_embeddings().weight.shape[0]
        trust = config.trust_remote_code
        self._tokenizer = load_tokenizer(self._path, embedded, trust_remote_code=trust)
        self.layouts = self._policy.layouts
        self.hidden_size = int(model.config.get_text_config().hidden_size)
        self._reference = None
        if self._adapters is not None and not config.reference_path:
            if config.lora.path:
                self._adapters.keep_start()
        elif keeps_reference(config, context):
            refuse_reference_of_values(context)
            path = open_model_files(context, config.reference_path).directory
            where = f"roles.{context.role}.config.reference_path"
            refuse_other_tokens(self._tokenizer, path, where, trust_remote_code=trust)
            self._reference = self._open(str(path)).requires_grad_(False)
        self._tensors = self._adapters.trained() if self._adapters else named_tensors(model)
        self._add_head()
        self._parameters = [t for t in self._tensors.values() if t.requires_grad]
        self._optimizer = self._make_optimizer()
        self._gradients = self._add_gradients()
        self._names = expert_names(model.config)
        self._router_books = self._open_books()
        self.staging = Staging()
        self.offload = Offload(context.role, context.rank, context.directory)
        return_free_pages()

    def _open(self, path: str, lora: LoraSettings | None = None) -> Policy:
        """Opens a model as a policy on this device, sharded over the ranks.

        Several ranks open it without its weights, and each reads its own rows of them once it is
        sharded. Its layouts are tried last.

        lora: of the policy; where it is on, adapters are added and the rest is frozen.
        """
        config = self._config
        rows = None if self._mesh is None else OwnRows(Path(path))
        policy = self._load(path, lora, empty=rows is not None)
        if rows is not None and rows.lacks(policy.model):
            # its tensors are made of the files' in a way that only transformers knows
            rows = None
            policy = self._load(path, lora, empty=False)
        model = policy.model
        if policy.takes_images:
            refuse_images(config.sharding, self._context.role)
        self._divide(model)
        policy.routers = Routers.of(model, replays=config.router_replay != "never")
        if self._sharing is not None:
            policy = self._sharing.share(policy)
        adapters = self._adapters if lora is not None else None
        if self.sums_exactly:
            align(model)
        if config.gradient_checkpointing:
            enable_checkpointing(model)
        self._share_out(policy, rows, adapters)
        self._try(policy, adapters)
        if config.compile == "auto" and self.device.type == "cuda":
            self._compile(policy)
        if config.offload.activations:
            check_head(policy, self._context.role)
            offload_layers(policy, self.device)
        return policy

    def _compile(self, policy: Policy) -> None:
        """Has torch make kernels for each layer, for rows of any size, when it first runs.

        Raises ConfigError for what it has not been tested with.
        """
        context = self._context
        where = f"roles.{context.role}.config.compile"
        for what, is_so in (
            ("several slots", self.ranks.count > 1),
            ("a deterministic run", context.deterministic),
            ("a model that takes images", policy.takes_images),
            ("a mixture of experts", policy.routers is not None),
        ):
            if is_so:
                raise ConfigError(
                    f"compile does not go with {what}.",
                    where=where,
                    why="that has not been tested",
                    todo="Set it to never.",
                )
        compile_layers(policy.model, set(policy.model._no_split_modules or ()))

    def _divide(self, model: Any) -> None:
        """Splits a model's layers over this rank's group, or spreads its experts."""
        if self._splits and self._mesh is not None:
            split_layers(model, self._mesh.of_tensor, self._context.role)
        if self._spreads and self._mesh is not None:
            spread_experts(model, self._mesh.of_experts, self._context.role)

    def _share_out(self, policy: Policy, rows: OwnRows | None, adapters: Adapters | None) -> None:
        """Shards a policy, and reads this rank's rows of it where it has no weights.

        rows: None: it has its weights.
        """
        config = self._config
        if self._mesh is None:
            return
        kept = offload_policy(self.device) if config.offload.state else None
        blocks = set(policy.model._no_split_modules or ())
        meshes = self._mesh.of_layers, blocks, self._mesh.of_rest
        experts = self._mesh.of_same_experts
        shard(policy, *meshes, kept, experts, exactly=self.sums_exactly)
        if rows is not None:
            rounding = DTYPES[config.dtype if adapters is not None else "float32"]
            place = torch.device("cpu") if config.offload.state else self.device
            materialise(policy, rows, place, rounding)

    def _try(self, policy: Policy, adapters: Adapters | None) -> None:
        """Tries the layouts of a policy; see ``check_layouts``."""
        config = self._config
        exact = config.dtype == "float32"
        trial = adapters.on_trial() if adapters else nullcontext()
        with gathered_for_now(policy), self._autocast(), trial:
            check_layouts(
                policy,
                self.device,
                may_flat=exact
                and self.device.type == "cpu"
                and config.packing != "padded"
                and not self._splits,
                tolerance=1e-4 if exact else 5e-2,
            )
            if self._sharing is not None:
                self._sharing.check(policy, tolerance=1e-4 if exact else 5e-2)

    def _load(self, path: str, lora: LoraSettings | None, *, empty: bool) -> Policy:
        """Loads a model onto this device; with a value head where the objective requires values.

        lora: where it is on, adapters are added. Raises ConfigError for those beside a value head.
        empty: whether to leave out the weights; see ``load_model``.
        """
        config = self._config
        attention, trust = config.attn_implementation, config.trust_remote_code
        has_adapters = lora is not None and lora.on
        if trains_values(self._context):
            if has_adapters:
                raise adapters_of_values(self._context.role)
            head = load_value_model(
                path,
                std=config.value_head_std,
                seed=self._context.seed,
                attn_implementation=attention,
                trust_remote_code=trust,
                empty=empty,
            )
            return ValueModel(head if empty else head.to(self.device))
        model = load_model(
            path,
            dtype="float32",
            attn_implementation=attention,
            trust_remote_code=trust,
            images=True,
            empty=empty,
        )
        if lora is not None and has_adapters:
            dtype = DTYPES[config.dtype]
            self._adapters = add_adapters(model, lora, Path(path), self._context.role, dtype)
        if lora is not None and config.value_head.on:
            policy = PolicyWithValues(
                model,
                detach=config.value_head.detach,
                std=config.value_head_std,
                seed=self._context.seed,
            )
            return policy if empty else policy.to(self.device)
        return Policy(model if empty else model.to(self.device))

    def _add_head(self) -> None:
        """Adds the policy's value head, where it has one, to the tensors that are trained."""
        if isinstance(self._policy, PolicyWithValues):
            check_shared(self._policy, self._context)
            self._tensors = {**self._tensors, SCORE: self._policy.score.weight}

    def _pushed(self) -> Mapping[str, Tensor]:
        """Returns the tensors that are trained and exported: without the policy's value head."""
        if not isinstance(self._policy, PolicyWithValues):
            return self._tensors
        return {name: tensor for name, tensor in self._tensors.items() if name != SCORE}

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Makes AdamW (Loshchilov and Hutter, 2019); weights with one dimension have no weight
        decay.

        Its learning rate is 0 until ``update`` sets one.
        """
        config = self._config
        head = self._policy.score.weight if isinstance(self._policy, PolicyWithValues) else None
        matrices = [p for p in self._parameters if p.dim() > 1 and p is not head]
        vectors = [p for p in self._parameters if p.dim() <= 1]
        value_head = [] if head is None else [head]
        kinds = (  # parameters, weight decay, learning rate as a multiple of the policy's
            (matrices, config.weight_decay, 1.0),
            (vectors, 0.0, 1.0),
            (value_head, config.weight_decay, config.value_head.speed),
        )
        groups = [
            {"params": together, "weight_decay": decay, "speed": speed}
            for parameters, decay, speed in kinds
            for together in by_mesh(parameters)
        ]
        betas = (config.betas[0], config.betas[1])
        return torch.optim.AdamW(
            groups,
            lr=0.0,
            betas=betas,
            eps=config.eps,
            fused=True,
        )

    def _add_gradients(self) -> Gradients:
        """Returns how gradients are added: exactly in a deterministic run."""
        if self._splits and self._mesh is not None:
            return SplitGradients(self.ranks, self._mesh.records)
        if self._spreads:
            experts = [p for module in experts_of(self._policy) for p in module.parameters()]
            return SpreadGradients(self.ranks, experts, self._config.sharding.experts)
        if not self.sums_exactly:
            return PlainGradients(self.ranks)
        if self.ranks.count > 1:
            return ShardedExactGradients(self._policy, self.ranks, self._context.role)
        return ExactGradients(self._parameters, self.ranks)

    def _open_books(self) -> RouterBooks | None:
        """Returns the books of the policy's routers; None for a model without experts.

        Raises ConfigError for such a model where the settings are of a mixture of experts.
        """
        config = self._config
        if self._policy.routers is not None:
            return RouterBooks(self._policy.routers, self.ranks, config.router_aux_loss)
        for setting, default in (("router_replay", "auto"), ("router_aux_loss", 0.0)):
            value = getattr(config, setting)
            if value not in (default, "never"):
                raise ConfigError(
                    f"{setting} is {value}, and the model has no experts that are known here.",
                    where=f"roles.{self._context.role}.config.{setting}",
                    why=f"Known are {', '.join(sorted(FAMILIES))}.",
                    todo=f"Leave {setting} out.",
                )
        return None

    def router_metrics(self) -> dict[str, float]:
        """Returns the metrics of a step's routers, over all ranks; none without experts."""
        return {} if self._router_books is None else self._router_books.metrics()

    def _autocast(self) -> AbstractContextManager[Any]:
        """Returns the context in which forward passes run: bfloat16 where the settings ask for
        it.

        It keeps no copies of weights in bfloat16. Each is used once in a pass, and one that the
        backward pass needs is kept by autograd: whole copies on every rank would outlive the
        layers that were gathered, or that are computed again.
        """
        autocast: AbstractContextManager[Any] = torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self._config.dtype == "bfloat16",
            cache_enabled=False,
        )
        return autocast

    def _forward(
        self, policy: Policy, batch: Batch | None, entropy: Entropy, ids: str = ""
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log-probs and entropies of a batch.

        For None it runs a stand-in, because the ranks of a sharded model must all go forward.

        ids: the column of tokens whose log-probs are wanted too, see ``Policy.forward``.
        """
        self._context.progress()
        self.offload.check_awake()
        tokens = batch.columns[ids] if batch is not None and ids else None
        with self._autocast(), self.clock.running():
            parts: tuple[Tensor, Tensor | None] = policy(
                stand_in(self.device) if batch is None else batch, entropy, tokens
            )
        return parts

    def packed(
        self, samples: Sequence[Sample], budget_tokens: int, *, whole_groups: bool
    ) -> list[Batch] | None:
        """See ``PacksRecords``."""
        if self._sharing is None:
            return None
        return self._sharing.packed(
            samples, budget_tokens, self.hidden_size, whole_groups=whole_groups
        )

    # -- a step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(
        self, batches: Sequence[Batch | None], model: Literal["policy", "reference"]
    ) -> Sequence[Tensor | None]:
        """See ``TrainingEngine.logprobs``. Raises RuntimeError when there is no reference model."""
        if model == "reference" and self._adapters is not None and self._reference is None:
            self.staging.wait()  # the trained values may be lent others
            with self._adapters.at_start():
                start: Sequence[Tensor | None] = self.logprobs(batches, "policy")
            return start
        policy = self._policy if model == "policy" else self._reference
        if policy is None:
            raise RuntimeError("there is no reference model")
        outputs = [self._forward(policy, batch, "none")[0] for batch in batches]
        return [out[:, 0] for out in outputs] if isinstance(policy, PolicyWithValues) else outputs

    @torch.no_grad()
    def values(self, batches: Sequence[Batch | None]) -> Sequence[Tensor]:
        """Returns the values float32[A] before each batch's actions, of a policy with a value head.

        See ``gcore_language.shared_values``.
        """
        return [self._forward(self._policy, batch, "none")[0][:, -1] for batch in batches]

    def accumulate(self, batches: Sequence[Batch | None], loss: LossOf, entropy: Entropy) -> None:
        """See ``TrainingEngine.accumulate``.

        For a batch that is None the backward pass runs with a loss of 0, because the ranks of a
        sharded model must all go backward.
        """
        self._accumulate(batches, loss, entropy)

    def accumulate_tokens(
        self, batches: Sequence[Batch | None], loss: LossOfTokens, entropy: Entropy, ids: str
    ) -> None:
        """See ``ScoresTokens.accumulate_tokens``."""
        self._accumulate(batches, loss_of_columns(loss), entropy, ids)

    def _accumulate(
        self, batches: Sequence[Batch | None], loss: LossOf, entropy: Entropy, ids: str = ""
    ) -> None:
        """Does what ``accumulate`` says; a mixture of experts adds its load-balancing loss.

        ids: as for ``_forward``.
        """
        books = self._router_books
        if books is not None:
            books.begin(batches, lambda batch: self._forward(self._policy, batch, "none"))
        for place, batch in enumerate(batches):
            last = place == len(batches) - 1
            logp, entropies = self._forward(self._policy, batch, entropy, ids)
            value = logp.sum() * 0.0 if batch is None else loss(batch, logp, entropies)
            if books is not None and batch is not None:
                value = value + books.loss(batch)
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
                for together in by_mesh(gradients):
                    torch._foreach_mul_(together, factor)
            for group in self._optimizer.param_groups:
                group["lr"] = rate * group.get("speed", 1.0)
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
        """See ``ShowsWeights.weights``; a value head, which has a speed of its own, is left out."""
        return self._pushed()

    def weights_by_export(self) -> Mapping[str, Tensor]:
        """See ``NamesExports.weights_by_export``."""
        names = self._names
        return self._tensors if names is None else CheckpointTensors(self._tensors, names)

    def discard(self) -> None:
        """Drops the gradients."""
        self._gradients.discard()
        self._optimizer.zero_grad(set_to_none=True)

    # -- weights -----------------------------------------------------------------------------------

    def weight_specs(self) -> list[TensorSpec]:
        tensors: Mapping[str, Tensor] = self._adapters.base() if self._adapters else self._pushed()
        if self._names is not None:
            shapes = {
                name: torch.empty(t.shape, dtype=t.dtype, device="meta")
                for name, t in tensors.items()
            }
            tensors = CheckpointTensors(shapes, self._names)
        return [
            spec_of(name, tensor, DTYPES[self._config.dtype]) for name, tensor in tensors.items()
        ]

    def _whole(self) -> Iterator[Tensor]:
        """Yields every tensor of the whole weights, in the order of ``weight_specs``."""
        self.offload.check_awake()
        if self._adapters is None:
            whole = ((name, full(tensor)) for name, tensor in self._pushed().items())
        else:
            whole = self._adapters.whole(full)
        for name, tensor in whole:
            for _, piece in cut(name, tensor, self._names):
                yield piece

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """Yields every tensor of a push with its bytes, uint8[nbytes]; ranks besides 0 yield no
        bytes.
        """
        for spec, tensor in zip(self.weight_specs(), self._whole(), strict=True):
            yield (
                spec,
                to_bytes(tensor, DTYPES[self._config.dtype])
                if self.ranks.rank == 0
                else np.empty(0, np.uint8),
            )

    def export_tensors(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """See ``gcore_language.device_push.DeviceEngine``."""
        for spec, tensor in zip(self.weight_specs(), self._whole(), strict=True):
            yield spec, flat_bytes(tensor.to(self.device), DTYPES[self._config.dtype])

    @property
    def adapters(self) -> Adapters | None:
        """See ``gcore_language.adapter_push.AdapterEngine``."""
        return self._adapters

    def adapter_specs(self) -> list[TensorSpec]:
        """See ``gcore_language.adapter_push.AdapterEngine``."""
        tensors = self._tensors.items() if self._adapters else ()
        return [spec_of(name, tensor) for name, tensor in tensors]

    def whole_adapter(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """See ``gcore_language.adapter_push.AdapterEngine``."""
        self.offload.check_awake()
        for spec in self.adapter_specs():
            yield spec, full(self._tensors[spec.name])

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
        counted = {**numbers, "optimizer_steps": steps}
        if self._adapters is not None and self.ranks.rank == 0:  # which writes them
            counted[NUMBERS] = self._adapters.numbers()
        return counted

    def rows(self) -> dict[str, Tensor]:
        """Returns what this rank saves: its rows of weights and moments.

        The keys are those of ``state_files``. Of replicas the first one saves.
        """
        self.offload.check_awake()
        if self._mesh is not None and not self._mesh.is_first_replica:
            return {}
        local: dict[str, Tensor | None] = {}
        for name, tensor in self._tensors.items():
            parts = {"weight": tensor} | {
                part: self._optimizer.state.get(tensor, {}).get(part) for part in MOMENTS
            }
            for part, state in parts.items():
                if state is not None:
                    local[f"{part}/{name}"] = self._saved_rows(state)
        return {key: rows for key, rows in local.items() if rows is not None}

    def _saved_rows(self, tensor: Tensor) -> Tensor | None:
        """Returns the rows of a tensor that this rank saves.

        Of what a tensor group splits no rank has whole rows, and the rows of spread experts are not
        in the order of ranks, so each such tensor is put together for a moment.
        """
        if self._splits or (self._spreads and cut_twice(tensor)):
            return rows_of_rank(full(tensor), self.ranks.rank, self.ranks.count)
        return local_rows(tensor, first=self.ranks.rank == 0)

    @torch.no_grad()
    def load(self, directory: Path) -> dict[str, Any]:
        """See ``TrainingEngine.load``. Returns the numbers that were saved."""
        self.offload.check_awake()
        self.staging.wait()
        numbers = load_numbers(directory)
        if self.ranks.rank == 0:
            check_numbers(numbers, self._adapters, directory)
        numbers.pop(NUMBERS, None)
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
        weights: dict[str, Tensor] = {}
        dtype = DTYPES[self._config.dtype]
        for spec, tensor in zip(self.weight_specs(), self._whole(), strict=True):
            if self.ranks.rank == 0:
                weights[spec.name] = to_host(tensor, dtype)
        adapter = {spec.name: tensor for spec, tensor in self.whole_adapter()}
        try:
            if self.ranks.rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
                if self._adapters is not None:
                    self._adapters.save_files(directory / ADAPTER, adapter)
                save_model(self._policy.model, directory, weights, dtype)
                copy_other_files(self._path, directory, self._tokenizer)
        finally:  # a disk that is full does not end a run
            self.ranks.wait()

    # -- sleep -------------------------------------------------------------------------------------

    def _kept(self) -> Iterator[Tensor]:
        """Yields what this rank holds from step to step: weights, moments and the reference."""
        for policy in (self._policy, self._reference):
            yield from () if policy is None else policy.parameters()
        for state in self._optimizer.state.values():
            yield from (state[part] for part in MOMENTS if part in state)

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's weights, moments and reference, as they are held now."""
        return held_bytes(self._kept())

    def sleep(self) -> None:
        """See ``SleepsInRollout.sleep``."""
        self.staging.wait()
        self.discard()
        for policy in (self._policy, self._reference):
            if policy is not None:
                free_gathered(policy)
        self.offload.sleep(self._kept())
        return_free_pages()

    def wake(self) -> None:
        """See ``SleepsInRollout.wake``."""
        self.offload.wake()

    def close(self) -> None:
        self.offload.close()
        self.ranks.close()
