"""Makes prompts out of drafts: records of a group from which later ones of it are made."""

from __future__ import annotations

from gcore_core.contract.errors import ContractError
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.records import DraftRef, Header, Lease, Prompt
from gcore_core.contract.sampling import Draft, SamplingProgram
from gcore_core.runtime.store.client import StoreReader


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

    async def of(self, lease: Lease, row: Prompt) -> dict[int, Prompt]:
        """Returns sample -> prompt, of the lease's samples that have a draft.

        row: the lease's own prompt.

        Raises ContractError where there is no program, or what it gives is no prompt of the row.
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
        prompts = {
            ref.sample: self._prompt(row, ref, columns["text"].tobytes())
            for ref, (columns, _) in zip(refs.values(), contents, strict=True)
        }
        return {sample: prompts[draft.sample] for sample, draft in lease.drafts}

    def _prompt(self, row: Prompt, ref: DraftRef, text: bytes) -> Prompt:
        draft = Draft(
            text=text.decode("utf-8", "replace"),
            reward=ref.reward,
            rewards=dict(ref.rewards),
            critique=ref.critique,
        )
        program = self._program
        assert program is not None
        prompt = self._code.call(program.prompt, row, draft)
        if not isinstance(prompt, Prompt) or (prompt.row, prompt.images) != (row.row, row.images):
            raise self._code.broken(
                f"prompt() gave {prompt!r:.60}, not a Prompt with the row's number and images",
                program.prompt,
            )
        return prompt


def _header(lease: Lease, ref: DraftRef) -> Header:
    """Returns a header by which the store finds the draft."""
    return Header(lease.ordinal, ref.sample, lease.row, 0, columns=ref.columns, slot=ref.slot)
