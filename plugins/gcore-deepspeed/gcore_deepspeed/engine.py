"""Runs forward, backward and update on DeepSpeed.

Ranks communicate by gloo on CPUs and by NCCL on CUDA, where it has not been tested.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from gcore_language.context.policy import SharedPolicy, SharedValueModel
from gcore_language.context.sharing import make_sharing
from gcore_language.device_clock import DeviceClock
from gcore_language.experts import refuse_experts
from gcore_language.host_memory import return_free_pages
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
    save_model,
)
from gcore_language.offload import Offload, held_bytes
from gcore_language.packing import Batch, Sample, stand_in
from gcore_language.policy import Entropy, Policy, check_layouts
from gcore_language.prompts import copy_other_files, load_tokenizer
from gcore_language.ranks import Ranks
from gcore_language.state_files import read_numbers
from gcore_language.training import LossOf, LossOfTokens, keeps_reference, loss_of_columns
from gcore_language.value_training import (
    check_value_objective,
    refuse_reference_of_values,
)
from gcore_language.values import ValueModel, trains_values
from gcore_language.vocabularies import refuse_other_tokens
from gcore_language.weights import named_tensors, spec_of, to_bytes
from torch import Tensor

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import TensorSpec
from gcore_deepspeed.arguments import check_engine, deepspeed_config
from gcore_deepspeed.config import DeepSpeedTrainerConfig
from gcore_deepspeed.library import forget_groups, import_deepspeed
from gcore_deepspeed.optimizer import OptimizerState, discard_gradient, rows_of, scratch_of
from gcore_deepspeed.state import load_state, save_universal, save_whole


class MixedPolicy(Policy):
    """A policy whose forward runs under autocast if its dtype asks for it.

    The autocast lies inside the policy, because DeepSpeed turns off one that is on when its engine
    is called.

    mixed: whether it does.
    """

    mixed = False

    @property
    def head(self) -> torch.nn.Module:
        """The head that runs apart from the trunk, where ``head_apart``."""
        head: torch.nn.Module = self.model.get_output_embeddings()
        return head

    def forward(
        self, batch: Batch, entropy: Entropy = "none", tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=self.mixed):
            return super().forward(batch, entropy, tokens)


class MixedValues(MixedPolicy, ValueModel):
    """The same of a model with a value head, which is computed in float32 all the same."""

    @property
    def head(self) -> torch.nn.Module:
        head: torch.nn.Module = self.model.score
        return head


class MixedSharedPolicy(MixedPolicy, SharedPolicy):
    """The same of a policy whose ranks share rows."""


class MixedSharedValues(MixedValues, SharedValueModel):
    """The same of a model of values whose ranks share rows."""


class DeepSpeedEngine:
    """See ``gcore_language.training.TrainingEngine``."""

    def __init__(self, config: DeepSpeedTrainerConfig, context: WorkerContext) -> None:
        self._config = config
        self._context = context
        check_value_objective(context, scores_tokens=True)
        files = open_model_files(context)
        self.device = choose_device(config.device, context, config.threads)
        self._deepspeed = import_deepspeed(context, self.device)
        self._settings = self._check_settings()
        # an engine that shares its process with another, as in tests, shares the process group too
        self._owns_group = not dist.is_initialized()
        self.ranks = Ranks(
            context,
            self.device,
            always_meet=self._owns_group,
            # stage 3 tries shared rows while the model lies in host memory
            host_too=config.stage == 3 and config.context.degree > 1,
        )
        self._sharing = make_sharing(config.context, context, self.ranks, self.device)
        self.clock = DeviceClock(self.device)
        self._deepspeed.init_distributed(dist_init_required=False)
        self._path = str(files.directory)
        self._adapters: Adapters | None = None
        policy = self._open(self._path, config.lora)
        self.sums_exactly = False
        self.layouts = policy.layouts
        self.hidden_size = int(policy.model.config.get_text_config().hidden_size)
        embedded = policy.model.get_input_embeddings().weight.shape[0]
        trust = config.trust_remote_code
        self._tokenizer = load_tokenizer(self._path, embedded, trust_remote_code=trust)
        refuse_experts(policy.model.config, context.role)
        whole = self._adapters.base() if self._adapters else named_tensors(policy.model)
        self._exported = whole
        self._specs = [
            spec_of(name, tensor, DTYPES[config.dtype]) for name, tensor in whole.items()
        ]
        self._tensors = self._adapters.trained() if self._adapters else whole
        self._adapter_specs = [spec_of(name, tensor) for name, tensor in self._tensors.items()]
        groups = self._parameter_groups()
        self._share_out(policy)
        self._engine = self._initialize(policy, self._make_optimizer(groups))
        self._optimizer = OptimizerState(self._engine.optimizer, config.stage, self._tensors)
        self._reference: Any = None
        if keeps_reference(config, context):
            refuse_reference_of_values(context)
            if self._adapters is None or config.reference_path:
                self._reference = self._open_reference()
            elif config.lora.path:
                self._keep_start()
        self.offload = Offload(context.role, context.rank, context.directory)

    def _check_settings(self) -> dict[str, Any]:
        """Returns DeepSpeed's configuration.

        Raises ConfigError for what may not stand under ``engine:``, or what DeepSpeed refuses.
        """
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
        from pydantic import ValidationError

        role = self._context.role
        check_engine(self._context.engine, names_of(DeepSpeedZeroConfig), role)
        pinned = self.device.type == "cuda"
        settings = deepspeed_config(self._config, self._context.engine, pin_memory=pinned)
        where = f"roles.{role}.engine.zero_optimization"
        try:
            zero = DeepSpeedZeroConfig(**settings["zero_optimization"])
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join([where, *map(str, first["loc"])])
            raise ConfigError(f"DeepSpeed refuses this: {first['msg']}.", where=where) from error
        if self._config.stage == 1 and zero.overlap_comm:
            why = "It reduces gradients once, when the update is complete."
            raise ConfigError(
                "stage 1 has nothing to overlap communication with.",
                where=f"{where}.overlap_comm",
                why=why,
            )
        return settings

    # -- models ------------------------------------------------------------------------------------

    def _keep_start(self) -> None:
        """Has the reference be the adapter that is gone on from. Raises ConfigError for stage 3."""
        if self._config.stage == 3:
            raise ConfigError(
                "stage 3 keeps no adapter to compare with.",
                where=f"roles.{self._context.role}.config.lora.path",
                why="The reference would be the model with this adapter.",
                todo="Use stage 1 or 2, or set reference_path.",
            )
        if self._adapters is not None:
            self._adapters.keep_start()

    def _open(self, path: str, lora: LoraSettings | None = None) -> MixedPolicy:
        """Opens a model as a policy on this device.

        With stage 3 it lies in host memory, from where ``_share_out`` shares it out.

        lora: of the policy; where it is on, adapters are added and the rest is frozen.
        """
        config = self._config
        policy = self._share_rows(self._load(path, lora))
        model = policy.model
        adapters = self._adapters if lora is not None else None
        if config.gradient_checkpointing:
            enable_checkpointing(model)
        device = torch.device("cpu") if config.stage == 3 else self.device
        exact = config.dtype == "float32"
        policy.to(device)
        with adapters.on_trial() if adapters else contextlib.nullcontext():
            check_layouts(
                policy,
                device,
                # "flat" produces gradients in another order, and from stage 2 on all ranks must
                # reduce them in the same order
                may_flat=config.stage == 1
                and exact
                and device.type == "cpu"
                and config.packing != "padded",
                tolerance=1e-4 if exact else 5e-2,
            )
            if self._sharing is not None:
                self._sharing.check(policy, tolerance=1e-4 if exact else 5e-2)
        return policy

    def _load(self, path: str, lora: LoraSettings | None) -> MixedPolicy:
        """Loads a model into host memory; with a value head where the objective requires values.

        lora: where it is on, adapters are added. Raises ConfigError for those beside a value head.
        """
        config = self._config
        attention, trust = config.attn_implementation, config.trust_remote_code
        has_adapters = lora is not None and lora.on
        if trains_values(self._context):
            if has_adapters:
                raise adapters_of_values(self._context.role)
            model = load_value_model(
                path,
                std=config.value_head_std,
                seed=self._context.seed,
                attn_implementation=attention,
                trust_remote_code=trust,
            )
            return self._mixed(MixedValues(model))
        model = load_model(
            path, dtype="float32", attn_implementation=attention, trust_remote_code=trust
        )
        if lora is not None and has_adapters:
            dtype, role = DTYPES[config.dtype], self._context.role
            self._adapters = add_adapters(model, lora, Path(path), role, dtype, narrow=False)
        return self._mixed(MixedPolicy(model))

    def _mixed(self, policy: MixedPolicy) -> MixedPolicy:
        policy.mixed = self._config.dtype == "bfloat16"
        return policy

    def _share_rows(self, policy: MixedPolicy) -> MixedPolicy:
        """Returns a policy whose ranks share rows, where the settings ask for it."""
        if self._sharing is None:
            return policy
        is_values = isinstance(policy, MixedValues)
        shared = self._sharing.share(policy, MixedSharedValues if is_values else MixedSharedPolicy)
        assert isinstance(shared, MixedPolicy)
        return self._mixed(shared)

    def _share_out(self, policy: MixedPolicy) -> None:
        """With stage 3, leaves each rank its part of each parameter.

        Parameters go to the device one at a time. With other stages nothing happens.
        """
        if self._config.stage == 3:
            self._deepspeed.zero.Init(module=policy, config_dict_or_path=self._settings)
            policy.to(self.device)  # buffers

    def _initialize(self, policy: MixedPolicy, optimizer: torch.optim.Optimizer | None) -> Any:
        """Wraps a policy in DeepSpeed's engine; without an optimizer it can only go forward."""
        engine, *_ = self._deepspeed.initialize(
            model=policy, optimizer=optimizer, config=self._settings, dist_init_required=False
        )
        if self._config.stage == 3 and policy.head_apart:
            # The head's shape is read outside of the head, and the head runs once for each chunk of
            # logits: so its weight is gathered once, together with the root's parameters.
            self._deepspeed.zero.register_external_parameter(policy, policy.head.weight)
        return engine

    def _open_reference(self) -> Any:
        path = open_model_files(self._context, self._config.reference_path).directory
        where = f"roles.{self._context.role}.config.reference_path"
        trust = self._config.trust_remote_code
        refuse_other_tokens(self._tokenizer, path, where, trust_remote_code=trust)
        policy = self._open(str(path)).requires_grad_(False)
        if self._config.stage < 3:
            return policy
        self._share_out(policy)
        return self._initialize(policy, None)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        parameters = [t for t in self._tensors.values() if t.requires_grad]
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": self._config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def _make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        # torch's own AdamW, because DeepSpeed would compile its fused one
        config = self._config
        return torch.optim.AdamW(
            groups, lr=0.0, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True
        )

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

    def _forward(
        self, model: Any, batch: Batch | None, entropy: Entropy, ids: str = ""
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log-probs and entropies of a batch.

        For None it runs a stand-in, because ranks that share parameters must all go forward.

        ids: the column of tokens whose log-probs are wanted too, see ``Policy.forward``.
        """
        self._context.progress()
        tokens = (batch.columns[ids],) if batch is not None and ids else ()
        with self.clock.running():
            parts: tuple[Tensor, Tensor | None] = model(
                stand_in(self.device) if batch is None else batch, entropy, *tokens
            )
        return parts

    @torch.no_grad()
    def logprobs(
        self, batches: Sequence[Batch | None], model: Literal["policy", "reference"]
    ) -> Sequence[Tensor | None]:
        self.offload.check_awake()
        if model == "reference" and self._adapters is not None and self._reference is None:
            with self._adapters.at_start():
                start: Sequence[Tensor | None] = self.logprobs(batches, "policy")
            return start
        engine = self._engine if model == "policy" else self._reference
        if engine is None:
            raise RuntimeError("there is no reference model")
        return [self._forward(engine, batch, "none")[0] for batch in batches]

    def accumulate(self, batches: Sequence[Batch | None], loss: LossOf, entropy: Entropy) -> None:
        self._accumulate(batches, loss, entropy)

    def accumulate_tokens(
        self, batches: Sequence[Batch | None], loss: LossOfTokens, entropy: Entropy, ids: str
    ) -> None:
        """See ``gcore_language.training.ScoresTokens``."""
        self._accumulate(batches, loss_of_columns(loss), entropy, ids)

    def _accumulate(
        self, batches: Sequence[Batch | None], loss: LossOf, entropy: Entropy, ids: str = ""
    ) -> None:
        self.offload.check_awake()
        for batch in batches:
            logp, entropies = self._forward(self._engine, batch, entropy, ids)
            value = logp.sum() * 0.0 if batch is None else loss(batch, logp, entropies)
            with self.clock.running():
                # DeepSpeed averages over the ranks, but an engine has to sum
                self._engine.backward(value * self.ranks.count)

    def update(self, rate: float, clip: float) -> float:
        self.offload.check_awake()
        zero = self._engine.optimizer
        zero.clip_grad = clip
        for group in zero.param_groups:
            group["lr"] = rate
        # DeepSpeed makes no step when the norm is not finite; the norm is then reported as infinite
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        return norm if self._engine.was_step_applied() else math.inf

    def discard(self) -> None:
        """See ``TrainingEngine.discard``; asleep there are no gradients."""
        if self.offload.asleep:
            return
        discard_gradient(self._engine.optimizer, self._config.stage)

    # -- weights -----------------------------------------------------------------------------------

    def _gathered(self, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Makes the tensors whole within a ``with`` block; a collective with stage 3."""
        if self._config.stage < 3:
            return contextlib.nullcontext()
        gathered: AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters(tensors)
        return gathered

    def _whole(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Yields all tensors in order, each whole until the next one is requested.

        With stage 3 a bucket of them is gathered at a time, and all ranks must iterate.
        """
        self.offload.check_awake()
        pairs = list(zip(self._specs, self._exported.values(), strict=True))
        for bucket in buckets(pairs, self._config.bucket_elements):
            halves = [self._halves(spec.name) for spec, _ in bucket]
            tensors = [tensor for _, tensor in bucket]
            with self._gathered([*tensors, *itertools.chain(*halves)]):
                for (spec, tensor), own in zip(bucket, halves, strict=True):
                    yield spec, self._adapters.put_on(tensor, own) if self._adapters else tensor

    def _halves(self, name: str) -> list[Tensor]:
        return self._adapters.halves(name) if self._adapters else []

    @property
    def adapters(self) -> Adapters | None:
        """See ``gcore_language.adapter_push.AdapterEngine``."""
        return self._adapters

    def adapter_specs(self) -> list[TensorSpec]:
        """See ``gcore_language.adapter_push.AdapterEngine``."""
        return list(self._adapter_specs)

    def whole_adapter(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """See ``gcore_language.adapter_push.AdapterEngine``."""
        self.offload.check_awake()
        for spec, tensor in zip(self._adapter_specs, self._tensors.values(), strict=True):
            with self._gathered([tensor]):
                yield spec, tensor

    def weight_specs(self) -> list[TensorSpec]:
        return list(self._specs)

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        for spec, tensor in self._whole():
            yield (
                spec,
                to_bytes(tensor, DTYPES[self._config.dtype])
                if self.ranks.rank == 0
                else np.empty(0, np.uint8),
            )

    def save(self, directory: Path, numbers: dict[str, Any]) -> None:
        self.offload.check_awake()
        if self._adapters is not None and self.ranks.rank == 0:  # which writes them
            numbers = {**numbers, NUMBERS: self._adapters.numbers()}
        if self._config.checkpoint == "universal":
            save_universal(self._engine, self._optimizer, directory, numbers, self.ranks)
        else:
            save_whole(self._optimizer, directory, numbers, self.ranks)

    def load(self, directory: Path) -> dict[str, Any]:
        self.offload.check_awake()
        if self.ranks.rank == 0:
            check_numbers(read_numbers(directory)[1], self._adapters, directory)
        numbers = load_state(self._engine, self._optimizer, directory)
        numbers.pop(NUMBERS, None)
        return numbers

    def save_pretrained(self, directory: Path) -> None:
        dtype = DTYPES[self._config.dtype]
        weights: dict[str, Tensor] = {}
        for spec, tensor in self._whole():
            if self.ranks.rank == 0:
                weights[spec.name] = tensor.detach().to(
                    "cpu", dtype if tensor.is_floating_point() else None, copy=True
                )
        adapter: dict[str, Tensor] = {}
        for spec, tensor in self.whole_adapter() if self._adapters else ():
            if self.ranks.rank == 0:
                adapter[spec.name] = tensor.detach().to("cpu", copy=True)
        try:
            if self.ranks.rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
                if self._adapters is not None:
                    self._adapters.save_files(directory / ADAPTER, adapter)
                save_model(self._engine.module.model, directory, weights, dtype)
                copy_other_files(self._path, directory, self._tokenizer)
        finally:  # a disk that is full does not end a run
            self.ranks.wait()

    # -- sleep -------------------------------------------------------------------------------------

    def _kept(self) -> Iterator[Tensor]:
        """Yields what this rank holds from step to step: weights, optimizer and the reference."""
        for model in (self._engine.module, self._reference):
            for parameter in () if model is None else model.parameters():
                yield from rows_of(parameter)
        yield from self._optimizer.held()

    def _here(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields those on this rank's device; what is offloaded stays where it is."""
        yield from (tensor for tensor in tensors if tensor.device.type == self.device.type)

    def _scratch(self) -> Iterator[Tensor]:
        yield from scratch_of(self._engine.optimizer, self._config.stage)

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's weights, optimizer, reference and buffers, as held now."""
        return held_bytes(self._here([*self._kept(), *self._scratch()]))

    def sleep(self) -> None:
        """See ``SleepsInRollout.sleep``."""
        self.discard()
        self.offload.sleep(self._here(self._kept()), scratch=self._here(self._scratch()))
        return_free_pages()

    def wake(self) -> None:
        """See ``SleepsInRollout.wake``."""
        self.offload.wake()

    def close(self) -> None:
        self.offload.close()
        for engine in (self._reference, self._engine):
            if hasattr(engine, "destroy"):
                engine.destroy()
        self.ranks.close()
        if self._owns_group:
            forget_groups()


def names_of(section: Any) -> list[str]:
    """Returns the settings of a section of DeepSpeed's configuration, a class of its pydantic
    models, without deprecated ones.
    """
    fields = section.model_fields.items()
    return [
        field.alias or name
        for name, field in fields
        if not (field.json_schema_extra or {}).get("deprecated")
    ]


def buckets(
    pairs: Sequence[tuple[TensorSpec, Tensor]], elements: int
) -> Iterator[list[tuple[TensorSpec, Tensor]]]:
    """Splits tensors into runs of neighbours with at most ``elements`` numbers together.

    A larger tensor is a bucket of its own.
    """
    bucket: list[tuple[TensorSpec, Tensor]] = []
    bucket_size = 0
    for spec, tensor in pairs:
        size = math.prod(spec.shape)
        if bucket and bucket_size + size > elements:
            yield bucket
            bucket = []
            bucket_size = 0
        bucket.append((spec, tensor))
        bucket_size += size
    if bucket:
        yield bucket
