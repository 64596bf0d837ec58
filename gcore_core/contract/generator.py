"""Defines what the core calls on a backend that samples. Arrays are numpy.

What is optional is a protocol of its own, implemented if and only if ``traits()`` of the config
claims it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from gcore_core.contract.columns import Columns
from gcore_core.contract.records import Prompt, TensorSpec, WeightPlan
from gcore_core.contract.sentinel import Compared, Finding


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Asks for one sample.

    Requests of one ``ordinal`` share prompt and images, so an engine may encode these once.

    ordinal, sample: name the sample among those under way.
    seed: 63 bits; all randomness of the sample follows from it.
    prompt: the row of the dataset, or a reward's question.
    greedy: the most probable action each time, instead of a draw.
    attempt: how often it was asked for and lost before.
    images: uint8[H, W, C] each, for places of the prompt after the ``prompt.images``;
        only with the trait ``images``.
    """

    ordinal: int
    sample: int
    seed: int
    prompt: Prompt
    greedy: bool = False
    attempt: int = 0
    images: Sequence[np.ndarray] = ()


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
class Generator(Protocol):
    """Samples records in three verbs. Calls come one at a time, in the main thread.

    version: of the weights that it holds.
    """

    version: int

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queues requests; returns at once. They may join a batch that is already running."""

    def step(self) -> list[Finished]:
        """Advances every unfinished sample by one unit of work.

        Returns the records that ended, perhaps none. A generator none of whose records ends for
        ``run.patience_s`` counts as hung and is killed, unless it calls ``WorkerContext.progress``.
        It calls that for actions that it has sampled, and not where a step has done nothing.
        """

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        """Ends the samples with these (ordinal, sample) now; returns what they have so far.

        Their status is "aborted", and their columns hold the actions so far. One that has
        ended meanwhile has the status that it ended with. Keys of samples that do not run are
        ignored.

        Trait ``abort``. It is called before a sleep, with samples that nobody waits for.
        """

    def close(self) -> None:
        """Frees devices and processes. Unfinished samples are lost; no other call follows."""


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
