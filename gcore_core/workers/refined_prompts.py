"""Makes prompts out of drafts: records of a group from which later ones of it are made."""

from __future__ import annotations

from collections.abc import Mapping

from gcore_core.contract.errors import ContractError
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.records import DraftRef, Header, Lease, Prompt
from gcore_core.contract.sampling import Draft, SamplingProgram
from gcore_core.store.client import StoreReader
from gcore_core.workers.row_digest import own_row


class RefinedPrompts:
    """Opens drafts by reference, and has the sampling program make a prompt of each.

    program: None where every record answers its row's own prompt.
    """

    def __init__(self, store: StoreReader, program: SamplingProgram | None) -> None:
        self._store = store
        self._program = program
        self._code = PluginCode(
            made=program, kind="sampler", where="sampling.use", contract="SamplerContract"
        )

    async def drafts(self, lease: Lease) -> dict[int, Draft]:
        """Opens the drafts of a lease; returns each sample that is made of one -> that one.

        Raises ContractError where there is no program.
        """
        if not lease.drafts:
            return {}
        if self._program is None:
            raise ContractError(
                "a record is to be made from an earlier one, and there is no sampling program",
                where="generate",
            )
        refs = {draft.sample: draft for _, draft in lease.drafts}
        items = [_header(lease, ref) for ref in refs.values()]
        contents = await self._store.records(items)
        drafts = {
            ref.sample: _draft(ref, columns["text"].tobytes())
            for ref, (columns, _) in zip(refs.values(), contents, strict=True)
        }
        return {sample: drafts[draft.sample] for sample, draft in lease.drafts}

    def of(self, row: Prompt, drafts: Mapping[int, Draft]) -> dict[int, Prompt]:
        """Returns the prompt of each sample that is made of a draft.

        row: the prompt of the samples' lease.
        Raises ContractError where what the program gives is no prompt of the row.
        """
        different = {id(draft): draft for draft in drafts.values()}
        prompts = {key: self._prompt(row, draft) for key, draft in different.items()}
        return {sample: prompts[id(draft)] for sample, draft in drafts.items()}

    def _prompt(self, row: Prompt, draft: Draft) -> Prompt:
        program = self._program
        assert program is not None
        prompt = self._code.call(program.prompt, own_row(row), draft)
        if not isinstance(prompt, Prompt) or (prompt.row, prompt.images) != (row.row, row.images):
            raise self._code.broken(
                f"prompt() gave {prompt!r:.60}, not a Prompt with the row's number and images",
                program.prompt,
            )
        return prompt


def _draft(ref: DraftRef, text: bytes) -> Draft:
    return Draft(
        text=text.decode("utf-8", "replace"),
        reward=ref.reward,
        rewards=dict(ref.rewards),
        critique=ref.critique,
    )


def _header(lease: Lease, ref: DraftRef) -> Header:
    """Returns a header by which the store finds the draft."""
    return Header(lease.ordinal, ref.sample, lease.row, 0, columns=ref.columns, slot=ref.slot)
