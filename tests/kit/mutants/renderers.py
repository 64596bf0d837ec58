"""Renderers with one fault each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import pytest
from gcore_environments.rendering import Bridge, Renderer, Said, make_renderer
from gcore_environments.templates import Message
from gcore_environments.testing import Made, RendererContract, tokenizer_of


class Faithful:
    """Renders as the renderer does that it has."""

    def __init__(self, renderer: Renderer, tokenizer: Any, end_ids: Sequence[int]) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._end_ids = end_ids

    def start(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        return self._renderer.start(messages, tools)

    def bridge(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> Bridge | None:
        bridge = self._renderer.bridge(ids, messages, tools)
        return None if bridge is None else self._spoilt(bridge, ids)

    def reply(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Said:
        return self._renderer.reply(ids, tools)

    def _spoilt(self, bridge: Bridge, ids: Sequence[int]) -> Bridge:
        return bridge

    def _again(self, ids: Sequence[int]) -> list[int]:
        """Returns the ids of the text of ids."""
        text = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _is_cut(self, ids: Sequence[int]) -> bool:
        return ids[-1] not in self._end_ids


@cache
def _tokenizer() -> tuple[Any, list[int]]:
    return tokenizer_of("chatml")


class CleanRenderer(RendererContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[Faithful]] = Faithful

    @pytest.fixture
    def made(self) -> Made:
        tokenizer, ends = _tokenizer()
        renderer = self.Backend(make_renderer(tokenizer, ends), tokenizer, ends)
        return Made(renderer=renderer, tokenizer=tokenizer, end_ids=ends)


_BEHIND = "test_a_bridge_is_behind_what_was_there_and_changes_none_of_it"
_CUT = "test_a_cut_turn_is_ended_as_one_that_has_ended"
_WHOLE = "test_a_bridge_says_what_the_whole_conversation_says"
_OTHERS = "test_words_of_another_as_the_assistants_are_given_or_declined"
_CONTENT = "test_no_content_becomes_a_special_token"
_CALLS = "test_no_given_call_and_no_description_of_a_tool_becomes_a_special_token"
_READ = "test_what_was_said_is_read_without_the_token_that_ended_it"
_ODD = "test_no_ids_are_too_odd_to_be_read"


class CutsWhatWasSampledAnotherWay(CleanRenderer):
    caught_by = (_BEHIND,)

    class Backend(Faithful):
        """Writes the old ids as the tokenizer would cut their text."""

        def _spoilt(self, bridge: Bridge, ids: Sequence[int]) -> Bridge:
            if isinstance(ids, list):
                ids[:] = self._again(ids)
            return bridge


class DropsTheLastWord(CleanRenderer):
    caught_by = (_BEHIND, _CUT, _WHOLE)

    class Backend(Faithful):
        def _spoilt(self, bridge: Bridge, ids: Sequence[int]) -> Bridge:
            return replace(bridge, drop=2)


class SaysNothingNew(CleanRenderer):
    caught_by = (_BEHIND, _WHOLE, _OTHERS, _CONTENT)

    class Backend(Faithful):
        """Begins the policy's next turn at once."""

        def bridge(
            self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] = ()
        ) -> Bridge | None:
            return super().bridge(ids, [{**one, "content": ""} for one in messages], tools)


class LeavesACutTurnOpen(CleanRenderer):
    caught_by = (_CUT,)

    class Backend(Faithful):
        def _spoilt(self, bridge: Bridge, ids: Sequence[int]) -> Bridge:
            return replace(bridge, ids=bridge.ids[self._is_cut(ids) :])


class KnowsNoBridgeOfACutTurn(CleanRenderer):
    caught_by = (_CUT,)

    class Backend(Faithful):
        def bridge(
            self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] = ()
        ) -> Bridge | None:
            return None if self._is_cut(ids) else super().bridge(ids, messages, tools)


class ForgetsTheLineBreakBehindTheEnd(CleanRenderer):
    caught_by = (_WHOLE,)

    class Backend(Faithful):
        def _spoilt(self, bridge: Bridge, ids: Sequence[int]) -> Bridge:
            at = int(self._is_cut(ids))
            return replace(bridge, ids=bridge.ids[:at] + bridge.ids[at + 1 :])


class DropsWordsOfOtherAssistants(CleanRenderer):
    caught_by = (_OTHERS,)

    class Backend(Faithful):
        def bridge(
            self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] = ()
        ) -> Bridge | None:
            others = [one for one in messages if one["role"] != "assistant"]
            return super().bridge(ids, others, tools)


class EncodesNewTextAsATokenizerDoes(CleanRenderer):
    caught_by = (_CONTENT,)

    class Backend(Faithful):
        def _spoilt(self, bridge: Bridge, ids: Sequence[int]) -> Bridge:
            return replace(bridge, ids=self._again(bridge.ids))


class EncodesQuestionsAsATokenizerDoes(CleanRenderer):
    caught_by = (_CONTENT,)

    class Backend(Faithful):
        def start(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
            ids = super().start(messages, tools)
            return ids if tools else self._again(ids)


class EncodesToolsAsATokenizerDoes(CleanRenderer):
    caught_by = (_CALLS,)

    class Backend(Faithful):
        def start(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
            ids = super().start(messages, tools)
            return self._again(ids) if tools else ids


class ReadsTheEnd(CleanRenderer):
    caught_by = (_READ,)

    class Backend(Faithful):
        def reply(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Said:
            said = super().reply(ids, tools)
            end = "<|im_end|>" if ids and not self._is_cut(ids) else ""
            return replace(said, text=said.text + end)


class RaisesAtWhatIsNoText(CleanRenderer):
    caught_by = (_ODD,)

    class Backend(Faithful):
        def reply(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Said:
            self._tokenizer.decode(ids).replace("\ufffd", "\udcff").encode()
            return super().reply(ids, tools)


class CountsWhatItCouldNotReadTwice(CleanRenderer):
    caught_by = (_ODD,)

    class Backend(Faithful):
        def reply(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Said:
            said = super().reply(ids, tools)
            return replace(said, unparsed=2 * said.unparsed)
