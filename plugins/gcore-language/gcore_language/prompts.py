"""Turns prompts into token ids and back, with the tokenizer that lies beside a model's weights."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.contract.errors import DataError
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FAILED, Prompt
from gcore_language.chats import NO_VARIABLES, Chats, Unreadable
from gcore_language.lean import import_lean

#: What transformers raises for files that are missing, malformed or of an unknown architecture.
LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError)
#: Endings of the files that lie beside a model's weights and go with it, whatever they are called.
_GO_ALONG = frozenset({".json", ".jinja", ".model", ".txt", ".tiktoken", ".bpe"})
#: Those of them that say what the weights are, or what trained them.
_STAY = ("config.json", "*.index.json", "adapter_*", "*_state.json", "*_results.json")

#: So begin the names of files with a tokenizer's vocabulary.
_VOCABULARIES = ("tokenizer.", "vocab", "merges", "tekken")
#: So begins a model of SentencePiece, which is a protocol buffer.
_SENTENCEPIECE = b"\n"
#: Where transformers keeps the chat templates that have other names than "default".
_TEMPLATES = "additional_chat_templates"

#: One of these, or of so many words of its vocabulary, a tokenizer knows.
_TEXTS = ("a", "1")
_WORDS = 64

log = logging.getLogger(__name__)


def load_tokenizer(path: str, embedded: int | None, *, trust_remote_code: bool = False) -> Any:
    """Opens the tokenizer of a model directory or of a name on the hub.

    embedded: how many tokens the model embeds; None when that is not known.

    Raises DataError when it cannot be loaded, or knows tokens that the model does not embed.
    """
    # Its thread pool takes more CPU time for small batches than their work.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import_lean()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except ImportError:  # of a package that its code needs
        raise
    except Exception as error:  # isolation point: the library of tokenizers raises Exception itself
        raise _unreadable_tokenizer(path, error) from error
    count = max(tokenizer.get_vocab().values(), default=-1) + 1
    if embedded is not None and count > embedded:
        raise DataError(
            f"tokenizer has {count} tokens, but the model embeds only {embedded}.",
            where=path,
            todo=(
                "Take the tokenizer of this model, or call model.resize_token_embeddings and "
                "save it again."
            ),
        )
    return tokenizer


def _unreadable_tokenizer(path: str, error: Exception) -> DataError:
    """Makes the DataError for a tokenizer that transformers could not load.

    transformers guesses what the files are, and its last guess is what its error is about: to
    install sentencepiece or tiktoken, or a line that tiktoken cannot read. So the files are looked
    at here.
    """
    told = unreadable("tokenizer", path, error)
    directory = Path(path)
    if not directory.is_dir() or (directory / "tokenizer.json").is_file():
        return told
    names = sorted(file.name for file in directory.iterdir())
    models = [name for name in names if name.endswith(".model")]
    if not models:
        if not any(name.startswith(_VOCABULARIES) or name.endswith(".tiktoken") for name in names):
            told.why = "no file there has its vocabulary, such as tokenizer.json"
            told.todo = "Copy tokenizer.json from where the model comes from."
    elif (directory / models[0]).read_bytes()[:1] != _SENTENCEPIECE:
        told.why = f"{models[0]} is no model of SentencePiece; it may be a pointer of git-lfs"
        told.todo = "Copy that file again, or put tokenizer.json beside it."
    elif find_spec("sentencepiece") is None:
        told.why = f"{models[0]} is read by the package sentencepiece, which is not installed"
        told.todo = "Install sentencepiece, or put tokenizer.json beside that file."
    return told


def padding_id(path: str, *, trust_remote_code: bool = False) -> int | None:
    """Returns the id of a model's padding, by its config; None where it has none.

    A classifier of transformers is read at the last token that has another id.

    path: its directory, or a name on the hub.

    Raises DataError when the config cannot be loaded.
    """
    import_lean()
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except LOAD_ERRORS as error:
        raise unreadable("config", path, error) from error
    found: int | None = config.get_text_config().pad_token_id
    return found


def unreadable(what: str, path: str, error: Exception) -> DataError:
    """Makes the DataError for something that transformers could not load."""
    return DataError(f"transformers cannot load the {what}.", where=path, why=first_lines(error))


def first_lines(error: BaseException) -> str:
    """Returns at most two lines of a library's message, cut to what fits an error of ours."""
    lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:2]) or type(error).__name__


def refuse_images(request: SampleRequest, ids: np.ndarray) -> np.ndarray:
    """Returns the tokens as they are. Raises DataError for a prompt that shows images."""
    prompt = request.prompt
    if request.images:
        raise DataError(
            (
                f"a question shows {len(request.images)} images, and this generator or its model "
                "takes none."
            ),
            where="images",
            todo="Take a model of image-text kind for the role that is asked.",
        )
    if prompt.images:
        raise DataError(
            (
                f"row {prompt.row} names {len(prompt.images)} images, and this generator or its "
                "model takes none."
            ),
            where=prompt.images[0],
            todo=(
                "Take a generator and a model of image-text kind, or leave out data.config.images."
            ),
        )
    return ids


def most_actions(request: SampleRequest, most: int, room: int) -> int:
    """Returns how many actions an answer may have.

    most: what the settings allow.
    room: tokens that the context has left behind the prompt.
    """
    return min(most, room, request.most or most)


def stops_of(request: SampleRequest, stop: Sequence[str]) -> list[str]:
    """Returns the texts that end an answer: those of the settings, then its own."""
    return [*stop, *(text for text in request.stop if text)]


class PromptEncoder:
    """Turns prompts into the tokens that a model goes on behind.

    tokenizer: the model's.
    ends: ids that end an answer.
    template_kwargs: variables of the chat template.

    A text gets the special tokens that the tokenizer adds in front of it, and none behind it: what
    ends there cannot go on. A chat gets none, because its template writes its own.
    """

    def __init__(
        self,
        tokenizer: Any,
        ends: Iterable[int] = (),
        template_kwargs: Mapping[str, Any] = NO_VARIABLES,
    ) -> None:
        self.tokenizer = tokenizer
        self.ends = frozenset(ends)
        self._chats = Chats(tokenizer, template_kwargs)
        self._added = added_tokens(tokenizer)

    def encode(self, prompts: Sequence[Prompt]) -> list[np.ndarray | Unreadable]:
        """Returns of each prompt its tokens, int32[P], or why it has none.

        Those of an empty text may be none.
        """
        encoded: list[np.ndarray | Unreadable] = [np.zeros(0, np.int32)] * len(prompts)
        texts: dict[int, str] = {}
        chats: dict[int, str] = {}
        for place, prompt in enumerate(prompts):
            if prompt.messages is None:
                texts[place] = prompt.text or ""
                continue
            try:
                chats[place] = self._chats.asked(prompt.messages)
            except Unreadable as error:
                encoded[place] = error
        for of_place, special in ((texts, True), (chats, False)):
            for place, ids in zip(of_place, self._ids(of_place.values(), special), strict=True):
                encoded[place] = self._checked(ids, is_chat=not special)
        return encoded

    def _ids(self, texts: Iterable[str], special: bool) -> list[list[int] | Unreadable]:
        """Returns the tokens of each text, or why it has none."""
        rows = all_tokens(self.tokenizer, list(texts), special=special)
        if not special:
            return rows
        return [row if isinstance(row, Unreadable) else self._added.asked(row) for row in rows]

    def _checked(self, ids: list[int] | Unreadable, is_chat: bool) -> np.ndarray | Unreadable:
        """Returns the tokens of a prompt, or why nothing can go on behind them."""
        if isinstance(ids, Unreadable):
            return ids
        has_more = is_chat or len(ids) > self._added.before
        if ids and has_more and ids[-1] in self.ends:
            token = self.tokenizer.convert_ids_to_tokens(ids[-1])
            who = "the chat template ends it" if is_chat else "its text ends"
            return Unreadable(f"{who} with {token}, which ends an answer; nothing can follow")
        return np.array(ids, np.int32)

    def fitting(
        self,
        requests: Sequence[SampleRequest],
        context_length: int,
        version: int,
        lay: Callable[[SampleRequest, np.ndarray], np.ndarray] = refuse_images,
    ) -> tuple[list[tuple[SampleRequest, np.ndarray, int]], list[Finished]]:
        """Returns (requests that can be served, records of those that fail).

        A request that can be served is (request, prompt int32[P], room for actions). Requests of
        one ordinal have one prompt, which is encoded once; where they give its tokens, these are
        read as they are. Those fail whose prompt

            prompt_unreadable   cannot be written, or ends with an answer
            prompt_empty        has no token
            prompt_too_long     leaves no room in the context

        context_length: the most tokens of prompt and completion.
        version: version of the weights, for the records that fail.
        lay: makes room for a prompt's images among its tokens, once for each ordinal; by default a
            prompt that shows images raises DataError.
        """
        first = {request.ordinal: request for request in reversed(requests)}
        encoded = self._encoded(list(first.values()))
        prompts: dict[int, np.ndarray] = {}
        reasons: dict[int, str] = {}
        for (ordinal, request), ids in zip(first.items(), encoded, strict=True):
            if isinstance(ids, np.ndarray):
                ids = prompts[ordinal] = lay(request, ids)
            if reason := reason_against(ids, context_length):
                reasons[ordinal] = reason
                self._log(request.prompt, reason)
        failed = [
            Finished(
                request=request,
                status=FAILED,
                versions=(version, version),
                reason=reasons[request.ordinal],
            )
            for request in requests
            if request.ordinal in reasons
        ]
        fitting = [
            (request, prompt, context_length - len(prompt))
            for request in requests
            if request.ordinal not in reasons
            for prompt in [prompts[request.ordinal]]
        ]
        return fitting, failed

    def _encoded(self, requests: Sequence[SampleRequest]) -> list[np.ndarray | Unreadable]:
        """Returns of each request the tokens of its prompt, int32[P], or why it has none."""
        unknown = [request.prompt for request in requests if request.ids is None]
        encoded = iter(self.encode(unknown))
        return [
            next(encoded) if request.ids is None else _given(request, request.ids)
            for request in requests
        ]

    def _log(self, prompt: Prompt, reason: str) -> None:
        """Logs why a prompt cannot be answered, since a record has room for the beginning alone."""
        path = self.tokenizer.name_or_path
        log.warning("row %d cannot be answered by %s: %s", prompt.row, path, reason)


def _given(request: SampleRequest, ids: np.ndarray) -> np.ndarray | Unreadable:
    """Returns the tokens that a request gives; images have no places among them."""
    if request.images or request.prompt.images:
        return Unreadable("it shows images, and its tokens are given")
    return np.array(ids, np.int32)


def reason_against(ids: np.ndarray | Unreadable, context_length: int) -> str:
    """Returns why a prompt cannot be answered: a word, and what is to be known; "": it can."""
    if isinstance(ids, Unreadable):
        return f"prompt_unreadable: {ids}"
    if not len(ids):
        return "prompt_empty"
    if len(ids) >= context_length:
        return f"prompt_too_long: {len(ids)} tokens, and the context has {context_length}"
    return ""


def all_tokens(
    tokenizer: Any, texts: Sequence[str], *, special: bool
) -> list[list[int] | Unreadable]:
    """Returns the tokens of each text, or why the tokenizer has none for it.

    special: whether they are with the special tokens that the tokenizer adds.
    """
    if not texts:
        return []
    options = {"add_special_tokens": special, "return_attention_mask": False, "verbose": False}
    try:
        return list(tokenizer(list(texts), **options).input_ids)
    except Exception as error:  # isolation point: its library raises Exception itself
        if len(texts) == 1:
            return [Unreadable(f"the tokenizer refuses it: {first_lines(error)}")]
    return [ids for text in texts for ids in all_tokens(tokenizer, [text], special=special)]


@dataclass(frozen=True, kw_only=True)
class AddedTokens:
    """What a tokenizer adds to a text.

    before: tokens in front of it.
    behind: tokens behind it.
    bos: the token that begins a text; None where there is none.
    """

    before: int = 0
    behind: int = 0
    bos: int | None = None

    def asked(self, ids: list[int]) -> list[int]:
        """Returns the tokens of a text that something is to follow.

        They are those of the whole text without what the tokenizer added behind it.

        ids: of the text with all that the tokenizer adds.
        """
        return self.whole(ids[: len(ids) - self.behind])

    def whole(self, ids: list[int]) -> list[int]:
        """Returns the tokens of a text that nothing follows.

        They begin once where the text itself begins with what the tokenizer adds in front.

        ids: of the text with all that the tokenizer adds.
        """
        twice = self.before and self.bos is not None and ids[:2] == [self.bos, self.bos]
        return ids[1:] if twice else ids


def added_tokens(tokenizer: Any) -> AddedTokens:
    """Finds out what a tokenizer adds to texts."""
    for text in itertools.chain(_TEXTS, itertools.islice(tokenizer.get_vocab(), _WORDS)):
        try:
            plain = list(tokenizer(text, add_special_tokens=False).input_ids)
            whole = list(tokenizer(text, add_special_tokens=True).input_ids)
        except Exception:  # isolation point: a tokenizer may not take what it has no token for
            continue
        for before in range(len(whole) - len(plain) + 1 if plain else 0):
            if whole[before : before + len(plain)] == plain:
                behind = len(whole) - before - len(plain)
                return AddedTokens(before=before, behind=behind, bos=tokenizer.bos_token_id)
    return AddedTokens()


def decode(tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[str]:
    """Returns the text of each row of ids, without special tokens."""
    if tokenizer.is_fast and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        # the same as batch_decode, in one call of the Rust library
        return list(
            tokenizer.backend_tokenizer.decode_batch(
                [list(row) for row in rows], skip_special_tokens=True
            )
        )
    return list(tokenizer.batch_decode(rows, skip_special_tokens=True))


def ids_without_token(tokenizer: Any, size: int | None, ends: Iterable[int]) -> list[int]:
    """Returns the ids that no sample may have: those that neither have a token nor end an answer.

    An embedding may have more rows than the tokenizer has tokens. Nobody sees such an id in a text.

    size: how many ids the model has; None where that is not known, which leaves all.
    """
    without = set(range(size or 0)) - set(tokenizer.get_vocab().values()) - set(ends)
    if without:
        log.warning("%d of %d ids have no token, and are never sampled", len(without), size)
    return sorted(without)


def copy_other_files(source: str, directory: Path, tokenizer: Any) -> None:
    """Copies what lies beside a model's weights: its tokenizer, chat templates, generation_config.

    The files go as they are, because transformers would write its own reading of them, and refuses
    to write some.
    """
    if not Path(source).is_dir():  # a model of the hub
        tokenizer.save_pretrained(directory)
        return
    for file in sorted(Path(source).iterdir()):
        if file.is_dir() and file.name == _TEMPLATES:
            shutil.copytree(file, directory / file.name, dirs_exist_ok=True)
        elif file.suffix in _GO_ALONG and not any(fnmatch(file.name, name) for name in _STAY):
            shutil.copy2(file, directory / file.name)
