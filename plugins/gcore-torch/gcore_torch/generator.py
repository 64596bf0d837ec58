"""Provides the generator ``torch``, which samples from a Hugging Face causal language model.

It keeps a batch of running samples with cached keys and values. Every call of ``step`` gives each
running sample one more token. Samples join as rows become free and leave when they end.

A sample's random numbers depend only on its seed and the place of the token in its answer. Logits,
though, are rounded differently in another batch. So ``deterministic`` also fixes which samples run
together: waiting ones are sorted, and join only when nothing runs. Then tokens repeat bit for bit.
On a CPU in float32 they do not even depend on which samples run together (see
``gcore_torch.steady``). Where that takes another forward pass over whole samples, finished ones are
held back until all that run together have finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gcore_language.adapter_push import AdapterInbox
from gcore_language.alignment import align
from gcore_language.device_push import DeviceReader, offers_of
from gcore_language.end_ids import end_ids
from gcore_language.experts import checkpoint_tensors
from gcore_language.explain import Score, explain
from gcore_language.host_memory import return_free_pages, return_large_blocks
from gcore_language.images import GRID, PIXELS, ImageReader, Images, takes_images
from gcore_language.inbox import WeightInbox
from gcore_language.model_files import open_model_files
from gcore_language.model_places import position_limit
from gcore_language.models import choose_device, load_model, refuse_engine
from gcore_language.packing import Sample, is_steady, micro_batches
from gcore_language.policy import Policy, check_layouts
from gcore_language.prompts import (
    PromptEncoder,
    decode,
    ids_without_token,
    load_tokenizer,
    most_actions,
    refuse_images,
    stops_of,
)
from gcore_language.routing import Routers, has_experts
from gcore_language.sequences import by_rows
from gcore_language.takes_tokens import TakesTokensByEncoder
from gcore_language.weights import copy_bytes, named_tensors, spec_of

from gcore_core.contract.columns import ROUTING, VERSION, Columns, SampledBy
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, ContractError, WeightMismatch
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import (
    ABORTED,
    FINISHED,
    TRUNCATED,
    TensorSpec,
    WeightPlan,
)
from gcore_core.contract.sentinel import Compared, Finding
from gcore_core.contract.weight_transfer import Offers
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.decoder import (
    Decoder,
    FusedDecoder,
    KeepingDecoder,
    TransformersDecoder,
    make_decoder,
)
from gcore_torch.graph_decoder import GraphDecoder
from gcore_torch.other_heads import changed_head, heads
from gcore_torch.products import Products
from gcore_torch.sampling import GraphSampler, choose, uniforms
from gcore_torch.sleeping import SleepingWeights
from gcore_torch.steady import NEAR, SteadyScorer, can_be_steady
from gcore_torch.steady_decoder import SteadyDecoder

_SEED_MASK = 2**64 - 1
_SCORE_TOKENS = 16384
_TRIAL_ROWS = 32


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A requested sample with its encoded prompt.

    request: as it was submitted.
    prompt: int32[P].
    limit: most actions.
    stop: texts that end it.
    images: those of the prompt; samples of one prompt share them.
    """

    request: SampleRequest
    prompt: np.ndarray
    limit: int
    stop: Sequence[str] = ()
    images: Images | None = None


class _Rows:
    """The running samples, in the decoder's order of rows.

    count: how many there are; further rows of the arrays are unused.
    waiting: what each was submitted as.
    tokens: int32[capacity, actions], the actions so far.
    logp: float32[capacity, actions], their log-probs.
    length: int64[capacity], number of actions so far.
    limit: int64[capacity], most actions.
    seed: uint64[capacity].
    greedy: bool[capacity].
    version: int64[capacity], of the weights that sampled the first action.
    sampled_by: of each running sample, the versions that sampled its actions.
    routing: of each running sample the experts of what was read of it so far, in pieces [T, L, k];
        empty lists unless the model has experts.
    """

    def __init__(self, capacity: int, actions: int) -> None:
        self.count = 0
        self.waiting: list[_Waiting] = []
        self.tokens = np.zeros((capacity, actions), np.int32)
        self.logp = np.zeros((capacity, actions), np.float32)
        self.length = np.zeros(capacity, np.int64)
        self.limit = np.zeros(capacity, np.int64)
        self.seed = np.zeros(capacity, np.uint64)
        self.greedy = np.zeros(capacity, np.bool_)
        self.version = np.zeros(capacity, np.int64)
        self.sampled_by: list[SampledBy] = []
        self.routing: list[list[np.ndarray]] = []

    def add(self, rows: Sequence[_Waiting], version: int) -> None:
        """Adds samples without actions behind the others."""
        fresh = slice(self.count, self.count + len(rows))
        self.length[fresh] = 0
        self.limit[fresh] = [row.limit for row in rows]
        self.seed[fresh] = [row.request.seed & _SEED_MASK for row in rows]
        self.greedy[fresh] = [row.request.greedy for row in rows]
        self.version[fresh] = version
        self.waiting += rows
        self.sampled_by += [SampledBy() for _ in rows]
        self.routing += [[] for _ in rows]
        self.count += len(rows)

    def append(self, tokens: np.ndarray, logp: np.ndarray) -> None:
        """Adds one action to each row: tokens int[count], logp float[count]."""
        row = np.arange(self.count)
        at = self.length[: self.count]
        self.tokens[row, at] = tokens
        self.logp[row, at] = logp
        self.length[: self.count] += 1

    def pushed(self, version: int) -> None:
        """Notes that weights come in place of those of this version."""
        lengths = self.length[: self.count].tolist()
        for sampled_by, actions in zip(self.sampled_by, lengths, strict=True):
            sampled_by.pushed(actions, version)

    def routed(self, experts: Sequence[np.ndarray]) -> None:
        """Adds the experts of what was just read of the last rows, [T, L, k] of each."""
        for pieces, piece in zip(self.routing[self.count - len(experts) :], experts, strict=True):
            pieces.append(piece)

    def reorder(self, order: np.ndarray) -> None:
        """Keeps the rows with the numbers ``order``, int64, in that order."""
        # only rows that change their place are copied; ``column[source]`` is a copy, so that rows
        # may trade places
        to = (order != np.arange(len(order))).nonzero()[0]
        source = order[to]
        for column in (
            self.tokens,
            self.logp,
            self.length,
            self.limit,
            self.seed,
            self.greedy,
            self.version,
        ):
            column[to] = column[source]
        self.waiting = [self.waiting[i] for i in order.tolist()]
        self.sampled_by = [self.sampled_by[i] for i in order.tolist()]
        self.routing = [self.routing[i] for i in order.tolist()]
        self.count = len(order)


class TorchGenerator(TakesTokensByEncoder):
    """A generator over a Hugging Face model in this process.

    It implements Generator, TakesTokens, ReceivesWeights, Fingerprints, Sleeps, ScoresLogprobs and
    ExplainsGaps of ``gcore_core.contract.generator``, and ReceivesDevice of
    ``gcore_core.contract.weight_transfer``. Raises ConfigError when the configuration asks for an
    engine or a decoder that the model cannot have.

    What computes tokens and log-probs, by attribute:

        _usual     decodes any sample: by the fused decoder (on a GPU by CUDA graphs), by
                   transformers' forward pass, or with images
        _exact     decodes short samples with the trainer's bits (``SteadyDecoder``); None where it
                   cannot
        _decoder   one of these two: that of the samples that run. It changes when none runs, and
                   where all that run are read again
        _steady    computes again what ``_usual`` has sampled, as the trainer does; None but in a
                   deterministic run on a CPU in float32
        _scorer    gives log-probs of records that others ask about; made when first asked
    """

    def __init__(self, config: TorchGeneratorConfig, context: WorkerContext) -> None:
        return_large_blocks()
        self._config: TorchGeneratorConfig = config
        self._context = context
        refuse_engine(context)
        files = open_model_files(context)
        directory = files.directory
        path = str(directory)
        trust = config.trust_remote_code
        self._tokenizer = load_tokenizer(path, files.embedded, trust_remote_code=trust)
        ends = end_ids(directory, files.embedded, self._tokenizer)
        self._encoder = PromptEncoder(self._tokenizer, ends, config.chat_template_kwargs)
        self._device = choose_device(config.device, context, config.threads)
        self._model = load_model(path, dtype=config.dtype, trust_remote_code=trust, images=True).to(
            self._device
        )
        self._reader: ImageReader | None = None
        if takes_images(self._model.config):
            if config.decoder == "fused":
                where = f"roles.{context.role}.config.decoder"
                raise ConfigError(
                    "fused is not for models that take images.", where=where, todo="Use auto."
                )
            self._reader = ImageReader(path, self._model.config, trust_remote_code=trust)
        if has_experts(self._model.config) and config.decoder == "fused":
            raise ConfigError(
                "the fused decoder computes no experts.",
                where=f"roles.{context.role}.config.decoder",
                why=f"{path} is a mixture of experts.",
                todo="Use auto.",
            )
        # whether a token ends a sample, for each token of the vocabulary
        self._ends = np.zeros(self._model.get_output_embeddings().weight.shape[0], np.bool_)
        self._ends[end_ids(directory, len(self._ends), self._tokenizer)] = True
        self._allowed = self._tokens_to_sample(ends)
        model_limit = position_limit(self._model.config.get_text_config().to_dict()) or 2**31
        self._context_length = min(config.context_length or model_limit, model_limit)
        self._steady: SteadyScorer | None = None
        if context.deterministic and can_be_steady(self._model, config, self._device.type):
            align(self._model)
            self._steady = SteadyScorer(self._model, self._device, context.role)
        self._held: list[Finished] = []  # finished samples that are not scored yet
        self._products = Products(may_pack=not context.deterministic)
        self._usual = self._make_decoder()  # decodes any sample
        self._sampler = self._make_sampler() if self._device.type == "cuda" else None
        self._exact = self._make_exact()  # decodes with the trainer's bits, short records alone
        self._decoder: Decoder = self._usual  # of the samples that run
        self._routers = Routers.of(self._model, replays=True)
        if isinstance(self._usual, TransformersDecoder):
            self._usual.routers = self._routers
        self._tensors = checkpoint_tensors(self._model)
        self._rows = _Rows(config.max_batch, config.max_new_tokens)
        self._queue: list[_Waiting] = []
        self._to_return: list[Finished] = []  # what the next ``step`` returns
        self._stale = False  # the cache of running rows is of older weights, or was dropped
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self._inbox = WeightInbox(context.role, shapes)
        self._adapter = AdapterInbox(context.role, directory, self._tensors, self._open_again)
        self._weights = SleepingWeights(
            context.role,
            named_tensors(self._model),
            discard=config.sleep == "discard",
            pushed=self._tensors,
        )
        self._scorer: Policy | None = None

    def _tokens_to_sample(self, ends: Sequence[int]) -> torch.Tensor | None:
        """Returns which ids may be sampled, bool[V]; None for all."""
        never = ids_without_token(self._tokenizer, len(self._ends), ends)
        if not never:
            return None
        allowed = torch.ones(len(self._ends), dtype=torch.bool, device=self._device)
        allowed[never] = False
        return allowed

    def _make_exact(self) -> SteadyDecoder | None:
        """Returns the decoder with the trainer's bits, if there is one for this model here."""
        if self._steady is None or not isinstance(self._usual, FusedDecoder):
            return None
        decoder = SteadyDecoder(self._model, max(self._config.max_batch, _TRIAL_ROWS))
        return decoder if self._steady.decodes_alike(decoder, len(self._ends)) else None

    def _make_decoder(self) -> KeepingDecoder:
        """Returns the decoder of this model here."""
        config = self._config
        tolerance = 1e-3 if config.dtype == "float32" else 0.5
        if config.compile == "auto" and self._context.deterministic:
            raise ConfigError(
                "compile does not go with a deterministic run.",
                where=f"roles.{self._context.role}.config.compile",
                why="that has not been tested",
                todo="Set it to never.",
            )
        may_keep = not self._context.deterministic
        in_graphs = partial(GraphDecoder, compile=config.compile == "auto", may_keep=may_keep)
        on_cpu = partial(FusedDecoder, actions=config.max_new_tokens, may_keep=may_keep)
        make_fused = in_graphs if self._device.type == "cuda" else on_cpu
        decoder: KeepingDecoder = make_decoder(
            self._model,
            config.decoder,
            config.max_batch,
            tolerance,
            self._products,
            make_fused,
            may_keep,
        )
        return decoder

    def _make_sampler(self) -> GraphSampler:
        """Returns what draws tokens on a GPU."""
        head = self._model.get_output_embeddings().weight
        config = self._config
        return GraphSampler(
            config.max_batch,
            len(head),
            head.dtype,
            self._device,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            allowed=self._allowed,
        )

    @property
    def version(self) -> int:
        """The version of the weights that sample now."""
        return self._inbox.version

    # -- sampling ----------------------------------------------------------------------------------

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queues samples; see ``Generator.submit``.

        Requests of one ordinal have the same prompt, which is encoded once. One that does not fit
        the context comes back from the next ``step`` as failed.
        """
        reader = self._reader
        images = {} if reader is None else reader.read(requests)

        def lay(request: SampleRequest, ids: np.ndarray) -> np.ndarray:
            if reader is None:
                return refuse_images(request, ids)
            return reader.lay(request.prompt, ids, images.get(request.ordinal))

        fitting, failed = self._encoder.fitting(requests, self._context_length, self.version, lay)
        self._to_return += failed
        for request, prompt, room in fitting:
            shown = images.get(request.ordinal)
            limit = most_actions(request, self.max_actions, room)
            stop = stops_of(request, self._config.stop)
            self._queue.append(_Waiting(request, prompt, limit, stop, shown))

    def step(self) -> list[Finished]:
        """Gives each running sample one more token, and those that join their first.

        Returns the samples that ended with it; see ``Generator.step``.
        """
        self._inbox.check_idle()
        self._weights.check_awake()
        finished = self._to_return
        self._to_return = []
        logits = []
        self._stale = self._stale and self._rows.count > 0
        if self._rows.count:
            logits.append(self._advance())
        if joining := self._take():
            logits.append(self._join(joining))
        if logits:
            self._sample(torch.cat(logits))
            self._context.progress()  # each running sample has an action more
            finished += self._hold(self._collect())
        return finished

    def _hold(self, finished: list[Finished]) -> list[Finished]:
        """Returns the finished samples that go out now; those to be scored wait until none run."""
        if self._steady is None or self._decoder is self._exact:
            return finished
        self._held += finished
        return [] if self._rows.count else self._release()

    def _release(self) -> list[Finished]:
        """Scores and returns the samples that were held back."""
        held, self._held = self._held, []
        self._score(held)
        return held

    def _score(self, ended: Sequence[Finished]) -> None:
        """Gives samples of a steady run the log-probs of the trainer's own forward pass.

        Actions that older weights sampled keep the log-probs of those.
        """
        if self._steady is None:
            return
        counts = [_older(one.columns, self.version) for one in ended]
        self._steady.rescore([one.columns for one in ended], counts)

    def _score_all(self) -> None:
        """Scores held and running samples while the weights that sampled them are still there."""
        if self._weights.asleep or self._weights.lacking:
            return  # it was done before the sleep
        self._to_return += self._release()
        self._score_running()

    def _score_running(self) -> None:
        """Gives what running samples of a steady run have so far the trainer's log-probs.

        Actions that older weights sampled keep the log-probs of those.
        """
        rows = self._rows
        if self._steady is None or self._decoder is self._exact or not rows.count:
            return
        columns = self._columns(np.arange(rows.count))
        self._steady.rescore(columns, [by.older for by in rows.sampled_by])
        for row, scored in enumerate(columns):
            rows.logp[row, : rows.length[row]] = scored["logp"]

    def _take(self) -> list[_Waiting]:
        """Takes the samples that join now off the queue: as many as there are free rows.

        They are sorted by what is to be read of their prompts, and by these prompts' lengths, since
        decoders read what is alike together. In deterministic runs none join while any runs.
        """
        free = self._config.max_batch - self._rows.count
        if not self._queue or free <= 0 or (self._context.deterministic and self._rows.count):
            return []
        if self._context.deterministic:
            self._queue.sort(key=lambda w: (w.request.ordinal, w.request.sample))
        joining = self._queue[:free]
        self._queue = self._queue[free:]
        return sorted(joining, key=lambda w: (self._usual.unread(w.prompt), len(w.prompt)))

    def _join(self, joining: list[_Waiting]) -> torch.Tensor:
        """Adds samples, each prompt read once; returns the logits [joining, V] of first tokens.

        The rows are in the order of prompts, not in that of ``joining``.
        """
        by_prompt: dict[tuple[bytes, int], list[_Waiting]] = {}
        for waiting in joining:
            by_prompt.setdefault((waiting.prompt.tobytes(), id(waiting.images)), []).append(waiting)
        groups = list(by_prompt.values())
        if self._exact is not None:  # none runs
            prompt = max(len(waiting.prompt) for waiting in joining)
            fed = max(waiting.limit for waiting in joining) - 1
            is_exact = is_steady(prompt, fed)
            self._decoder = self._exact if is_exact else self._usual
        self._rows.add([waiting for group in groups for waiting in group], self.version)
        logits = self._decoder.prefill(
            [group[0].prompt for group in groups],
            [len(group) for group in groups],
            [group[0].images for group in groups],
        )
        self._rows.routed(self._read_experts())
        return logits

    def _read_experts(self) -> list[np.ndarray]:
        """Returns the experts [T, L, k] of what the decoder just read of each row.

        Nothing where the model has none, or where the settings do not want them.
        """
        decoder = self._decoder
        if self._config.traits().routing and isinstance(decoder, TransformersDecoder):
            return decoder.routed
        return []

    def _advance(self) -> torch.Tensor:
        """Feeds each running sample's last token; returns the logits [B, V] of the next one."""
        rows = self._rows
        if not self._stale:
            last = rows.tokens[np.arange(rows.count), rows.length[: rows.count] - 1]
            logits = self._decoder.advance(torch.from_numpy(last.astype(np.int64)).to(self._device))
            rows.routed(self._read_experts())
            return logits
        # the weights are new or the cache was dropped: prompts and actions so far are read again
        self._stale = False
        self._decoder.clear()
        # The exact decoder has the trainer's bits only where it reads nothing but prompts.
        self._decoder = self._usual
        so_far = [
            np.concatenate([waiting.prompt, rows.tokens[i, : rows.length[i]]])
            for i, waiting in enumerate(rows.waiting)
        ]
        logits = self._decoder.prefill(
            so_far, [1] * rows.count, [waiting.images for waiting in rows.waiting]
        )
        # what was read before keeps the experts by which its actions were sampled
        rows.routed([experts[-1:] for experts in self._read_experts()])
        return logits

    def _sample(self, logits: torch.Tensor) -> None:
        """Draws the next action of every row from logits [B, V] and appends it."""
        rows = self._rows
        config = self._config
        uniform = uniforms(rows.seed[: rows.count], rows.length[: rows.count])
        greedy = rows.greedy[: rows.count]
        if self._sampler is not None:
            rows.append(*self._sampler(logits, uniform, greedy))
            return
        temperature = config.temperature
        is_exact = self._exact is not None and self._decoder is self._exact
        if is_exact and temperature not in (0, 1):  # divided, as the trainer does
            divisors = np.where(greedy, 1.0, temperature).astype(np.float32)
            logits = logits / torch.from_numpy(divisors)[:, None]
            temperature = 1.0
        tokens, logp, margins = choose(
            logits,
            torch.from_numpy(uniform).to(self._device),
            temperature,
            torch.from_numpy(greedy).to(self._device) if greedy.any() else None,
            top_p=config.top_p,
            top_k=config.top_k,
            allowed=self._allowed,
        )
        if self._steady is not None and not is_exact:
            # where rounding may have decided: drawn again, from the trainer's own forward pass
            near = (margins < NEAR).numpy()
            for row in near.nonzero()[0].tolist():
                tokens[row], logp[row], _ = choose(
                    self._steady.next_logits(rows.waiting[row].prompt, self._actions(row)),
                    torch.from_numpy(uniform[row : row + 1]),
                    config.temperature,
                    torch.from_numpy(greedy[row : row + 1]) if greedy[row] else None,
                    allowed=self._allowed,
                )
        rows.append(tokens.cpu().numpy(), logp.cpu().numpy())

    def _collect(self) -> list[Finished]:
        """Removes and returns the samples that ended with the latest token.

        They ended by an end token, by a stop string, or at their limit, which makes them TRUNCATED.
        """
        rows = self._rows
        length = rows.length[: rows.count]
        last = rows.tokens[np.arange(rows.count), length - 1]
        ended = self._ends[last]
        leaving = ended | (length >= rows.limit[: rows.count])
        stopped = self._stopped(~ended)
        leaving |= stopped
        if not leaving.any():
            return []
        finished = []
        indexes = leaving.nonzero()[0]
        for i, columns in zip(indexes.tolist(), self._columns(indexes), strict=True):
            self._park(i)
            status, reason = (
                (FINISHED, "")
                if ended[i]
                else (FINISHED, "stop")
                if stopped[i]
                else (TRUNCATED, "length")
            )
            finished.append(self._finish(i, status, reason, columns))
        rows.reorder(self._decoder.drop(leaving))
        return finished

    def _park(self, row: int) -> None:
        """Has the decoder keep what it has read of a row whose prompt was given by ids.

        The next turn of its episode begins so. The last action was not read yet. Of a mixture of
        experts older weights may have chosen some of the row's; the next turn's are to be new.
        """
        rows = self._rows
        waiting = rows.waiting[row]
        is_text = waiting.request.ids is not None and waiting.images is None
        is_fresh = rows.version[row] == self.version or not rows.routing[row]
        if self._decoder is self._usual and is_text and is_fresh:
            read = np.concatenate([waiting.prompt, self._actions(row)[:-1]])
            self._usual.park(row, read, rows.routing[row])

    def _stopped(self, candidates: np.ndarray) -> np.ndarray:
        """Returns bool[B]: which of the candidates, bool[B], have text with a stop string."""
        has_stop = np.zeros_like(candidates)
        waiting = self._rows.waiting
        may_stop = np.array([bool(row.stop) for row in waiting], np.bool_)
        indexes = (candidates & may_stop).nonzero()[0]
        if not len(indexes):
            return has_stop
        for i, text in zip(indexes.tolist(), self._decode(indexes), strict=True):
            has_stop[i] = any(stop in text for stop in waiting[i].stop)
        return has_stop

    def _actions(self, row: int) -> np.ndarray:
        """Returns the actions so far of a row, int32[A]."""
        return self._rows.tokens[row, : self._rows.length[row]]

    def _finish(self, row: int, status: str, reason: str, columns: Columns) -> Finished:
        """Makes the result of one row; its versions are those of its first and last action."""
        versions = (int(self._rows.version[row]), self.version)
        waiting = self._rows.waiting[row]
        return Finished(
            request=waiting.request,
            status=status,
            versions=versions,
            columns=columns,
            reason=reason,
            media=_media(waiting),
        )

    def _columns(self, indexes: np.ndarray) -> list[Columns]:
        """Returns the columns of the rows ``indexes``, int64, in that order.

        The temperature is the one under which ``logp`` is computed: 1 for greedy samples.
        """
        rows = self._rows
        # copies, of which the columns below are views: the rows themselves will be reused
        tokens = rows.tokens[indexes]
        logp = rows.logp[indexes]
        mask = np.ones(tokens.shape[1], np.uint8)
        cold = np.ones((), np.float32)
        warm = np.array(self._config.temperature or 1.0, np.float32)
        columns: list[Columns] = []
        for place, (i, text) in enumerate(
            zip(indexes.tolist(), self._decode(indexes), strict=True)
        ):
            actions = int(rows.length[i])
            columns.append(
                {
                    "prompt_ids": rows.waiting[i].prompt,
                    "action_ids": tokens[place, :actions],
                    "logp": logp[place, :actions],
                    "action_mask": mask[:actions],
                    "temperature": cold if rows.greedy[i] else warm,
                    "text": np.frombuffer(text.encode(), np.uint8),
                }
                | _grid(rows.waiting[i])
                | _experts(rows.routing[i])
                | rows.sampled_by[i].columns(actions, self.version)
            )
        return columns

    def _decode(self, indexes: np.ndarray) -> list[str]:
        """Returns the text of the actions so far, without the prompt, of the rows ``indexes``."""
        rows = self._rows
        return decode(
            self._tokenizer,
            [rows.tokens[i, : rows.length[i]].tolist() for i in indexes.tolist()],
        )

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        """Ends samples at once; see ``Generator.abort``.

        keys: (ordinal, sample) of each. Unknown keys are ignored.
        Returns what they have so far; a sample that has not begun has no actions. One that has
        ended, and waits to be scored, is as it ended.
        """
        aborted_keys = set(keys)
        finished = []
        still_queued = []
        for waiting in self._queue:
            request = waiting.request
            if (request.ordinal, request.sample) in aborted_keys:
                versions = (self.version, self.version)
                columns = _empty(waiting)
                media = _media(waiting)
                finished.append(
                    Finished(
                        request=request,
                        status=ABORTED,
                        versions=versions,
                        columns=columns,
                        media=media,
                    )
                )
            else:
                still_queued.append(waiting)
        self._queue = still_queued
        rows = self._rows
        leaving = np.array(
            [(w.request.ordinal, w.request.sample) in aborted_keys for w in rows.waiting], np.bool_
        )
        if leaving.any():
            indexes = leaving.nonzero()[0]
            for i, columns in zip(indexes.tolist(), self._columns(indexes), strict=True):
                finished.append(self._finish(i, ABORTED, "", columns))
            rows.reorder(self._decoder.drop(leaving))
        finished += self._abort_held(aborted_keys)
        if not rows.count:
            self._to_return += self._release()
        return finished

    def _abort_held(self, keys: set[tuple[int, int]]) -> list[Finished]:
        """Takes out those samples that have ended but are held back until they are scored."""
        kept, self._held = self._held, []
        leaving: list[Finished] = []
        for held in kept:
            is_named = (held.request.ordinal, held.request.sample) in keys
            (leaving if is_named else self._held).append(held)
        self._score(leaving)
        return leaving

    def close(self) -> None:
        """Forgets running and waiting samples."""
        self._decoder.clear()
        self._queue.clear()
        self._held.clear()

    # -- weights -----------------------------------------------------------------------------------

    def begin_weights(self, plan: WeightPlan) -> None:
        """Begins a push; see ``ReceivesWeights.begin_weights``.

        Tensors of another dtype are converted. Raises ContractError while it is asleep.
        """
        if self._weights.asleep:  # awake without weights is fine: the push brings them
            self._weights.check_awake()
        self._score_all()
        self._inbox.begin(plan, self._adapter.begin(plan))

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        """Copies tensors into the model; see ``ReceivesWeights.load_weights``."""
        for spec, array in self._inbox.take(tensors):
            if self._adapter.opened:
                self._adapter.load(spec, array)
            else:
                copy_bytes(self._tensors[spec.name], spec, array)

    def commit_weights(self, plan: WeightPlan) -> None:
        """Ends a push; see ``ReceivesWeights.commit_weights``.

        Running samples go on under the new weights. The next step reads them again.
        """
        self._inbox.complete()
        self._products.forget()
        if self._adapter.opened:  # their memory must be given back before the base is read
            return_free_pages()
        self._adapter.commit()
        self._check_tables(plan.version)
        self._weights.pushed(plan.version)
        self._stale = self._rows.count > 0
        for decoder in self._decoders():
            decoder.take_weights()
        self._rows.pushed(self.version)
        self._inbox.commit(plan.version)

    def _open_again(self) -> dict[str, torch.Tensor]:
        """Returns the weights of the model's files once more, by name, on the CPU."""
        config = self._config
        path = str(open_model_files(self._context).directory)
        trust = config.trust_remote_code
        model = load_model(path, dtype=config.dtype, trust_remote_code=trust, images=True)
        tensors = {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}
        # Modules refer to each other, so the model stays until Python looks for such circles.
        for parameter in model.parameters():
            parameter.data = torch.empty(0)
        return tensors

    def _check_tables(self, version: int) -> None:
        """Raises WeightMismatch where the decoder's tables are not those of the model.

        No push brings them, and no digest of weights sees them. Rounded to bfloat16 they change
        log-probs of short answers by less than a band.
        """
        decoder = self._usual
        wrong = decoder.differing_tables() if isinstance(decoder, FusedDecoder) else []
        if wrong:
            raise WeightMismatch(
                f"the generator samples with {wrong[0]}",
                where=f"version {version}",
                why="the model computes them in float32 from its configuration; they were lost in "
                "a sleep, or rounded by a cast of the whole model",
                todo="see what converts or frees buffers of the generator's model",
            )

    def push_offers(self) -> Offers:
        """See ``ReceivesDevice.push_offers``."""
        return offers_of(self._device)

    def push_reader(self, transport: str, receiver: int) -> DeviceReader:
        """See ``ReceivesDevice.push_reader``."""
        return DeviceReader(self, transport, receiver, self._device, self._tensors)

    def fingerprint(self) -> dict[str, int]:
        """Returns digests of its weights, in its own dtype; see ``Fingerprints.fingerprint``."""
        self._weights.check_awake()
        return self._weights.fingerprint() | self._adapter.fingerprint()

    def sleep(self) -> None:
        """Frees memory of the device; see ``Sleeps.sleep``.

        It drops the cache, and moves or drops the weights as ``config.sleep`` says.
        """
        self._inbox.check_idle()
        self._score_all()
        for decoder in self._decoders():
            decoder.release(weights=self._weights.moves_tensors)
        self._products.forget()
        if self._sampler is not None:
            self._sampler.release()
        self._stale = self._rows.count > 0
        self._weights.sleep(self.version)
        return_free_pages()

    def wake(self) -> None:
        """Takes its memory again; see ``Sleeps.wake``.

        Weights that were discarded are valid again only after a push has brought them.
        """
        self._weights.wake()
        for decoder in self._decoders():
            decoder.take_weights()

    def _decoders(self) -> list[Decoder]:
        return [self._usual] if self._exact is None else [self._usual, self._exact]

    @property
    def memory_bytes(self) -> int:
        """Bytes that weights, packed copies of them, and cache take on the device."""
        caches = sum(decoder.cache_bytes for decoder in self._decoders())
        return int(self._weights.nbytes) + self._products.nbytes + caches

    def weight_specs(self) -> list[TensorSpec]:
        """Returns name, shape and dtype of every tensor of a push, as this generator holds it."""
        return [spec_of(name, tensor) for name, tensor in self._tensors.items()]

    @torch.no_grad()
    def explain_gaps(self, records: Sequence[Compared]) -> list[Finding]:
        """See ``ExplainsGaps``. Nothing where it holds other weights than sampled the records."""
        chosen = [record for record in records if record.version == self.version]
        decoder = self._usual
        derived = decoder.differing() if isinstance(decoder, FusedDecoder) else []
        derived += self._products.differing()
        name = f"{self._context.role}.{self._context.rank}"
        model, score = self._model, self.logprobs

        def scaled(factor: float) -> Score:
            return changed_head(model, score, lambda head, hidden, logits: logits * factor)

        others = heads(model, self._device, self._config.top_k, score)
        return explain(chosen, score, name=name, scaled=scaled, others=others, derived=derived)

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        """Returns float32[A] of each record's actions; see ``ScoresLogprobs.logprobs``.

        Raises ContractError for records with images: columns do not hold the images.
        """
        return by_rows(records, self._logprobs_of_rows)

    @torch.no_grad()
    def _logprobs_of_rows(self, records: Sequence[Columns]) -> list[np.ndarray]:
        self._weights.check_awake()
        if any(GRID in record for record in records):
            raise ContractError(
                "log-probs of records with images are asked for without their images.",
                where="logprobs",
            )
        if self._scorer is None:
            self._scorer = Policy(self._model)
            self._scorer.routers = self._routers
            check_layouts(self._scorer, self._device, may_flat=False, tolerance=1e-3)
        logprobs = [np.zeros(len(record["action_ids"]), np.float32) for record in records]
        samples = [
            Sample(index=i, ordinal=i, prompt=record["prompt_ids"], columns=record)
            for i, record in enumerate(records)
            if len(record["action_ids"])
        ]
        for batch in micro_batches(samples, "padded", _SCORE_TOKENS, self._device):
            logp = self._scorer(batch)[0].cpu().numpy()
            start = 0
            for i in batch.index.tolist():
                logprobs[i][:] = logp[start : start + len(logprobs[i])]
                start += len(logprobs[i])
        return logprobs


def _older(record: Columns, version: int) -> int:
    """Returns how many of the first actions of a record older weights have sampled.

    version: of the weights that sampled the last one.
    """
    return int((record[VERSION] < version).sum()) if VERSION in record else 0


def _empty(waiting: _Waiting) -> Columns:
    """Returns the columns of a sample that has no actions."""
    return {
        "prompt_ids": waiting.prompt,
        "action_ids": np.zeros(0, np.int32),
        "logp": np.zeros(0, np.float32),
        "action_mask": np.zeros(0, np.uint8),
        "temperature": np.array(np.float32(1)),
        "text": np.zeros(0, np.uint8),
    } | _grid(waiting)


def _experts(pieces: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the column that records of a mixture of experts have besides the others."""
    return {ROUTING: np.concatenate(pieces)} if pieces else {}


def _grid(waiting: _Waiting) -> dict[str, np.ndarray]:
    """Returns the column that records with images have besides the others."""
    return {} if waiting.images is None else {GRID: waiting.images.grid}


def _media(waiting: _Waiting) -> dict[str, np.ndarray]:
    """Returns a sample's pixels; all samples of a prompt share one array."""
    return {} if waiting.images is None else {PIXELS: waiting.images.pixels}
