"""Turns prompts into token ids and back, with the tokenizer that lies beside a model's weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gcore_core.contract.errors import DataError
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FAILED, Prompt

#: What transformers raises for files that are missing, malformed or of an unknown architecture.
LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError)
_TOKENIZER_FILES = frozenset(
    {"vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja"}
)
_TOKENIZER_FILES |= {
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
}

#: A chat template that gets nothing besides the messages.
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


def load_tokenizer(
    path: str, embedded: int | None, *, threads: int = 1, trust_remote_code: bool = False
) -> Any:
    """Opens the tokenizer of a model directory or of a name on the hub.

    embedded: how many tokens the model embeds; None when that is not known.

    Raises DataError when it cannot be loaded, or knows tokens that the model does not embed.
    """
    if threads == 1:
        # else the tokenizer library's thread pool takes more CPU time for small batches than their
        # work
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except LOAD_ERRORS as error:
        raise unreadable("tokenizer", path, error) from error
    if embedded is not None and len(tokenizer) > embedded:
        raise DataError(
            f"tokenizer has {len(tokenizer)} tokens, but the model embeds only {embedded}.",
            where=path,
            todo=(
                "Take the tokenizer of this model, or call model.resize_token_embeddings and "
                "save it again."
            ),
        )
    return tokenizer


def unreadable(what: str, path: str, error: Exception) -> DataError:
    """Makes the DataError for something that transformers could not load."""
    return DataError(f"transformers cannot load the {what}.", where=path, why=first_lines(error))


def first_lines(error: BaseException) -> str:
    """Returns at most two lines of a library's message, cut to what fits an error of ours."""
    lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:2]) or type(error).__name__


def encode_requests(
    tokenizer: Any,
    requests: Sequence[SampleRequest],
    template_kwargs: Mapping[str, Any] = NO_VARIABLES,
) -> dict[int, np.ndarray]:
    """Returns ordinal -> tokens, int32[P].

    Requests of one ordinal have one prompt, which is encoded once.

    template_kwargs: variables of the chat template.
    """
    first = {request.ordinal: request.prompt for request in reversed(requests)}
    ids = encode(tokenizer, list(first.values()), template_kwargs)
    return dict(zip(first, ids, strict=True))


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


def encode_fitting(
    tokenizer: Any,
    requests: Sequence[SampleRequest],
    context_length: int,
    version: int,
    lay: Callable[[SampleRequest, np.ndarray], np.ndarray] = refuse_images,
    template_kwargs: Mapping[str, Any] = NO_VARIABLES,
) -> tuple[list[tuple[SampleRequest, np.ndarray, int]], list[Finished]]:
    """Returns (requests that can be served, records of those that fail).

    A request that can be served is (request, prompt int32[P], room for actions). One fails whose
    prompt is empty or leaves no room in the context.

    context_length: the most tokens of prompt and completion.
    version: version of the weights, for the records that fail.
    lay: makes room for a prompt's images among its tokens, once for each ordinal; by default a
        prompt that shows images raises DataError.
    template_kwargs: variables of the chat template.
    """
    first = {request.ordinal: request for request in reversed(requests)}
    encoded = {
        ordinal: lay(first[ordinal], ids)
        for ordinal, ids in encode_requests(tokenizer, requests, template_kwargs).items()
    }
    fitting = []
    failed = []
    for request in requests:
        prompt = encoded[request.ordinal]
        room = context_length - len(prompt)
        if len(prompt) and room > 0:
            fitting.append((request, prompt, room))
        else:
            reason = "prompt_too_long" if len(prompt) else "prompt_empty"
            failed.append(
                Finished(request=request, status=FAILED, versions=(version, version), reason=reason)
            )
    return fitting, failed


def encode(
    tokenizer: Any,
    prompts: Sequence[Prompt],
    template_kwargs: Mapping[str, Any] = NO_VARIABLES,
) -> list[np.ndarray]:
    """Returns the tokens of each prompt, int32[P].

    template_kwargs: variables of the chat template.

    No special tokens are added to what a chat template writes, because it writes its own.
    """
    encoded: list[np.ndarray] = [np.zeros(0, np.int32)] * len(prompts)
    plain = [i for i, prompt in enumerate(prompts) if prompt.messages is None]
    chats = [i for i, prompt in enumerate(prompts) if prompt.messages is not None]
    texts = [prompts[i].text or "" for i in plain]
    turns = [
        tokenizer.apply_chat_template(
            prompts[i].messages, add_generation_prompt=True, tokenize=False, **template_kwargs
        )
        for i in chats
    ]
    for where, batch, special in ((plain, texts, True), (chats, turns, False)):
        if batch:
            ids = tokenizer(
                batch, add_special_tokens=special, return_attention_mask=False
            ).input_ids
            for i, row in zip(where, ids, strict=True):
                encoded[i] = np.array(row, np.int32)
    return encoded


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


def end_tokens(answers: Iterable[Any]) -> list[int]:
    """Returns the ids that end a completion, in ascending order: the union of those given.

    answers: what the generation config, the model config and the tokenizer name; each is an id, a
        list of ids, or None.
    """
    tokens: set[int] = set()
    for ids in answers:
        tokens.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return sorted(tokens)


def copy_tokenizer(source: str, directory: Path, tokenizer: Any) -> None:
    """Copies the tokenizer's files as they are, because transformers would write its own reading of
    them.
    """
    if not Path(source).is_dir():  # a model of the hub
        tokenizer.save_pretrained(directory)
        return
    for file in sorted(Path(source).iterdir()):
        if file.is_file() and ("token" in file.name or file.name in _TOKENIZER_FILES):
            shutil.copy2(file, directory / file.name)
