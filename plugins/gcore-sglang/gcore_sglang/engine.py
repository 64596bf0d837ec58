"""Provides the generator ``sglang``, which samples with SGLang's server over HTTP.

Samples that are submitted together go in one request and end one by one. Samples of one prompt
share its keys and values in SGLang's radix cache.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gcore_language.end_ids import end_ids
from gcore_language.image_requests import (
    Ready,
    image_columns,
    image_media,
    load_image_config,
    make_ready,
    name_in_checkpoint,
    name_in_modules,
)
from gcore_language.images import ImageReader
from gcore_language.inbox import WeightInbox
from gcore_language.model_files import ModelFiles, open_model_files
from gcore_language.model_places import position_limit
from gcore_language.prompts import (
    PromptEncoder,
    decode,
    ids_without_token,
    load_tokenizer,
    most_actions,
    stops_of,
)
from gcore_language.pushed_adapter import PushedAdapter
from gcore_language.sequences import by_rows
from gcore_language.settings import threads_of
from gcore_language.takes_tokens import TakesTokensByEncoder
from msgspec import structs

from gcore_core.contract.columns import Columns, column_of_versions
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import WorkerError
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import ABORTED, FAILED, FINISHED, TRUNCATED, TensorSpec, WeightPlan
from gcore_sglang.arguments import ARGUMENTS, lora_arguments
from gcore_sglang.buckets import bucket_directory
from gcore_sglang.client import Client, Event, Refused, Unreachable
from gcore_sglang.config import SglangGeneratorConfig
from gcore_sglang.parts import action_versions, joined
from gcore_sglang.pixels import PixelFiles, check_patches
from gcore_sglang.scoring import check_scorable, scored, scoring_body
from gcore_sglang.server import Server

log = logging.getLogger(__name__)

_SEED_MASK = 2**63 - 1
#: How long a step waits for something to happen once a running sample has an action.
_STEP_S = 0.05
#: How long a step waits before any running sample has an action.
_FIRST_S = 2.0
#: How long SGLang may take to abort samples, and how long after one request comes the next.
_ABORT_S = 60.0
_ABORT_AGAIN_S = 0.1
# SGLang may refuse for so long to forget its cache, and is asked again so soon.
_FLUSH_S = 10.0
_FLUSH_AGAIN_S = 0.05
#: How long SGLang's process may take to be seen ended after a connection broke.
_GRACE_S = 5.0
#: Tokens of the context that SGLang keeps for itself, with room to spare.
_KEPT_TOKENS = 8
#: Tokens of context that SGLang's own first sample needs.
_FIRST_TOKENS = 64
#: Actions between two messages about a sample, which show that it goes on. Few are sent, because
#: each has all actions so far.
_STREAM_INTERVAL = 1024


class SglangGenerator(TakesTokensByEncoder):
    """A generator that samples with SGLang's server over HTTP.

    See ``Generator`` and ``ReceivesWeights`` in ``gcore_core.contract.generator``.
    """

    def __init__(self, config: SglangGeneratorConfig, context: WorkerContext) -> None:
        ARGUMENTS.check_set_here(context.engine, context.role)
        self._config: SglangGeneratorConfig = config
        self._context = context
        files = open_model_files(context, quantised=True)
        self._tokenizer = load_tokenizer(
            str(files.directory),
            files.embedded,
            trust_remote_code=config.trust_remote_code,
        )
        self._ends = end_ids(files.directory, files.embedded, self._tokenizer)
        self._encoder = PromptEncoder(self._tokenizer, self._ends, config.chat_template_kwargs)
        shapes = files.shapes
        trust = config.trust_remote_code
        self._reader: ImageReader | None = None
        if (image_config := load_image_config(files, trust_remote_code=trust)) is not None:
            self._reader = ImageReader(str(files.directory), image_config, trust_remote_code=trust)
            check_patches(image_config, str(files.directory))
            shapes = {name_in_modules(name): shape for name, shape in shapes.items()}
        self._inbox = WeightInbox(context.role, shapes)
        self._pushed: PushedAdapter | None = None
        self._adapter: str | None = None  # SGLang's name of the last one that was pushed
        self._adapters = 0  # pushed so far
        self._parts: dict[str, dict[str, Any]] = {}  # running samples' answers before an adapter
        self._running: dict[str, Ready] = {}
        self._unsent: dict[str, dict[str, Any]] = {}  # bodies of running ones; the next step's
        self._begun: set[str] = set()  # those running that have an action
        self._ended: list[Finished] = []  # to be given by the next step
        self._count = 0
        length = _context_length(config, files)
        self._server = Server(
            _arguments(config, context, files, length) | lora_arguments(config.lora_rank, shapes),
            context,
            threads=threads_of(
                config.threads,
                context,
                files.directory,
                processes=max(1, len(context.devices)),
            ),
            connections=2 * config.max_batch,
            never=ids_without_token(self._tokenizer, files.embedded, self._ends),
        )
        self._pixels = PixelFiles(self._server.private)
        try:
            self._client: Client = self._server.start(config.start_timeout_s)
            server_info = json.loads(self._client.call("GET", "/server_info"))
            # After the start: a server whose port was taken has removed what lay in the directory.
            if config.lora_rank:
                directory = self._server.private / "adapter"
                directory.mkdir(mode=0o700)
                self._pushed = PushedAdapter(context, files.directory, shapes, directory=directory)
        except BaseException:
            self._server.close()
            raise
        self._context_length = min(
            length or server_info["max_req_input_len"], server_info["max_req_input_len"]
        )

    @property
    def version(self) -> int:
        """The version of the weights that SGLang holds."""
        return self._inbox.version

    # -- sampling ----------------------------------------------------------------------------------

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See ``Generator.submit``."""
        fitting, failed = make_ready(
            self._encoder, requests, self._context_length, self.version, self._reader
        )
        self._ended += failed
        for ready in fitting:
            self._queue(ready)

    def _queue(self, ready: Ready, part: dict[str, Any] | None = None) -> None:
        """Has the next step send a sample.

        part: SGLang's answer so far, from which the sample goes on; None: it has not begun.
        """
        rid = self._next_id()
        self._running[rid] = ready
        body = self._unsent[rid] = self._body(ready)
        if part is not None:
            self._parts[rid] = part
            body["input_ids"] += part["output_ids"]
            body["sampling_params"]["max_new_tokens"] -= len(part["output_ids"])

    def _next_id(self) -> str:
        """Returns SGLang's id of the next request.

        All ids have one length, because SGLang aborts every sample whose id begins with the one
        that is named.
        """
        self._count += 1
        return f"{self._count:012}"

    def _body(self, ready: Ready) -> dict[str, Any]:
        """Returns the body of ``/generate`` for a sample; all bodies have the same keys."""
        body: dict[str, Any] = {
            "input_ids": ready.prompt.tolist(),
            "sampling_params": self._parameters(ready.request, ready.room),
            "return_logprob": True,
            "logprob_start_len": -1,
        } | self._more()
        if ready.images is not None:
            body["image_data"] = [self._pixels.show(ready.images)]
        return body

    def _more(self) -> dict[str, Any]:
        """Returns what bodies have for this model alone: no images, and the present adapter."""
        more: dict[str, Any] = {} if self._reader is None else {"image_data": []}
        return more if self._pushed is None else {**more, "lora_path": self._adapter}

    def _send(self) -> None:
        """Sends the samples that were submitted since the last step.

        SGLang goes on by itself, so what is sent earlier could have actions before the first step,
        and a push before it would come too late.
        """
        if self._unsent:
            self._client.sample(self._unsent)
            self._unsent = {}

    def _parameters(self, request: SampleRequest, room: int) -> dict[str, Any]:
        """Returns SGLang's sampling parameters of a request.

        room: tokens that the context has left behind the prompt.
        """
        config = self._config
        return {
            "temperature": 0.0 if request.greedy else config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k or -1,
            "sampling_seed": request.seed & _SEED_MASK,
            "max_new_tokens": most_actions(request, config.max_new_tokens, room),
            "stop": stops_of(request, config.stop) or None,
            "stop_token_ids": self._ends,
            "stream_interval": _STREAM_INTERVAL,
        }

    def step(self) -> list[Finished]:
        """See ``Generator.step``; waits a moment for samples that end."""
        self._inbox.check_idle()
        finished = self._ended
        self._ended = []
        self._send()
        if self._running:
            wait_s = 0.0 if finished else _STEP_S if self._begun else _FIRST_S
            events = self._client.wait(wait_s)
            if events:
                self._context.progress()
            else:
                self._server.check()
            finished += self._finish(self._ends_of(events))
        return finished

    def _ends_of(self, events: Sequence[Event]) -> list[tuple[Ready, Event]]:
        """Returns the samples that ended, each with its last event.

        Raises WorkerDied when SGLang has ended, WorkerError when only its connection broke off.
        """
        ended = []
        for event in events:
            if event.lost:
                self._server.check(_GRACE_S)
                raise WorkerError(
                    "the connection to SGLang broke during an answer.",
                    where=f"roles.{self._context.role}",
                    why=event.error,
                )
            if not event.ended:
                self._begun.add(event.rid)
                continue
            self._begun.discard(event.rid)
            ready = self._running.pop(event.rid)
            if ready.images is not None:
                self._pixels.release(ready.images)
            if (part := self._parts.pop(event.rid, None)) is not None:
                event = replace(event, answer=joined(part, event.answer))
            ended.append((ready, event))
        return ended

    def _finish(
        self, ended: Sequence[tuple[Ready, Event]], *, aborted: bool = False
    ) -> list[Finished]:
        """Makes the results of samples that ended.

        aborted: whether they were aborted, whatever SGLang says of their ends.
        """
        texts = decode(self._tokenizer, [event.answer.get("output_ids", []) for _, event in ended])
        finished = []
        for (ready, event), text in zip(ended, texts, strict=True):
            if aborted:
                status = ABORTED
                reason = ""
            elif event.error:
                log.warning("SGLang refuses a sample: %s", event.error)
                status = FAILED
                reason = "engine_refused"
            else:
                status, reason = _status(event.answer["meta_info"]["finish_reason"])
            finished.append(
                self._failed(ready.request, reason)
                if status == FAILED
                else self._record(ready, event.answer, text, status, reason)
            )
        return finished

    def _failed(self, request: SampleRequest, reason: str) -> Finished:
        """Makes the result of a request that failed."""
        return Finished(
            request=request, status=FAILED, versions=(self.version, self.version), reason=reason
        )

    def _record(
        self, ready: Ready, answer: Mapping[str, Any], text: str, status: str, reason: str
    ) -> Finished:
        """Makes the result of a sample that SGLang has answered."""
        sampled = action_versions(answer, self.version)
        if len(sampled) != len(answer.get("output_ids", [])):
            raise WorkerError(
                "SGLang did not name the weights version of each action that it sampled.",
                where=f"roles.{self._context.role}",
            )
        first, last = (int(sampled[i]) if len(sampled) else self.version for i in (0, -1))
        columns = {**self._columns(ready, answer, text), **column_of_versions(sampled)}
        return Finished(
            request=ready.request,
            status=status,
            versions=(first, last),
            columns=columns,
            reason=reason,
            media=image_media(ready.images),
        )

    def _columns(self, ready: Ready, answer: Mapping[str, Any], text: str) -> Columns:
        """Returns a record's columns. Raises WorkerError when log-probs are of other tokens."""
        ids = answer.get("output_ids", [])
        token_logprobs = answer.get("meta_info", {}).get("output_token_logprobs", [])[: len(ids)]
        if [token for _, token, _ in token_logprobs] != ids:
            raise WorkerError(
                "SGLang gave log-probs of other tokens than it sampled.",
                where=f"roles.{self._context.role}",
            )
        greedy = ready.request.greedy or self._config.temperature == 0
        return {
            "prompt_ids": ready.prompt,
            "action_ids": np.array(ids, np.int32),
            # A softmax may round to more than 1, and its logarithm to more than 0.
            "logp": np.minimum(np.array([logp for logp, _, _ in token_logprobs], np.float32), 0),
            "action_mask": np.ones(len(ids), np.uint8),
            "temperature": np.array(1.0 if greedy else self._config.temperature, np.float32),
            "text": np.frombuffer(text.encode(), np.uint8),
        } | image_columns(ready.images)

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        """See ``Generator.abort``.

        A sample that has not begun ends without actions. An unknown key is ignored. Raises
        WorkerError when SGLang has not aborted all of them after ``_ABORT_S``.
        """
        aborted_keys = set(keys)
        requests = {rid: ready.request for rid, ready in self._running.items()}
        rids = {
            rid
            for rid, request in requests.items()
            if (request.ordinal, request.sample) in aborted_keys
        }
        return self._finish(self._stop(rids), aborted=True) if rids else []

    def _stop(self, rids: set[str]) -> list[tuple[Ready, Event]]:
        """Has samples end where they are; returns each with its last event.

        Raises WorkerError when SGLang has not aborted all of them after ``_ABORT_S``.
        """
        stopped = self._ends_of(self._unsend(rids))
        self._client.withdraw(sorted(rids))
        until_s = time.monotonic() + _ABORT_S
        while pending := rids & self._running.keys():
            if time.monotonic() > until_s:
                raise WorkerError(
                    f"SGLang did not abort {len(pending)} samples in {_ABORT_S:.0f} s.",
                    where=f"roles.{self._context.role}",
                )
            # Asked again each time, because SGLang ignores ids that have not reached it yet. The
            # last ids come first: they may not have begun, and are then aborted before they do.
            try:
                names = [self._client.sent_as(rid) for rid in sorted(pending, reverse=True)]
                self._client.call_each("/abort_request", [{"rid": name} for name in names])
            except Unreachable as error:
                raise self._no_answer(error) from error
            events = self._client.wait(_ABORT_AGAIN_S)
            mine = [event for event in events if event.rid in rids]
            others = [event for event in events if event.rid not in rids]
            stopped += self._ends_of(mine)
            self._ended += self._finish(self._ends_of(others))
        return stopped

    def _unsend(self, rids: set[str]) -> list[Event]:
        """Takes back the samples among these that no step has sent; returns their ends."""
        taken = sorted(rids & self._unsent.keys())
        for rid in taken:
            del self._unsent[rid]
        return [Event(rid, {}) for rid in taken]

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        """Returns float32[A] of each record's actions; see ``ScoresLogprobs.logprobs``.

        Samples that run go on meanwhile. Raises ContractError for records with images and for one
        that is longer than the context, WorkerError when SGLang refuses one.
        """
        self._inbox.check_idle()
        return by_rows(records, self._logprobs_of_rows)

    def _logprobs_of_rows(self, records: Sequence[Columns]) -> list[np.ndarray]:
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(records)
        places: dict[str, int] = {}
        for place, record in enumerate(records):
            check_scorable(record, self._context_length)
            if len(record["action_ids"]):
                places[self._next_id()] = place
        if places:
            self._client.sample(
                {rid: scoring_body(records[at]) | self._more() for rid, at in places.items()}
            )
        # All are waited for, also after one that failed: later steps cannot place their answers.
        answers: dict[int, Event] = {}
        while len(answers) < len(places):
            events = self._client.wait(_STEP_S)
            if events:
                self._context.progress()
            else:
                self._server.check()
            mine = [event for event in events if event.rid in places]
            others = [event for event in events if event.rid not in places]
            self._ended += self._finish(self._ends_of(others))
            answers |= {places[event.rid]: event for event in mine if event.ended}
        for place, event in sorted(answers.items()):
            if event.error:
                raise self._not_scored(event)
            found[place] = scored(records[place], event.answer)
        return found

    def _not_scored(self, event: Event) -> WorkerError:
        """Returns the error for actions that SGLang did not score.

        Raises WorkerDied if it has ended.
        """
        if event.lost:
            self._server.check(_GRACE_S)
        return WorkerError(
            "SGLang did not score actions that it was given.",
            where=f"roles.{self._context.role}",
            why=event.error,
        )

    def close(self) -> None:
        """Forgets all samples and ends the server."""
        self._running.clear()
        self._client.close()
        self._server.close()

    # -- weights -----------------------------------------------------------------------------------

    def begin_weights(self, plan: WeightPlan) -> None:
        """See ``ReceivesWeights.begin_weights``.

        The tensors must be those of the model directory, or with ``lora_rank`` those of an adapter;
        their dtypes may differ. Samples that run go back to SGLang's queue and lose their cached
        keys and values. During the push of an adapter they go on.
        """
        if self._pushed is not None:
            self._inbox.begin(plan, self._shapes_of_adapter(self._pushed, plan))
            return
        self._inbox.begin(plan)
        self._call("/pause_generation", {"mode": "retract"})

    def _shapes_of_adapter(
        self, pushed: PushedAdapter, plan: WeightPlan
    ) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes of the tensors that an adapter's plan must have.

        Raises WeightMismatch for an adapter that does not fit and for whole weights.
        """
        expected = pushed.begin(plan)
        if expected is None:
            raise self._inbox.mismatch(
                "whole weights come, and SGLang takes adapters alone.",
                why="Where it has room for adapters it does not find its weights by their names.",
                todo=f"Set roles.{self._context.role}.config.lora_rank: 0.",
            )
        room = self._config.lora_rank
        if plan.adapter is not None and plan.adapter.rank > room:
            raise self._inbox.mismatch(
                f"the adapter has rank {plan.adapter.rank}, and SGLang keeps room for {room}.",
                todo=f"Set roles.{self._context.role}.config.lora_rank: {plan.adapter.rank}.",
            )
        return expected

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        """See ``ReceivesWeights.load_weights``.

        SGLang reads the tensors from a file that lies in shared memory. Raises a mismatch, which
        names the first tensor, when SGLang refuses the file.
        """
        bucket = self._inbox.take(tensors)
        if self._pushed is not None:
            for spec, content in bucket:
                self._pushed.load(spec, content)
            return
        if self._reader is not None:
            bucket = [
                (structs.replace(spec, name=name_in_checkpoint(spec.name)), array)
                for spec, array in bucket
            ]
        if not bucket:
            return
        with bucket_directory(self._server.private, bucket) as directory:
            body = {
                "model_path": str(directory),
                "load_format": "safetensors",
                "flush_cache": False,
            }
            try:
                self._call("/update_weights_from_disk", body, timeout_s=self._config.push_timeout_s)
            except Refused as error:
                raise self._inbox.mismatch(
                    (
                        f"SGLang does not take tensor {bucket[0][0].name} or one of the "
                        f"{len(bucket) - 1} after it."
                    ),
                    why=str(error),
                    tensor=bucket[0][0].name,
                ) from error

    def commit_weights(self, plan: WeightPlan) -> None:
        """See ``ReceivesWeights.commit_weights``.

        The cache is dropped, so prompts and actions of samples that run are read again under the
        new weights.
        """
        self._inbox.complete()
        if self._pushed is None:
            self._forget_cache()
        else:
            self._change_adapter(self._pushed)
        # By default SGLang aborts all samples for a new version.
        self._call(
            "/update_weight_version",
            {"new_version": str(plan.version), "abort_all_requests": False},
        )
        self._inbox.commit(plan.version)
        if self._pushed is None:
            self._call("/continue_generation", {})

    def _change_adapter(self, pushed: PushedAdapter) -> None:
        """Has SGLang load the adapter that has come and forget the one before.

        A request keeps its adapter to its end. So samples that run are aborted, and go on in
        requests of their own, whose prompts are all that they have so far.
        """
        pushed.write()
        self._cut_samples()
        self._forget_cache()
        self._adapters += 1
        name = f"pushed-{self._adapters}"
        try:
            self._call(
                "/load_lora_adapter", {"lora_name": name, "lora_path": str(pushed.directory)}
            )
            if self._adapter is not None:
                self._call("/unload_lora_adapter", {"lora_name": self._adapter})
        except Refused as error:
            raise self._inbox.mismatch(
                "SGLang does not take this adapter.", why=str(error)
            ) from error
        self._adapter = name
        for body in self._unsent.values():
            body["lora_path"] = name

    def _cut_samples(self) -> None:
        """Ends the requests of all samples that run, and has the next step go on with them."""
        for ready, event in self._stop(set(self._running)):
            meta = event.answer.get("meta_info", {})
            ended = (meta.get("finish_reason") or {}).get("type", "abort") != "abort"
            if event.error or ended:
                self._ended += self._finish([(ready, event)])
            else:
                self._queue(ready, dict(event.answer) if event.answer.get("output_ids") else None)

    def _forget_cache(self) -> None:
        """Has SGLang drop keys and values of the old weights. Raises a mismatch if it refuses.

        SGLang refuses while it still clears up after a sample that has just ended. So it is asked
        again, for a while.
        """
        give_up_s = time.monotonic() + _FLUSH_S
        while True:
            try:
                self._call("/flush_cache")
                return
            except Refused as error:
                if time.monotonic() > give_up_s:
                    raise self._inbox.mismatch(
                        "SGLang kept keys and values of the old weights.",
                        why=str(error),
                        todo="Push all tensors again.",
                    ) from error
            time.sleep(_FLUSH_AGAIN_S)

    def _call(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0
    ) -> str:
        """Posts a call to SGLang and returns the answer's text.

        Raises Refused when SGLang refuses it, WorkerDied when SGLang has ended, WorkerError when it
        does not answer.
        """
        try:
            return self._client.call("POST", path, body, timeout_s=timeout_s)
        except Unreachable as error:
            raise self._no_answer(error) from error

    def _no_answer(self, error: Unreachable) -> WorkerError:
        """Returns the error to raise when SGLang gave no answer. Raises WorkerDied if it ended."""
        self._server.check(_GRACE_S)
        return WorkerError(
            "SGLang does not answer.", where=f"roles.{self._context.role}", why=str(error)
        )


def _status(reason: Mapping[str, Any]) -> tuple[str, str]:
    """Turns SGLang's finish reason into a record's status and reason."""
    kind = reason["type"]
    if kind == "stop":
        return FINISHED, "stop" if isinstance(reason.get("matched"), str) else ""
    if kind == "length":
        return TRUNCATED, "length"
    return FAILED, f"engine_{kind}"


def _context_length(config: SglangGeneratorConfig, files: ModelFiles) -> int | None:
    """Returns the least of the settings' and the model's context length, in tokens.

    Returns None where neither says it.
    """
    limits = (config.context_length, position_limit(files.config))
    return min((length for length in limits if length), default=None)


def _arguments(
    config: SglangGeneratorConfig, context: WorkerContext, files: ModelFiles, length: int | None
) -> dict[str, Any]:
    """Returns the arguments of SGLang's ServerArgs; the role's ``engine:`` wins over the others.

    length: the context length in tokens; None: SGLang takes the model's.
    """
    arguments: dict[str, Any] = {
        "model_path": str(files.directory),
        "load_format": "safetensors",
        "skip_tokenizer_init": not (config.stop or context.acts),  # SGLang finds stop strings
        "trust_remote_code": config.trust_remote_code,
        "dtype": config.dtype,
        "tp_size": max(1, len(context.devices)),
        "max_running_requests": config.max_batch,
        "sampling_defaults": "openai",  # not what generation_config.json says
        "weight_version": "0",
        "log_level": "warning",
        "sleep_on_idle": True,  # else a server without work keeps a core busy
        # Replicas of a role must not draw the same samples: without deterministic inference SGLang
        # has one generator.
        "random_seed": (context.seed + 1_000_003 * context.rank) % 2**31,
    }
    if length is not None:
        arguments["context_length"] = max(length + _KEPT_TOKENS, _FIRST_TOKENS)
    if config.kv_cache_tokens is not None:
        arguments["max_total_tokens"] = config.kv_cache_tokens
    return arguments | dict(context.engine)
