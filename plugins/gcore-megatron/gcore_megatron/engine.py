"""A policy on Megatron-Core, as the engine that ``gcore_language.training`` runs.

The ranks of one replica are neighbours: tensor-parallel ranks lie nearest to each other, then
context-parallel ones, then pipeline stages. Replicas vary slowest. Megatron-Core's own buffers sum
gradients over micro-batches, replicas and context-parallel ranks.

The experts of a layer are spread over neighbouring ranks of its stage: over tensor-parallel ranks,
then, where there is one stage, over replicas. Each expert is whole. The ranks that share experts
send each other tokens in every layer, so they make the same passes, also where one has fewer
micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from gcore_language.device_clock import DeviceClock
from gcore_language.host_memory import return_free_pages
from gcore_language.model_files import open_model_files
from gcore_language.models import DTYPES, choose_device
from gcore_language.offload import Offload, held_bytes
from gcore_language.packing import Batch, Layout, stand_in
from gcore_language.policy import Entropy
from gcore_language.pretrained import read_hf_config
from gcore_language.prompts import copy_other_files, load_tokenizer
from gcore_language.ranks import Ranks
from gcore_language.state_files import MOMENTS
from gcore_language.training import LossOf, LossOfTokens, keeps_reference, loss_of_columns
from gcore_language.value_training import check_value_objective, refuse_reference_of_values
from gcore_language.values import trains_values
from gcore_language.vocabularies import refuse_other_tokens
from gcore_language.weights import to_bytes
from torch import Tensor

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import TensorSpec
from gcore_megatron import convert, shim, values
from gcore_megatron.arguments import check_engine
from gcore_megatron.checkpoint import PendingSave, begin_save, is_distributed, load_state
from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.library import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    clip_grad_by_total_norm_fp32,
    finalize_model_grads,
    get_forward_backward_func,
    get_megatron_optimizer,
    model_parallel_cuda_manual_seed,
    parallel_state,
    tensor_parallel,
)
from gcore_megatron.logprobs import action_logp, in_chunks, sum_over
from gcore_megatron.model import ValueModel, architecture, build, check_split
from gcore_megatron.pretrained import write_pretrained
from gcore_megatron.routers import StageBooks, Watch, install
from gcore_megatron.rows import Rows
from gcore_megatron.split_checks import problems_of_slots
from gcore_megatron.whole import OptimizerState, load_whole, save_whole

#: The most logits, counted in numbers, that a rank holds at once. The output layer is applied in
#: chunks of actions when there would be more.
_CHUNK_LOGITS = 2**25


class MegatronEngine:
    """One rank; see ``gcore_language.training.TrainingEngine``."""

    def __init__(self, config: MegatronTrainerConfig, context: WorkerContext) -> None:
        check_engine(context.engine, context.role)
        check_value_objective(context, scores_tokens=True)
        self._config = config
        self._context = context
        self.device = choose_device(config.device, context, config.threads)
        files = open_model_files(context)
        self._model_path = files.directory
        self._hf_config = read_hf_config(files.directory)
        model = architecture(self._hf_config, str(files.directory))
        self._opened = files
        if trains_values(context):
            model = values.with_values(model)
            files = values.files_with_head(files, self._hf_config, model.hidden)
            values.name_classifier(self._hf_config, str(files.directory))
        self._architecture = model
        _check_ranks(config, context)
        check_split(model, config, context.role)
        self._pieces = convert.pieces(
            model, config.tensor_parallel, config.pipeline_parallel, config.expert_parallel
        )
        convert.check(files, self._pieces)
        reference = None
        if keeps_reference(config, context):
            refuse_reference_of_values(context)
            reference = open_model_files(context, config.reference_path)
            convert.check(reference, self._pieces)
        trust = config.trust_remote_code
        self._tokenizer = load_tokenizer(
            str(files.directory), model.vocabulary, trust_remote_code=trust
        )
        self.sums_exactly = False
        self.hidden_size = model.hidden
        self.layouts: frozenset[Layout] = frozenset(
            {"padded"} if config.context_parallel > 1 else {"padded", "shared"}
        )
        self.ranks = Ranks(context, self.device, always_meet=not dist.is_initialized())
        self.clock = DeviceClock(self.device)
        self._spreads = config.expert_parallel > 1
        self._stand_in = _silent(self.device)
        self._owns_groups = _join_groups(config, has_experts=model.experts is not None)
        last = parallel_state.is_pipeline_last_stage()
        first_of = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
        )
        # one rank of each replica speaks for it: the first of those that have log-probs
        self.ranks.speaks = last and first_of == (0, 0)
        model_parallel_cuda_manual_seed(context.seed % 2**31 or 1)
        self._model = build(model, config, self.device, deterministic=context.deterministic)
        self._parameters = dict(self._model.named_parameters())
        self._router_books = self._open_books()
        self._reference = self._load(None if reference is None else reference.directory)
        self._replicated = DistributedDataParallel(
            self._model.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=config.overlap_grad_reduce,
                use_distributed_optimizer=config.distributed_optimizer,
            ),
            self._model,
        )
        self._optimizer, self._state = self._make_optimizer()
        self._chunk_actions = max(
            1, _CHUNK_LOGITS * config.tensor_parallel // model.rows(config.tensor_parallel)
        )
        self._schedule = get_forward_backward_func()
        self._model.config.finalize_model_grads_func = self._finalize
        if config.overlap_grad_reduce:
            self._model.config.no_sync_func = self._replicated.no_sync
        self.offload = Offload(context.role, context.rank, context.directory)

    # -- opening -----------------------------------------------------------------------------------

    def _load(self, reference: Path | None) -> dict[str, Tensor]:
        """Fills the model from its directory; returns the reference's shards in host memory.

        The reference is read through the model's parameters first, so that the device never holds
        two models. The result is empty without a reference.
        """
        if reference is not None:
            where = f"roles.{self._context.role}.config.reference_path"
            trust = self._config.trust_remote_code
            refuse_other_tokens(self._tokenizer, reference, where, trust_remote_code=trust)
        shards: dict[str, Tensor] = {}
        pieces = values.read_pieces(self._opened, self._pieces)
        if len(pieces) < len(self._pieces) and self._architecture.values:
            seed = self._context.seed
            values.fill_new_head(self._parameters, self._config.value_head_std, seed)
        for directory in dict.fromkeys((reference or self._model_path, self._model_path)):
            convert.load(directory, pieces, self._parameters)
            if directory == reference:
                shards = {
                    name: parameter.detach().to("cpu", copy=True)
                    for name, parameter in self._parameters.items()
                }
        return shards

    def _make_optimizer(self) -> tuple[Any, OptimizerState]:
        config = self._config
        chained = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=0.0,
                params_dtype=DTYPES[config.dtype],
                bf16=config.dtype == "bfloat16",
                use_distributed_optimizer=config.distributed_optimizer,
            ),
            [self._replicated],
        )
        parts = chained.chained_optimizers  # of a model with experts there are two
        state = OptimizerState(parts, self._parameters)
        if isinstance(parts[0].optimizer, torch.optim.AdamW):
            for part in parts:
                shim.mend_optimizer(part)
            # make the moments now, so that a state can be saved and loaded before the first step
            state.reset(0)
        return chained, state

    def _open_books(self) -> StageBooks | None:
        """Returns the books of the routers, and makes these known; None without experts."""
        experts = self._architecture.experts
        if experts is None:
            return None
        config = self._config
        watch = Watch(len(experts.layers), experts.count, experts.top_k, self.device)
        of_stage = self._architecture.layers // config.pipeline_parallel
        stage = parallel_state.get_pipeline_model_parallel_rank()
        places = [place for place, layer in enumerate(experts.layers) if layer // of_stage == stage]
        install(self._model, places, experts.normalises, watch)
        replays = config.router_replay != "never"
        return StageBooks(watch, self.ranks, config.router_aux_loss, replays=replays)

    def router_metrics(self) -> dict[str, float]:
        """Returns the metrics of a step's routers, over all ranks; none without experts."""
        return {} if self._router_books is None else self._router_books.metrics()

    # -- forward and backward ----------------------------------------------------------------------

    def logprobs(
        self, batches: Sequence[Batch | None], model: Literal["policy", "reference"]
    ) -> Sequence[Tensor | None]:
        """See ``TrainingEngine``.

        The last pipeline stage computes the log-probs and sends them to the other stages.
        """
        self.offload.check_awake()
        present = self._passes(batches)
        if not present:
            return [None] * len(batches)
        if model == "reference":
            self._exchange_reference()
        try:
            with torch.no_grad():
                logps: Sequence[Tensor] = self._run(present, None, "metric")
        finally:
            if model == "reference":
                self._exchange_reference()
        if self._config.pipeline_parallel > 1:
            logps = self._tell_stages(present, logps)
        parts = iter(logps)
        found: list[Tensor | None] = []
        for batch in batches:
            logp = None if batch is None and not self._spreads else next(parts)
            found.append(None if batch is None else logp)
        return found

    def _passes(self, batches: Sequence[Batch | None]) -> list[Batch]:
        """Returns the batches that this rank runs: a stand-in for each that other ranks alone have,
        where they share experts.
        """
        if not self._spreads:
            return [batch for batch in batches if batch is not None]
        return [self._stand_in if batch is None else batch for batch in batches]

    def _tell_stages(self, batches: Sequence[Batch], logps: Sequence[Tensor]) -> Sequence[Tensor]:
        """Broadcasts the last stage's log-probs, joined into one tensor; returns them by batch.

        logps: the log-probs of each batch; empty on the other stages.
        """
        sizes = [len(batch.targets) for batch in batches]
        joined = torch.cat(list(logps)) if logps else torch.empty(sum(sizes), device=self.device)
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(joined, last, group=parallel_state.get_pipeline_model_parallel_group())
        return list(joined.split(sizes))

    def _exchange_reference(self) -> None:
        """Swaps the model's weights with the reference's in host memory.

        It goes tensor by tensor, so that it needs room for one tensor more.
        """
        with torch.no_grad():
            for name, waiting in self._reference.items():
                parameter = self._parameters[name]
                current = parameter.detach().to("cpu", copy=True)
                parameter.copy_(waiting)
                waiting.copy_(current)

    def accumulate(self, batches: Sequence[Batch | None], loss: LossOf, entropy: Entropy) -> None:
        """See ``TrainingEngine``.

        Replicas may have different numbers of micro-batches, but each needs at least one: its
        backward pass takes part in the sum of gradients. A replica without any runs a stand-in
        whose gradient is zero.
        """
        self._accumulate(batches, loss, entropy)

    def accumulate_tokens(
        self, batches: Sequence[Batch | None], loss: LossOfTokens, entropy: Entropy, ids: str
    ) -> None:
        """See ``ScoresTokens``; the ranks of a replica are as in ``accumulate``."""
        self._accumulate(batches, loss_of_columns(loss), entropy, ids)

    def _accumulate(
        self, batches: Sequence[Batch | None], loss: LossOf, entropy: Entropy, ids: str = ""
    ) -> None:
        self.offload.check_awake()
        passes = self._passes(batches) or [self._stand_in]
        if self._router_books is not None:
            self._router_books.begin(batches, lambda: self._run(passes, None, "metric"))
        self._run(passes, loss, entropy, ids)

    def _run(
        self, batches: Sequence[Batch], loss: LossOf | None, entropy: Entropy, ids: str = ""
    ) -> list[Tensor]:
        """Runs the micro-batches forward, and backward too when there is a ``loss``.

        ids: the column of tokens whose log-probs are wanted too; log-probs are then float32[A, 1 +
            k], first the action's.
        Returns the log-probs of each batch on the last stage, and an empty list on the others.
        """

        def forward(turns: Iterator[Rows], model: Any) -> tuple[Tensor, Any]:
            self._context.progress()
            turn = next(turns)
            hidden = model(turn.ids, turn.positions, turn.mask, turn.uses, turn.routing)

            def loss_of(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                logp, entropies = self._outputs(turn, output, ids)
                if entropy == "metric" and entropies is not None:
                    entropies = entropies.detach()
                if loss is None or turn.batch is self._stand_in:
                    value = logp.sum() * 0.0
                else:
                    value = loss(turn.batch, logp, entropies)
                return value, torch.zeros((), dtype=torch.int, device=self.device), logp.detach()

            return hidden, loss_of

        # the schedule requires sizes, but does not use them: stages send each other the shapes
        rows, width = batches[0].ids.shape
        with self.clock.running():  # ``_finalize`` stops it before replicas meet
            logps: list[Tensor] = self._schedule(
                forward_step_func=forward,
                data_iterator=(
                    Rows(batch, self._config, has_experts=self._router_books is not None)
                    for batch in batches
                ),
                model=self._replicated,
                num_microbatches=len(batches),
                seq_length=width,
                micro_batch_size=rows,
                forward_only=loss is None,
            )
        return logps

    def _finalize(self, *arguments: Any, **options: Any) -> None:
        """Sums gradients over ranks, when all micro-batches have gone backward."""
        self.clock.stop()
        _finalize(*arguments, **options)

    def _outputs(self, rows: Rows, hidden: Tensor, ids: str) -> tuple[Tensor, Tensor | None]:
        """Returns log-probs and entropies of the batch's actions, on every rank of the last stage.

        With a value head these are the values of its states, and None.

        ids: as in ``_run``.
        """
        if self._config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False
            )
        hidden = hidden.flatten(0, 1).index_select(0, rows.predict)
        if isinstance(self._model, ValueModel):
            values_of_all = self._from_all(rows, self._model.values(hidden)[:, None])
            return values_of_all.squeeze(1), None
        logp, entropies = self._action_logp(rows, hidden, ids)
        numbers = self._from_all(rows, torch.cat([logp, entropies[:, None]], 1))
        logp = numbers[:, :-1]
        return (logp if ids else logp.squeeze(1)), numbers[:, -1]

    def _action_logp(self, rows: Rows, hidden: Tensor, ids: str) -> tuple[Tensor, Tensor]:
        """Returns log-probs float32[A, 1 + k] and entropies of the actions that this rank predicts.

        hidden: [A, D], the hidden states that predict them.
        ids: as in ``_run``; "": k is 0.
        """
        batch = rows.batch
        own_actions = rows.own_actions
        targets = batch.targets[:, None]
        if ids:
            targets = torch.cat([targets, batch.columns[ids]], 1)
        temperature = batch.temperature
        if own_actions is not None:
            targets = targets[own_actions]
            temperature = None if temperature is None else temperature[own_actions]
        group = parallel_state.get_tensor_model_parallel_group()

        def run(
            hidden: Tensor, targets: Tensor, temperature: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            logits = self._model.logits(hidden)
            return action_logp(logits, targets, temperature, self._architecture.vocabulary, group)

        return in_chunks(run, hidden, targets, temperature, self._chunk_actions)

    def _from_all(self, rows: Rows, own: Tensor) -> Tensor:
        """Returns numbers of all of the batch's actions, float32[A, n].

        With context parallelism a rank computes its own actions, and puts them between zeros for
        the others; the sum over the ranks is then whole.

        own: float32[a, n], of the actions that this rank predicts.
        """
        if rows.own_actions is None:
            return own
        place = torch.zeros(len(rows.batch.targets), own.shape[1], device=self.device)
        whole = place.index_copy(0, rows.own_actions, own)
        return sum_over(whole, parallel_state.get_context_parallel_group())

    # -- update ------------------------------------------------------------------------------------

    def update(self, rate: float, clip: float) -> float:
        """See ``TrainingEngine``."""
        self.offload.check_awake()
        optimizer = self._optimizer
        # set in every update, because a loaded state brings its own settings
        for group in optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
            group["betas"] = tuple(self._config.betas)
            group["eps"] = self._config.eps
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if math.isfinite(norm):
            if clip > 0:
                for part in optimizer.chained_optimizers:
                    clip_grad_by_total_norm_fp32(part.get_parameters(), clip, norm)
            optimizer.step_with_ready_grads()
        self.discard()
        return norm

    def discard(self) -> None:
        """See ``TrainingEngine``; asleep there are no gradients."""
        if self.offload.asleep:
            return
        self._replicated.zero_grad_buffer()
        self._optimizer.zero_grad()

    # -- weights -----------------------------------------------------------------------------------

    def weight_specs(self) -> list[TensorSpec]:
        dtype = DTYPES[self._config.dtype]
        name = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
        return [
            TensorSpec(piece.name, name, piece.shape, math.prod(piece.shape) * dtype.itemsize)
            for piece in self._pieces
        ]

    def _gathered(self) -> Iterator[tuple[convert.Piece, Tensor | None]]:
        self.offload.check_awake()
        like = next(iter(self._parameters.values()))
        pieces: Iterator[tuple[convert.Piece, Tensor | None]] = convert.gather(
            self._pieces, self._parameters.__getitem__, like
        )
        return pieces

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """See ``Trainer``.

        Rank 0 holds one whole tensor at a time; the others yield empty arrays.
        """
        for spec, (_, whole) in zip(self.weight_specs(), self._gathered(), strict=True):
            yield spec, np.empty(0, np.uint8) if whole is None else to_bytes(whole)

    def begin_save(self, directory: Path, numbers: dict[str, Any]) -> PendingSave:
        """Starts to save the state while training may go on.

        Every rank calls this, and then ``wait`` of what it returns.
        """
        self.offload.check_awake()
        if self._config.checkpoint == "whole":
            return save_whole(directory, self._pieces, self._state, numbers, self.ranks)
        return begin_save(
            directory,
            self._model,
            self._optimizer,
            numbers,
            self.ranks,
            self._context.progress,
        )

    def save(self, directory: Path, numbers: dict[str, Any]) -> None:
        """Saves the state; a trainer with other parallel sizes can load it."""
        self.begin_save(directory, numbers).wait()

    def load(self, directory: Path) -> dict[str, Any]:
        self.offload.check_awake()
        if is_distributed(directory):
            return load_state(directory, self._model, self._optimizer)
        return load_whole(directory, self._pieces, self._state)

    def save_pretrained(self, directory: Path) -> None:
        """Writes weights, config and tokenizer in Hugging Face layout."""
        try:
            write_pretrained(
                directory, self.weight_specs(), self._gathered(), writes=self.ranks.rank == 0
            )
            if self.ranks.rank == 0:
                self._hf_config.dtype = DTYPES[self._config.dtype]
                self._hf_config.save_pretrained(directory)
                copy_other_files(str(self._model_path), directory, self._tokenizer)
        finally:  # a disk that is full does not end a run
            self.ranks.wait()

    # -- sleep -------------------------------------------------------------------------------------

    def _kept(self) -> Iterator[Tensor]:
        """Yields what this rank holds from step to step: weights, optimizer and the reference.

        On an accelerator the reference is left out, since it waits in host memory anyway.
        """
        optimizer = self._optimizer
        held = [*self._parameters.values(), *self._reference.values()]
        for group in optimizer.param_groups:
            held += group["params"]  # the optimizer's own float32 weights, where it has some
        for _, state in optimizer.state.items():
            held += [state[part] for part in MOMENTS if part in state]
        yield from (tensor for tensor in held if tensor.device.type == self.device.type)

    def _gradient_buffers(self) -> Iterator[Tensor]:
        """Yields the buffers that gradients are added up in, which Megatron-Core keeps."""
        replicated = self._replicated
        for buffer in (*replicated.buffers, *replicated.expert_parallel_buffers):
            yield buffer.grad_data

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's weights, gradients, optimizer and reference, as held now."""
        return held_bytes([*self._kept(), *self._gradient_buffers()])

    def sleep(self) -> None:
        """See ``SleepsInRollout.sleep``.

        A save in the background has copied what it needs when it began.
        """
        self.discard()
        parallel_state.get_global_memory_buffer().buffer.clear()  # what only a pass needs
        self.offload.sleep(self._kept(), scratch=self._gradient_buffers())
        return_free_pages()

    def wake(self) -> None:
        """See ``SleepsInRollout.wake``."""
        self.offload.wake()

    def close(self) -> None:
        self.offload.close()
        # Megatron's hooks on gradients refer to this module from torch's C++ objects, where no
        # garbage collector sees it. What it holds, process groups with polling threads among them,
        # would stay as long as this process lives.
        vars(self._replicated).clear()
        if self._owns_groups:
            parallel_state.destroy_model_parallel()
        self.ranks.close()


def _silent(device: torch.device) -> Batch:
    """Returns a batch that stands in for none: it serves no record."""
    batch = stand_in(device)
    return replace(batch, uses=torch.zeros(batch.ids.numel(), device=device))


def _check_ranks(config: MegatronTrainerConfig, context: WorkerContext) -> None:
    replica_slots = config.traits().replica_slots
    if context.ranks % replica_slots:
        raise ConfigError(
            f"{context.ranks} slots cannot be divided into replicas of {replica_slots}.",
            where=f"roles.{context.role}.slots",
            why="A replica takes tensor_parallel x pipeline_parallel x context_parallel slots.",
        )
    for setting, why in problems_of_slots(config, context.ranks):
        raise ConfigError(f"{why}.", where=f"roles.{context.role}.config.{setting}")


def _join_groups(config: MegatronTrainerConfig, *, has_experts: bool = False) -> bool:
    """Makes Megatron-Core's process groups unless they exist; returns whether this call made them.

    Raises RuntimeError when groups of other sizes exist.
    """
    sizes = {
        "tensor": config.tensor_parallel,
        "pipeline": config.pipeline_parallel,
        "context": config.context_parallel,
        "expert": config.expert_parallel,
        "tensor of experts": 1 if has_experts else config.tensor_parallel * config.context_parallel,
    }
    if parallel_state.model_parallel_is_initialized():
        existing = {
            "tensor": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
            "context": parallel_state.get_context_parallel_world_size(),
            "expert": parallel_state.get_expert_model_parallel_world_size(),
            "tensor of experts": parallel_state.get_expert_tensor_parallel_world_size(),
        }
        if existing != sizes:
            raise RuntimeError(
                f"one process has one set of Megatron-Core's groups: {existing}, asked for {sizes}"
            )
        return False
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        # Without experts Megatron-Core makes their groups too, and requires their pipelines to be
        # those of the other groups.
        expert_tensor_parallel_size=sizes["tensor of experts"],
        order="tp-cp-ep-pp-dp",
    )
    return True


def _finalize(
    models: list[Any],
    num_tokens: Tensor | None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> None:
    """Sums gradients over ranks.

    It does not divide them by the number of tokens, because the loss is already normalised.
    """
    finalize_model_grads(
        models, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
    )
