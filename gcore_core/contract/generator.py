"""What the core calls on a backend that samples. Arrays are numpy.

An optional ability is a protocol of its own, implemented if and only if the description claims the
capability of that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from gcore_core.contract.columns import Columns
from gcore_core.contract.records import Prompt, TensorSpec, WeightPlan


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One sample to draw. Requests of one ``ordinal`` share prompt and images, so an engine may
    encode these once.

    ordinal, sample: name the sample among those under way.
    seed: 63 bits; all randomness of the sample follows from it.
    prompt: the row of the dataset, or a reward's question.
    greedy: the most probable action each time, instead of a draw.
    attempt: how often it was asked for and lost before.
    images: uint8[H, W, C] each, for the places of the prompt behind those of ``prompt.images``;
        only with the capability "images".
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
    """One record that ended.

    request: what was asked for.
    status: as listed in ``gcore_core.contract.records``. A request that cannot be served ends
        alone: status "failed", a reason and no columns.
    versions: first and last weights version that sampled its actions.
    columns: as listed in ``gcore_core.contract.records``.
    reason: a word for why it did not finish ("prompt_too_long", ...).
    media: arrays that scorers and trainers need besides, such as an image; what records share is
        stored once.
    cost: what training on it costs beside its prompt and actions, in tokens' worth, such as an
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
    """An engine in three verbs. Calls come one at a time from one thread.

    version: of the weights that it holds.
    """

    version: int

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queues requests; returns at once. They may join a batch that is already running."""

    def step(self) -> list[Finished]:
        """Advances every unfinished sample by one unit of work; returns those that ended, perhaps
        none.
        """

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        """Ends the named (ordinal, sample) now, with what they have, status "aborted".

        Capability "abort". Provisional: nothing in the core calls it yet.
        """

    def close(self) -> None:
        """Frees devices and processes. Unfinished samples are lost; nothing is called then."""


@runtime_checkable
class ReceivesWeights(Protocol):
    """Capability "weights.push": new weights, a few tensors at a time.

    Between ``begin_weights`` and ``commit_weights`` no ``step`` is called. A push that breaks off
    is begun again from the start.
    """

    def begin_weights(self, plan: WeightPlan) -> None:
        """Checks the plan against the model. Raises WeightMismatch naming the tensor when it is of
        another model, or when the plan is older than ``version``.
        """

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        """Copies in some of the tensors; each array is flat uint8, valid only during the call."""

    def commit_weights(self, plan: WeightPlan) -> None:
        """All tensors have come: drops every cache that depended on the old ones and sets
        ``version``.
        """


@runtime_checkable
class Fingerprints(Protocol):
    """Capability "weights.fingerprint": what the generator holds can be compared with a push."""

    def fingerprint(self) -> dict[str, int]:
        """Hugging Face name -> xxh3-64 of the bytes it holds, for every tensor of a push."""


@runtime_checkable
class Sleeps(Protocol):
    """Capability "sleep": gives its memory to others for a while.

    Samples that run keep what they have and go on after the wake, read again. Asleep, ``step`` and
    a weight push raise an error that says so; a second ``sleep``, or ``wake`` of one that is awake,
    does nothing.
    """

    def sleep(self) -> None:
        """Gives the memory of weights and caches back. Not between ``begin_weights`` and
        ``commit_weights``.
        """

    def wake(self) -> None:
        """Takes the memory again; holds the same bytes of the same ``version``, or raises
        WeightMismatch.
        """


@runtime_checkable
class ScoresLogprobs(Protocol):
    """Capability "logprobs". Provisional: nothing in the core calls it yet."""

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        """Log-probs of given actions, float32[A] for each record, at that record's temperature.

        Provisional: nothing in the core calls it yet.
        """
