"""Defines what the core calls on a backend that samples. Arrays are numpy.

What is optional is a protocol of its own, implemented if and only if ``traits()`` of the config
claims it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from gcore_core.contract.columns import Columns
from gcore_core.contract.records import Prompt, TensorSpec, WeightPlan
from gcore_core.contract.sentinel import Compared, Finding


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Asks for one sample.

    Requests of one ``ordinal`` share prompt, images and ids, so an engine may encode these once.

    ordinal, sample: name the sample among those under way.
    seed: 63 bits; all randomness of the sample follows from it.
    prompt: the row of the dataset, or a question to the role.
    greedy: the most probable action each time, instead of a draw.
    attempt: how often a replica has not finished it before: it was lost, or needed other weights
        first.
    images: uint8[H, W, C] each, for places of the prompt after the ``prompt.images``;
        only with the trait ``images``.
    ids: int32[P], the tokens of the prompt where they are known; the prompt is then not encoded.
        They are read as they are, also where they end with what ends an answer.
    most: most actions of this answer, where the settings allow more; 0: as the settings say.
    stop: texts that end this answer, besides those of the settings.

    The last three come only with the trait ``tokens``.
    """

    ordinal: int
    sample: int
    seed: int
    prompt: Prompt
    greedy: bool = False
    attempt: int = 0
    images: Sequence[np.ndarray] = ()
    ids: np.ndarray | None = None
    most: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Holds one record that ended.

    request: what was asked for.
    status: as listed in ``gcore_core.contract.records``. A request that cannot be served ends
        alone: status "failed", a reason and no columns.
    versions: first and last weights version that sampled its actions; ``UNSAMPLED`` both where
        the generator reads its records: then nothing compares their ``logp``, which is 0.
    columns: as listed in ``gcore_core.contract.records``.
    reason: a word for why it did not finish ("prompt_too_long", ...), by which such records are
        counted; behind it perhaps a colon and what a person should know of this one.
    media: arrays that scorers and trainers need besides, such as an image; what records share is
        stored once.
    cost: what training on it costs besides its prompt and actions, in tokens' worth, such as an
        encoder that runs on its media; finite and not negative. Balancers see it as ``Work.extra``.
    """

    request: SampleRequest
    status: str
    versions: tuple[int, int]
    columns: Columns = field(default_factory=dict)
    reason: str = ""
    media: Columns = field(default_factory=dict)
    cost: float = 0.0


@runtime_checkable
class Draws(Protocol):
    """Draws records in three verbs. Calls come one at a time, in the main thread.

    A generator does, and so does an environment that is built around the policy's generator. Where
    the job has an environment, samples are asked of it alone. It then sees whatever is asked of the
    generator, also what is not its own:

        ordinals from 0      rows of the data; an environment plays an episode of each
        ordinals below 0     rows of an evaluation, played in the same way
        ordinals from 2^48   questions of rewards (``FIRST_QUESTION``): it hands them on to the
                             generator as they are, and returns the answers

    It asks the generator for turns under ordinals from 2^52 (``FIRST_TURN``). A push or a sleep of
    the generator may come between any two calls. At a push, what the generator draws goes on as
    its traits say; before a sleep, everything that somebody waits for has ended.
    """

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queues requests; returns at once. They may join a batch that is already running."""

    def step(self) -> list[Finished]:
        """Advances every unfinished sample by one unit of work.

        Returns the records that ended, perhaps none. One none of whose records ends for
        ``run.patience_s`` counts as hung and is killed, unless it calls ``WorkerContext.progress``.
        It calls that for actions that it has sampled, and not where a step has done nothing.
        """

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        """Ends the samples with these (ordinal, sample) now; returns what they have so far.

        Their status is "aborted", and their columns hold the actions so far. One that has
        ended meanwhile has the status that it ended with. Keys of samples that do not run are
        ignored.

        Trait ``abort`` of the generator. It is called before a sleep, with samples that nobody
        waits for. An environment also ends what it has asked its generator for them.
        """

    def close(self) -> None:
        """Frees devices and processes. Unfinished samples are lost; no other call follows.

        An environment leaves its generator open, which is closed after it. Where its process is
        ended from outside nobody calls this; what it has started in its process group ends with it.
        """


@runtime_checkable
class Generator(Draws, Protocol):
    """Samples records of a policy or a judge.

    version: of the weights that it holds.
    """

    version: int


@runtime_checkable
class TakesTokens(Protocol):
    """Goes on behind given tokens: trait ``tokens``.

    It honours ``SampleRequest.ids``, ``most`` and ``stop``, and tells an environment how it writes.
    A sample that is drawn in several requests, each with the ids so far, is what one request would
    have drawn only where its randomness follows from seed and place; the seeds are the asker's.
    """

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, of Hugging Face's transformers."""

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""

    @property
    def max_actions(self) -> int:
        """The most actions of an answer, by the settings."""

    @property
    def context_length(self) -> int:
        """The most tokens of prompt and answer together; 0: nobody knows."""

    @property
    def temperature(self) -> float:
        """The temperature of what is not greedy, by the settings."""

    @property
    def top_p(self) -> float:
        """The share of probability that it samples from, by the settings; 1: all tokens."""

    @property
    def top_k(self) -> int:
        """How many of the likeliest tokens it samples from, by the settings; 0: all."""


@runtime_checkable
class ReceivesWeights(Protocol):
    """Takes new weights, a few tensors at a time: trait ``receives_weights``.

    Between ``begin_weights`` and ``commit_weights`` no ``step`` is called. A push that breaks off
    is begun again from the start. Of tied weights only one comes, under the name that a checkpoint
    has; the generator ties the others to it.
    """

    def begin_weights(self, plan: WeightPlan) -> None:
        """Checks the plan against the model.

        Raises WeightMismatch, naming the tensor, for a plan of another model; and for a plan that
        is older than ``version``.

        With the trait ``adapters`` the plan may bring an adapter (``plan.adapter``). The
        generator then samples with its base, as its model's files have it, and this adapter alone:
        whatever earlier pushes brought is gone. It raises WeightMismatch for an adapter of another
        base.
        """

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        """Copies in some of the tensors; each array is flat uint8, valid only during the call."""

    def commit_weights(self, plan: WeightPlan) -> None:
        """Takes the new weights into use, since all tensors have come; sets ``version``.

        It drops every cache that depended on the old weights.
        """


@runtime_checkable
class Fingerprints(Protocol):
    """Lets what the generator holds be compared with a push: trait ``fingerprints``."""

    def fingerprint(self) -> dict[str, int]:
        """Returns Hugging Face name -> xxh3-64 of the bytes that it holds.

        Every tensor of a push is in it.
        """


@runtime_checkable
class Sleeps(Protocol):
    """Gives its memory to others for a while: trait ``sleeps``.

    Samples that run keep what they have and go on after the wake, read again. Asleep, ``step`` and
    a weight push raise an error that says so; a second ``sleep``, or ``wake`` of one that is awake,
    does nothing.
    """

    def sleep(self) -> None:
        """Gives the memory of weights and caches back.

        It is not called between ``begin_weights`` and ``commit_weights``.
        """

    def wake(self) -> None:
        """Takes the memory again, with the same weights of the same ``version``.

        Raises WeightMismatch when it cannot hold the same bytes.
        """


@runtime_checkable
class ScoresLogprobs(Protocol):
    """Computes log-probs of given actions: trait ``scores_logprobs`` of a generator or a trainer.

    Where a run's records are not fresh, both sides are asked after a push, about the same records
    under the same weights, and a step check compares their answers.
    """

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        """Returns for each record the log-probs of its actions, float32[A], at its temperature.

        They are of the weights that it holds now. A trainer's ranks are all asked at the same
        time, each about records of its own, perhaps none, so that collectives may be used.

        records: with the columns prompt_ids, action_ids, logp, action_mask and temperature.
        """


@runtime_checkable
class ExplainsGaps(Protocol):
    """Says why the log-probs that it gave are not the trainer's; asked only after an alarm.

    No trait: a generator that has the method is asked.
    """

    def explain_gaps(self, records: Sequence[Compared]) -> list[Finding]:
        """Returns how well each cause that it knows explains the gaps; empty: none.

        It holds the weights that sampled the records, unless a push has come since.
        """
