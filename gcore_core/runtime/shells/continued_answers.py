"""Opens answers that are drawn piece by piece, and says where the next piece of each ends."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gcore_core.contract.errors import ContractError
from gcore_core.contract.generator import Piece
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.records import DraftRef, Header, Lease
from gcore_core.contract.sampling import GrowsAnswers, SamplingProgram
from gcore_core.runtime.store.client import StoreReader


class ContinuedAnswers:
    """Makes the next pieces of answers that grow, see ``Piece``.

    program: says where pieces end. With one that is no ``GrowsAnswers``, answers are whole.
    """

    def __init__(self, store: StoreReader, program: SamplingProgram | None) -> None:
        self._store = store
        self._program = program if isinstance(program, GrowsAnswers) else None
        self._code = PluginCode(
            made=program, kind="sampler", where="sampling.use", contract="SamplerContract"
        )

    def __bool__(self) -> bool:
        """Whether answers grow."""
        return self._program is not None

    async def begun(self, lease: Lease) -> dict[int, np.ndarray]:
        """Opens the drafts of a lease.

        Returns each of its samples -> the actions of its draft, int32[K]; nothing where answers are
        whole.
        """
        if self._program is None:
            return {}
        actions = await self._actions({draft.sample: draft for _, draft in lease.drafts}, lease)
        drafts = {sample: draft.sample for sample, draft in lease.drafts}
        nothing = np.zeros(0, np.int32)
        return {
            sample: actions[drafts[sample]] if sample in drafts else nothing
            for sample in lease.samples
        }

    def of(self, begun: Mapping[int, np.ndarray]) -> dict[int, Piece]:
        """Returns the piece of each sample.

        begun: of each sample, the actions before that piece.
        """
        program = self._program
        if program is None:
            return {}
        pieces = {}
        for sample, actions_before in begun.items():
            actions, end = self._end(program, sample)
            pieces[sample] = Piece(begun=actions_before, actions=actions, end=end)
        return pieces

    async def _actions(self, refs: dict[int, DraftRef], lease: Lease) -> dict[int, np.ndarray]:
        """Returns draft -> its actions, int32[K], copied: the store frees them with their step."""
        if not refs:
            return {}
        items = [
            Header(lease.ordinal, sample, lease.row, 0, columns=ref.columns, slot=ref.slot)
            for sample, ref in refs.items()
        ]
        contents = await self._store.records(items)
        for columns, _ in contents:
            if "action_ids" not in columns:
                raise ContractError(
                    "an answer cannot be continued: its record has no action_ids",
                    where="generate",
                    todo="take a generator whose actions are tokens",
                )
        return {
            sample: np.array(columns["action_ids"], np.int32)
            for sample, (columns, _) in zip(refs, contents, strict=True)
        }

    def _end(self, program: GrowsAnswers, sample: int) -> tuple[int, str]:
        answer = self._code.call(program.piece, sample)
        match answer:
            case (int(actions), str(end)) if actions >= 0:
                return actions, end
        raise self._code.broken(
            f"piece({sample}) gave {answer!r:.60}, not (actions, a text)", program.piece
        )
