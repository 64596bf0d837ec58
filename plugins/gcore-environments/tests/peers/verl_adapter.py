"""Gives verl's tests of continuous tokens our renderer and book in place of verl's own modules.

It is a plugin of pytest: ``pytest -p verl_adapter test_continuous_token_on_cpu.py``. verl makes a
class for each family of models; here the chat template says where a turn ends, so a family is a
template of a line, and what is asked of families' names is not answered.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from gcore_environments.book import Book
from gcore_environments.rendering import make_renderer

#: Family -> (tokens that end a turn, what stands behind them, role -> its token).
_ENDS: dict[str, tuple[tuple[str, ...], str, dict[str, str]]] = {
    "": ((), "", {}),
    "Qwen": (("<|im_end|>",), "\n", {}),
    "MiniMax": (("[e~[",), "\n", {}),
    "GLM": (
        ("<|observation|>", "<|user|>"),
        "",
        {"tool": "<|observation|>", "user": "<|user|>"},
    ),
    "Gemma4": (("<|tool_response>",), "", {"tool": "<|tool_response>"}),
}


@dataclass(frozen=True)
class MergeResult:
    token_ids: list[int]
    appended_token_count: int
    kind: str = "non_assistant"
    inserted_token_ids: list[int] = field(default_factory=list)
    removed_prefix_token_count: int = 0


class _Tokenizer:
    """verl's stand-in for a tokenizer, as ours looks; with a template, where a family has one."""

    is_fast = False
    chat_template = "verl's"
    all_special_tokens = ()

    def __init__(self, theirs: Any, family: str) -> None:
        self.theirs = theirs
        ends, self.behind, self.roles = _ENDS[family]
        self.ids = {end: theirs.convert_tokens_to_ids(end) for end in ends}
        self.texts = {id: end for end, id in self.ids.items()}
        self.added_tokens_decoder = {
            id: SimpleNamespace(content=end, special=True) for end, id in self.ids.items()
        }

    def __call__(self, text: str, **_: Any) -> Any:
        ids: list[int] = []
        pieces = re.split(f"({'|'.join([*map(re.escape, self.ids), chr(10)])})", text)
        for piece in filter(None, pieces):
            ids += [self.ids[piece]] if piece in self.ids else self.theirs.encode(piece)
        return SimpleNamespace(input_ids=ids)

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.texts.get(id) or chr(id) for id in ids)

    def convert_ids_to_tokens(self, id: int) -> str:
        return self.decode([id])

    def convert_tokens_to_ids(self, text: str) -> int:
        return self.ids.get(text, 0)

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        if not self.ids:
            written: str = self.theirs.apply_chat_template(messages, **options)
            return written
        end = "".join([*self.ids][:1]) + self.behind if not self.roles else ""
        return "".join(
            self.roles.get(one["role"], "")
            + one["content"]
            + (end if one["role"] == "assistant" else "")
            for one in messages
        )


class ContinuousTokenBuilder:
    family = ""

    def __init__(self, tokenizer: Any, *, chat_template_kwargs: Any = None, **_: Any) -> None:
        self.chat_template_kwargs = chat_template_kwargs or {}
        self._tokenizer = _Tokenizer(tokenizer, self.family)
        self._im_end_id = self._tokenizer.ids.get("<|im_end|>")
        self._renderer = make_renderer(
            self._tokenizer,
            list(self._tokenizer.ids.values()),
            template_kwargs=self.chat_template_kwargs,
        )

    def build_initial_tokens(self, messages: Any, *, tools: Any = None) -> list[int]:
        return self._renderer.start(messages, tools or ())

    def _merge(self, ids: list[int], messages: Any, tools: Any, count: int = -1) -> MergeResult:
        """What the bridge makes of ids and new messages.

        count: how many of its ids are the messages; what stands in front is inserted.
        """
        bridge = self._renderer.bridge(ids, messages, tools or ())
        if bridge is None:
            raise ValueError("token-id suffix diff failed: the template tells no bridge")
        stands = bridge.ids[:1] == [*self._tokenizer.ids.values()][:1]  # a role's token
        inserted = len(bridge.ids) - count if count >= 0 else int(stands)
        kept = ids[: len(ids) - bridge.drop]
        return MergeResult(
            kept + bridge.ids,
            len(bridge.ids) - inserted,
            inserted_token_ids=bridge.ids[:inserted],
            removed_prefix_token_count=bridge.drop,
        )

    def _merge_non_assistant_token_ids(self, ids: list[int], appended: list[int]) -> MergeResult:
        text = self._tokenizer.decode(appended)
        role = next((r for r, t in self._tokenizer.roles.items() if text.startswith(t)), "user")
        content = text.removeprefix(self._tokenizer.roles.get(role, ""))
        return self._merge(ids, [{"role": role, "content": content}], None, len(appended))

    def merge_non_assistant_tokens(
        self, before: Any, after: Any, ids: list[int], *, tools: Any = None
    ) -> MergeResult:
        return self._merge(ids, after[len(before) :], tools)

    def tokenize_non_assistant_incremental_messages(
        self, before: Any, after: Any, *, tools: Any = None
    ) -> list[int]:
        return self._merge([1], after[len(before) :], tools).token_ids[1:]

    def render_delta_token_id(self, before: Any, new: Any, **_: Any) -> list[int]:
        return self._merge([1], new, None).token_ids[1:]

    def merge_assistant_tokens(self, ids: list[int], said: list[int]) -> MergeResult:
        return MergeResult([*ids, *said], len(said), "assistant")

    def align_response_metadata(
        self,
        result: MergeResult,
        mask: list[int],
        logps: list[float] | None = None,
        *,
        assistant_logprobs: list[float] | None = None,
    ) -> tuple[list[int], list[float] | None]:
        """Masks and log-probs of the last sequence of a book that holds the same ids."""
        values, added = logps or [0.0] * len(mask), len(result.inserted_token_ids)
        added += result.appended_token_count
        kept, new = result.token_ids[:-added], result.token_ids[-added:]
        read = 1 + len(kept) + result.removed_prefix_token_count - len(mask)
        old = [0, *kept, *[0] * result.removed_prefix_token_count]  # 0 stands for what is gone
        book = Book()
        number = book.start(old[:read])
        for at, sampled in enumerate(mask):
            id = old[read + at]
            number = _written(book, number, [id], [values[at]] if sampled else None)
        if result.kind == "assistant":
            _written(book, number, new, assistant_logprobs if logps else [0.0] * len(new))
        else:
            number = book.go_on(number, 1 + len(kept), new)
        found: dict[int, float] = {}
        line, end = number, len(book.sequences[number].ids)
        while line >= 0:  # from the last sequence to those that it shares ids with
            one = book.sequences[line]
            places = [at for first, last, _, _ in one.spans for at in range(first, last)]
            found |= {at: lp for at, lp in zip(places, one.logp, strict=True) if at < end}
            line, end = one.parent, one.shared
        own = range(read, len(book.sequences[number].ids))
        said = [found.get(at, 0.0) for at in own] if logps is not None else None
        return [int(at in found) for at in own], said


def _written(book: Book, number: int, ids: list[int], logps: list[float] | None) -> int:
    """Appends ids, as sampled where they have log-probs, else as given."""
    if logps is not None:
        book.sampled(number, ids, logps, [0] * len(ids))
        return number
    book.sampled(number, [], [], [])
    return book.go_on(number, len(book.sequences[number].ids), ids)


def _refuses(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("families have no names here")


@cache
def _class_of(name: str) -> type[ContinuousTokenBuilder]:
    """Returns the class that verl calls by this name."""
    family = name.removesuffix("ContinuousTokenBuilder")
    if name.startswith("__") or family == name:
        raise AttributeError(name)
    about = {"family": family if family in _ENDS else ""}
    return type(name, (ContinuousTokenBuilder,), about)


class _Families:
    """Has every family that is asked for, by its name."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(value=name.lower())


def _create(tokenizer: Any, *, model_family: Any = "", **options: Any) -> ContinuousTokenBuilder:
    family = str(getattr(model_family, "value", model_family))
    if family in ("default", "gptoss"):
        return ContinuousTokenBuilder(tokenizer, **options)
    name = next((name for name in _ENDS if name and family.startswith(name.lower())), "")
    if not name:
        _refuses()
    return _class_of(f"{name}ContinuousTokenBuilder")(tokenizer, **options)


def _module(name: str, **words: Any) -> None:
    made = ModuleType(name)
    vars(made).update(words)
    sys.modules[name] = made


for _package in ("verl", "verl.utils", "verl.workers", "verl.workers.config"):
    _module(_package, __path__=[])
_module(
    "verl.utils.continuous_token",
    ContinuousTokenBuilder=ContinuousTokenBuilder,
    MergeResult=MergeResult,
    __getattr__=_class_of,
)
_module(
    "verl.utils.continuous_token_wiring",
    CONTINUOUS_TOKEN_BUILDER_FAMILIES=(),
    ContinuousTokenModelFamily=_Families(),
    create_continuous_token_builder=_create,
    get_continuous_token_builder_class=_refuses,
    infer_continuous_token_model_family=_refuses,
    list_continuous_token_builder_families=_refuses,
    resolve_continuous_token_model_family=_refuses,
)
_module("verl.workers.config.rollout", ContinuousTokenConfig=_refuses)
