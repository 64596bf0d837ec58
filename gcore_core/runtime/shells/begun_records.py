"""Joins what one replica began of a sample and what another sampled behind it into one record.

The replica that goes on reads the first actions as an earlier piece of the answer (``Piece.begun``)
and gives mask and log-prob 0 there. The record takes these from the replica that drew them:

    action_ids    0 1 2 3 4 | 5 6 7        3 prompt tokens, 5 actions begun, 3 sampled behind them
    logp          begun     | later
    action_mask   begun     | later
    routing       7 tokens that were read for the 5 actions: begun | the other 3: later
    version       begun     | later, where these are not all one version
    text, and all other columns: later

So every action is trained on with the log-prob of the weights that drew it, and has their version.
The record's versions are the first of what was begun and the last of what came behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gcore_core.contract.columns import (
    ROUTING,
    VERSION,
    Columns,
    action_versions,
    column_of_versions,
)
from gcore_core.contract.errors import ContractError
from gcore_core.contract.generator import Finished, Piece, SampleRequest
from gcore_core.contract.lineage import check_seal, name_of
from gcore_core.contract.order import continued_seed
from gcore_core.contract.records import ABORTED, BegunRef, Header, Lease
from gcore_core.runtime.store.client import StoreReader

_ACTIONS = "action_ids"
_OF_ACTIONS = ("logp", "action_mask")


@dataclass(frozen=True, eq=False)
class Begun:
    """Holds what a sample had when it was given back.

    columns: copied, since the store frees them with their step.
    versions: first and last that sampled them.
    seed: of the whole sample.
    """

    columns: Columns
    versions: tuple[int, int]
    seed: int

    @property
    def actions(self) -> int:
        """How many actions it has."""
        return int(self.columns[_ACTIONS].size)

    def request(self, request: SampleRequest) -> SampleRequest:
        """Returns what is asked of the engine that goes on, of a request for the whole sample."""
        begun = np.array(self.columns[_ACTIONS], np.int32)
        seed = continued_seed(self.seed, len(begun))
        return replace(request, seed=seed, piece=Piece(begun=begun))

    def join(self, later: Finished) -> Finished:
        """Returns the record of both parts. Raises ContractError where they do not fit together.

        later: the record of the engine that went on.
        """
        request = replace(later.request, seed=self.seed, piece=None)
        if not later.columns:
            return replace(later, request=request)  # it has failed
        own = self.columns
        count = self.actions
        if later.status == ABORTED and later.columns[_ACTIONS].size <= count:
            return replace(later, request=request, versions=self.versions, columns=own)
        self._check(later)
        columns = dict(later.columns)
        for name in _OF_ACTIONS:
            columns[name] = np.concatenate([own[name], columns[name][count:]])
        if ROUTING in columns:
            read = len(own[ROUTING])
            columns[ROUTING] = np.concatenate([own[ROUTING], columns[ROUTING][read:]])
        columns.pop(VERSION, None)
        columns |= self._versions(later)
        versions = self.versions[0], later.versions[1]
        return replace(later, request=request, versions=versions, columns=columns)

    def _versions(self, later: Finished) -> dict[str, np.ndarray]:
        """Returns the column of versions of both parts; nothing where one version drew all."""
        count = self.actions
        actions = later.columns[_ACTIONS].size
        parts = [
            action_versions(self.columns, count, self.versions[0]),
            action_versions(later.columns, actions, later.versions[0])[count:],
        ]
        return column_of_versions(np.concatenate(parts))

    def _check(self, later: Finished) -> None:
        """Raises ContractError unless the later part has this one's prompt and first actions."""
        count = self.actions
        for name, column in (
            ("prompt_ids", later.columns["prompt_ids"]),
            ("temperature", later.columns["temperature"]),
            (_ACTIONS, later.columns[_ACTIONS][:count]),
        ):
            if not np.array_equal(column, self.columns[name]):
                raise ContractError(
                    f"record {name_of(later.request.ordinal, later.request.sample)} goes on from "
                    f"{count} actions that another replica drew, and its {name} are others",
                    where="generate",
                    why='a generator with the capability "continues" keeps Piece.begun as it is',
                    todo="look at how the generator begins an answer with Piece.begun, and whether "
                    "all replicas have the same model and settings",
                )


class BegunRecords:
    """Opens what other replicas have begun of samples and given back."""

    def __init__(self, store: StoreReader) -> None:
        self._store = store

    async def of(self, lease: Lease, seeds: Mapping[int, int]) -> dict[int, Begun]:
        """Returns sample -> what it has, of the samples of a lease that were given back.

        seeds: of each sample of the lease.
        Raises RecordMismatch for content that is not what the replica that began it sealed.
        """
        refs = {sample: ref for sample, ref in lease.begun if sample in lease.samples}
        if not refs:
            return {}
        contents = await self._store.records([_header(lease, *item) for item in refs.items()])
        begun = {}
        for (sample, ref), (columns, _) in zip(refs.items(), contents, strict=True):
            place = "going on with a sample that another replica has begun"
            check_seal(ref.seal, lease.ordinal, sample, ref.prompt_digest, columns, place)
            copies = {name: np.array(column) for name, column in columns.items()}
            begun[sample] = Begun(copies, ref.versions, seeds[sample])
        return begun


def _header(lease: Lease, sample: int, ref: BegunRef) -> Header:
    """Returns a header by which the store finds what was begun."""
    return Header(lease.ordinal, sample, lease.row, 0, columns=ref.columns, slot=ref.slot)
