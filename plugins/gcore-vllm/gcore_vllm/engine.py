"""Provides the generator ``vllm``, which samples with vLLM's engine in the worker's own process.

A replica of several devices has a process more for each of them. Every sample is a request of its
own, with its own seed. Samples of one prompt share its blocks in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gcore_language.end_ids import end_ids
from gcore_language.image_requests import (
    Ready,
    image_columns,
    image_media,
    load_image_config,
    make_ready,
    name_in_modules,
)
from gcore_language.images import GRID, ImageReader
from gcore_language.inbox import WeightInbox
from gcore_language.lean import import_whole
from gcore_language.model_files import ModelFiles, open_model_files
from gcore_language.prompts import (
    PromptEncoder,
    decode,
    ids_without_token,
    load_tokenizer,
    most_actions,
    stops_of,
)
from gcore_language.sequences import by_rows
from gcore_language.takes_tokens import TakesTokensByEncoder

from gcore_core.contract.columns import Columns, SampledBy
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import ABORTED, FAILED, FINISHED, TRUNCATED, TensorSpec, WeightPlan
from gcore_core.contract.weight_transfer import Offers, WeightReader
from gcore_vllm.adapter import Adapter, open_adapter, room_for
from gcore_vllm.config import VllmGeneratorConfig
from gcore_vllm.images import Showing
from gcore_vllm.pushed_adapter import PushedAdapter
from gcore_vllm.start import not_installed, start_engine

_SEED_MASK = 2**63 - 1


@dataclass(slots=True)
class _Running:
    """A sample that runs.

    ready: its request and its encoded prompt.
    engine_id: vLLM's name of it.
    sampled_by: the versions that sampled its actions.
    """

    ready: Ready
    engine_id: str
    sampled_by: SampledBy = field(default_factory=SampledBy)


class VllmGenerator(TakesTokensByEncoder):
    """A generator that samples with vLLM's engine in this process.

    See ``Generator`` and ``ReceivesWeights`` in ``gcore_core.contract.generator``.
    """

    def __init__(self, config: VllmGeneratorConfig, context: WorkerContext) -> None:
        self._config: VllmGeneratorConfig = config
        self._progress = context.progress
        files = open_model_files(context, quantised=True)
        self._tokenizer = _tokenizer_of(files, config)
        self._ends = end_ids(files.directory, files.embedded, self._tokenizer)
        self._encoder = PromptEncoder(self._tokenizer, self._ends, config.chat_template_kwargs)
        shapes = files.shapes
        trust = config.trust_remote_code
        self._reader: ImageReader | None = None
        if (image_config := load_image_config(files, trust_remote_code=trust)) is not None:
            self._reader = ImageReader(str(files.directory), image_config, trust_remote_code=trust)
            self._showing = Showing(image_config)
            shapes = {name_in_modules(name): shape for name, shape in shapes.items()}
        adapter = open_adapter(config.lora_path, shapes) if config.lora_path else None
        self._pushed: PushedAdapter | None = None
        if config.lora_rank:
            self._pushed = PushedAdapter(context, files.directory, shapes)
            directory = self._pushed.directory
            adapter = Adapter(directory=directory, max_rank=room_for(config.lora_rank))
        self._engine = start_engine(config, context, files, adapter, image_config)
        self._adapter = adapter.request() if adapter else None
        if self._pushed is not None:
            self._adapter = self._pushed.request()
        model = self._engine.model_config
        self._context_length = model.max_model_len
        self._running: dict[str, _Running] = {}
        self._ended: list[Finished] = []
        self._count = 0
        self._inbox = WeightInbox(context.role, shapes)
        never = ids_without_token(self._tokenizer, files.embedded, self._ends)
        if config.top_p < 1 or config.top_k or never:
            self._workers("gcore_log_probs_of_all_tokens", never)

    @property
    def version(self) -> int:
        """The version of the weights that vLLM holds."""
        return self._inbox.version

    # -- sampling ----------------------------------------------------------------------------------

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See ``Generator.submit``.

        Requests of one ordinal have one prompt, which is encoded once.
        """
        fitting, failed = make_ready(
            self._encoder, requests, self._context_length, self.version, self._reader
        )
        self._ended += failed
        prompts: dict[int, dict[str, Any]] = {}
        for ready in fitting:
            name = str(self._count)
            self._count += 1
            ordinal = ready.request.ordinal
            if ordinal not in prompts:
                prompts[ordinal] = self._prompt(ready)
            parameters = self._parameters(ready.request, ready.room)
            engine_id = self._engine.add_request(
                name, prompts[ordinal], parameters, lora_request=self._adapter
            )
            self._running[name] = _Running(ready, engine_id)

    def _prompt(self, ready: Ready) -> dict[str, Any]:
        """Returns the prompt as vLLM takes it."""
        if ready.images is not None:
            return self._showing.input(ready.prompt, ready.images)
        return {"type": "token", "prompt_token_ids": ready.prompt.tolist()}

    def _parameters(self, request: SampleRequest, room: int) -> Any:
        """Returns vLLM's sampling parameters of a request.

        room: tokens that the context has left behind the prompt.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        config = self._config
        stop = stops_of(request, config.stop)
        return SamplingParams(
            temperature=0.0 if request.greedy else config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=request.seed & _SEED_MASK,
            max_tokens=most_actions(request, config.max_new_tokens, room),
            stop=stop or None,
            include_stop_str_in_output=True,
            stop_token_ids=self._ends,
            detokenize=bool(stop),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def step(self) -> list[Finished]:
        """See ``Generator.step``: one step of vLLM's scheduler."""
        self._inbox.check_idle()
        finished = self._ended
        self._ended = []
        if self._running:
            if self._engine.has_unfinished_requests():  # else no step brings these samples further
                self._progress()
            ended = [output for output in self._engine.step() if output.finished]
            finished += self._finish(
                [(self._running.pop(o.request_id), o.outputs[0]) for o in ended]
            )
        return finished

    def _finish(self, ended: Sequence[tuple[_Running, Any]]) -> list[Finished]:
        """Makes the results of requests that ended.

        ended: each with vLLM's CompletionOutput.
        """
        texts = decode(self._tokenizer, [output.token_ids for _, output in ended])
        return [
            self._record(running, output, text)
            for (running, output), text in zip(ended, texts, strict=True)
        ]

    def _record(self, running: _Running, output: Any, text: str) -> Finished:
        """Makes the result of one request from vLLM's CompletionOutput and its decoded text."""
        status, reason = _status(output.finish_reason, output.stop_reason)
        columns = self._columns(running, output, text) if status != FAILED else {}
        return Finished(
            request=running.ready.request,
            status=status,
            versions=(running.sampled_by.first(self.version), self.version),
            columns=columns,
            reason=reason,
            media=image_media(running.ready.images) if status != FAILED else {},
        )

    def _columns(self, running: _Running, output: Any, text: str) -> Columns:
        """Returns a record's columns."""
        ids = output.token_ids
        versions = running.sampled_by.columns(len(ids), self.version)
        greedy = running.ready.request.greedy or self._config.temperature == 0
        return {
            "prompt_ids": running.ready.prompt,
            "action_ids": np.array(ids, np.int32),
            "logp": np.array(output.logprobs.logprobs if ids else [], np.float32),
            "action_mask": np.ones(len(ids), np.uint8),
            "temperature": np.array(1.0 if greedy else self._config.temperature, np.float32),
            "text": np.frombuffer(text.encode(), np.uint8),
            **versions,
        } | image_columns(running.ready.images)

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        """See ``Generator.abort``.

        A sample that has not begun ends without actions. An unknown key is ignored.
        """
        from vllm.v1.engine import FinishReason

        aborted_keys = set(keys)
        requests = {name: running.ready.request for name, running in self._running.items()}
        names = [
            name
            for name, request in requests.items()
            if (request.ordinal, request.sample) in aborted_keys
        ]
        ended = []
        for running in map(self._running.pop, names):
            # vLLM's own abort hands over the actions so far through a queue, which the engine in
            # this process does not have. So they are taken from its state first.
            state = self._engine.output_processor.request_states[running.engine_id]
            output = state.make_request_output([], None, FinishReason.ABORT, None)
            self._engine.abort_request([running.engine_id], internal=True)
            ended.append((running, output.outputs[0]))
        return self._finish(ended)

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        """Returns float32[A] of each record's actions; see ``ScoresLogprobs.logprobs``.

        vLLM reads prompt and actions as a prompt and tells the log-probs of its tokens. Samples
        that run go on meanwhile. Raises ContractError for records with images, for one that leaves
        no room for a further token in the context, and where samples run and the temperature is not
        1.
        """
        self._inbox.check_idle()
        return by_rows(records, self._logprobs_of_rows)

    def _logprobs_of_rows(self, records: Sequence[Columns]) -> list[np.ndarray]:
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(records)
        by_temperature: dict[float, list[int]] = {}
        for place, record in enumerate(records):
            self._check_scorable(record)
            if len(record["action_ids"]):
                by_temperature.setdefault(float(record["temperature"]), []).append(place)
        for temperature, places in by_temperature.items():
            if temperature != 1 and self._running:
                raise ContractError(
                    f"log-probs at temperature {temperature:g} are asked for while samples run.",
                    where="logprobs",
                )
            self._workers("gcore_divide_logits", temperature)
            try:
                scored = self._score([records[place] for place in places])
            finally:
                self._workers("gcore_divide_logits", 1.0)
            for place, logp in zip(places, scored, strict=True):
                found[place] = logp
        return found

    def _check_scorable(self, record: Columns) -> None:
        """Raises ContractError for a record whose log-probs vLLM cannot tell."""
        length = len(record["prompt_ids"]) + len(record["action_ids"])
        problem = ""
        if GRID in record:
            problem = "log-probs of records with images are asked for without their images."
        elif length >= self._context_length:
            problem = f"a record of {length} tokens leaves no room in {self._context_length}."
        if problem:
            raise ContractError(problem, where="logprobs")

    def _score(self, records: Sequence[Columns]) -> list[np.ndarray]:
        """Returns the log-probs of each record's actions; each record has some."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,  # of the prompt's own tokens alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        names = {f"score-{self._count + place}": place for place in range(len(records))}
        self._count += len(records)
        for name, place in names.items():
            ids = [*records[place]["prompt_ids"].tolist(), *records[place]["action_ids"].tolist()]
            prompt = {"type": "token", "prompt_token_ids": ids}
            self._engine.add_request(name, prompt, parameters, lora_request=self._adapter)
        found: dict[int, np.ndarray] = {}
        while len(found) < len(records):
            self._progress()
            ended = [output for output in self._engine.step() if output.finished]
            for output in (output for output in ended if output.request_id in names):
                place = names[output.request_id]
                actions = records[place]["action_ids"].tolist()
                told = output.prompt_logprobs[-len(actions) :]
                logps = [
                    of_place[token].logprob for of_place, token in zip(told, actions, strict=True)
                ]
                found[place] = np.array(logps, np.float32)
            sampled = [output for output in ended if output.request_id not in names]
            self._ended += self._finish(
                [(self._running.pop(o.request_id), o.outputs[0]) for o in sampled]
            )
        return [found[place] for place in range(len(records))]

    def close(self) -> None:
        """Forgets all samples and ends the engine."""
        self._running.clear()
        self._engine.engine_core.shutdown()
        if self._pushed is not None:
            self._pushed.close()

    # -- weights -----------------------------------------------------------------------------------

    def begin_weights(self, plan: WeightPlan) -> None:
        """See ``ReceivesWeights.begin_weights``.

        The tensors must be those of the model directory; their dtypes may differ.
        """
        expected = self._pushed.begin(plan) if self._pushed is not None else None
        self._inbox.begin(plan, expected)
        if expected is None:
            self._workers("gcore_begin_weights")

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        """See ``ReceivesWeights.load_weights``. Each tensor may come once in a push."""
        taken = self._inbox.take(tensors)
        if self._pushed is None or self._pushed.opened is None:
            self._workers("gcore_load_weights", taken)
            return
        for spec, content in taken:
            self._pushed.load(spec, content)

    def commit_weights(self, plan: WeightPlan) -> None:
        """See ``ReceivesWeights.commit_weights``.

        Prompts and actions of samples that run are read again under the new weights. Raises a
        mismatch when vLLM loaded nothing into one of its parameters, or keeps cached keys and
        values.
        """
        self._inbox.complete()
        if self._pushed is None or self._pushed.opened is None:
            self._commit_whole()
        else:
            self._pushed.write()
            if not self._engine.add_lora(self._pushed.request(in_place=True)):
                raise self._inbox.mismatch("vLLM did not load the adapter.")
        self._forget_cache()
        for running in self._running.values():
            running.sampled_by.pushed(self._actions(running), self.version)
        self._inbox.commit(plan.version)

    def _commit_whole(self) -> None:
        """Has vLLM take whole weights into use; see ``commit_weights``."""
        if untouched := sorted(set().union(*self._workers("gcore_commit_weights"))):
            raise self._inbox.mismatch(
                f"vLLM loaded nothing into {untouched[0]}.",
                why=f"{len(untouched)} of its parameters did not change.",
                tensor=untouched[0],
            )

    def push_offers(self) -> Offers:
        """See ``ReceivesDevice.push_offers``; empty for an engine of several devices.

        Its devices belong to other processes.
        """
        from gcore_language.device_push import offers_of

        if self._engine.vllm_config.parallel_config.world_size > 1:
            return {}
        return offers_of(self._workers("gcore_device")[0])

    def push_reader(self, transport: str, receiver: int) -> WeightReader:
        """See ``ReceivesDevice.push_reader``."""
        from gcore_language.device_push import DeviceReader

        return DeviceReader(self, transport, receiver, self._workers("gcore_device")[0])

    def _forget_cache(self) -> None:
        """Drops keys, values and encoded images of the old weights, also those of running samples.

        Raises a mismatch when vLLM keeps some.
        """
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise self._inbox.mismatch(
                "vLLM kept keys and values of the old weights.", todo="Push all tensors again."
            )
        if self._reader is not None:
            self._engine.reset_encoder_cache()

    def _actions(self, running: _Running) -> int:
        """Returns how many actions of this sample vLLM has sampled."""
        state = self._engine.output_processor.request_states[running.engine_id]
        return int(state.detokenizer.num_output_tokens())

    def _workers(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of ``WorkerExtension`` on every device and returns each one's result."""
        answers: list[Any] = self._engine.collective_rpc(method, args=args)
        return answers


def _status(finish_reason: str, stop_reason: int | str | None) -> tuple[str, str]:
    """Turns vLLM's reasons into a record's status and reason.

    stop_reason: the stop string that was found; None or a token's number at an end token.
    """
    if finish_reason == "stop":
        return FINISHED, "stop" if isinstance(stop_reason, str) else ""
    if finish_reason == "length":
        return TRUNCATED, "length"
    if finish_reason == "abort":
        return ABORTED, ""
    return FAILED, f"engine_{finish_reason}"


def _tokenizer_of(files: ModelFiles, config: VllmGeneratorConfig) -> Any:
    """Loads the model's tokenizer. Raises PluginBroken when it needs a package that is not
    there.
    """
    trust = config.trust_remote_code
    try:
        import_whole()
        return load_tokenizer(str(files.directory), files.embedded, trust_remote_code=trust)
    except ImportError as error:
        raise not_installed(error) from error
