"""The tokens that a model goes on behind: those of the prompt, and nothing that ends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_language.chats import Unreadable
from gcore_language.prompts import (
    PromptEncoder,
    added_tokens,
    ids_without_token,
    load_tokenizer,
    most_actions,
    stops_of,
)
from gcore_language.tiny import VOCABULARY, save_model, save_tokenizer
from tokenizers.processors import TemplateProcessing

from gcore_core.contract.errors import DataError
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import FAILED, Prompt

END = 2
#: Writes contents, and ends each turn with the end token.
CHAT = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    return tmp_path


def loaded(directory: Path, single: str | None = None, **settings: Any) -> Any:
    """Opens the tokenizer after some settings of its files were changed."""
    file = directory / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    tokenizer = load_tokenizer(str(directory), None)
    if single is not None:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=single, special_tokens=[("<bos>", 1), ("<eos>", END)]
        )
    return tokenizer


def words(tokenizer: Any, prompt: Prompt, ends: list[int] | None = None) -> str:
    (ids,) = PromptEncoder(tokenizer, [END] if ends is None else ends).encode([prompt])
    if isinstance(ids, Unreadable):
        raise ids
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def of_text(text: str) -> Prompt:
    return Prompt(row=0, text=text)


@pytest.mark.parametrize(
    ("single", "written"),
    [
        ("$A", "1+2="),
        ("<bos> $A", "<bos>1+2="),
        ("$A <eos>", "1+2="),
        ("<bos> $A <eos>", "<bos>1+2="),
        ("<bos> <bos> $A <eos> <eos>", "<bos><bos>1+2="),
    ],
)
@pytest.mark.parametrize("ends", [[END], []])
def test_what_a_tokenizer_adds_behind_a_text_is_no_part_of_its_prompt(
    directory: Path, single: str, written: str, ends: list[int]
) -> None:
    tokenizer = loaded(directory, single)
    if single.startswith("<bos> <bos>"):
        written = written.removeprefix("<bos>")
    assert words(tokenizer, of_text("1+2="), ends) == written
    assert tokenizer("1+2=").input_ids[-1] == END or "<eos>" not in single


def test_a_text_that_begins_with_the_first_token_has_it_once(directory: Path) -> None:
    assert words(loaded(directory), of_text("<bos>1+2=")) == "<bos>1+2="
    assert words(loaded(directory, "$A"), of_text("<bos><bos>1")) == "<bos><bos>1"


def test_a_prompt_that_ends_with_an_end_token_is_refused(directory: Path) -> None:
    tokenizer = loaded(directory)
    with pytest.raises(Unreadable, match="its text ends with <eos>, which ends an answer"):
        words(tokenizer, of_text("1+2=3<eos>"))
    tokenizer.chat_template = CHAT
    chat = Prompt(row=0, messages=[{"role": "user", "content": "1+2="}])
    with pytest.raises(Unreadable, match="the chat template ends it with <eos>, which ends"):
        words(tokenizer, chat)
    tokenizer.chat_template = CHAT + "{% if add_generation_prompt %}y:{% endif %}"
    assert words(tokenizer, chat) == "1+2=<eos>y:"


def test_a_tokenizer_whose_texts_begin_with_its_end_token_has_prompts(directory: Path) -> None:
    """As OPT's and GPT-2's, whose first and last token are one."""
    tokenizer = loaded(directory, "<eos> $A")
    assert words(tokenizer, of_text("1+2=")) == "<eos>1+2="
    assert words(tokenizer, of_text("")) == "<eos>"


def test_what_a_file_says_of_cutting_and_padding_changes_no_prompt(directory: Path) -> None:
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    pad = {
        "strategy": {"Fixed": 9},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    tokenizer = loaded(directory, truncation=cut, padding=pad)
    tokenizer.model_max_length = 4
    assert words(tokenizer, of_text("1+2+3+4=")) == "<bos>1+2+3+4="
    assert words(tokenizer, of_text("1")) == "<bos>1"


def test_each_prompt_that_cannot_be_answered_fails_alone_and_says_why(directory: Path) -> None:
    tokenizer = loaded(directory, "$A")
    tokenizer.chat_template = "{{ raise_exception('no chats') }}"
    prompts = [
        of_text("1+2="),
        of_text(""),
        of_text("1+2+3+4="),
        Prompt(row=3, messages=[{"role": "user", "content": "1"}]),
    ]
    requests = [
        SampleRequest(ordinal=place, sample=sample, seed=0, prompt=prompt)
        for place, prompt in enumerate(prompts)
        for sample in range(2)
    ]
    fitting, failed = PromptEncoder(tokenizer, [END]).fitting(requests, 6, 4)
    assert [(r.ordinal, r.sample, len(ids), room) for r, ids, room in fitting] == [
        (0, 0, 4, 2),
        (0, 1, 4, 2),
    ]
    assert {one.status for one in failed} == {FAILED}
    assert [one.reason for one in failed[::2]] == [
        "prompt_empty",
        "prompt_too_long: 8 tokens, and the context has 6",
        "prompt_unreadable: the chat template refuses it: no chats",
    ]


def test_ids_are_counted_from_the_highest_and_not_by_how_many_there_are(directory: Path) -> None:
    tokenizer = loaded(directory)
    assert ids_without_token(tokenizer, VOCABULARY, [END]) == []
    assert ids_without_token(tokenizer, None, [END]) == []
    without = ids_without_token(tokenizer, VOCABULARY + 3, [VOCABULARY + 1])
    assert without == [VOCABULARY, VOCABULARY + 2]


def test_a_tokenizer_with_a_gap_below_its_last_id_does_not_fit_a_smaller_model(
    directory: Path,
) -> None:
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"][":"] += 5
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"tokenizer has {VOCABULARY + 5} tokens, but the model"):
        load_tokenizer(str(directory), VOCABULARY)
    tokenizer = load_tokenizer(str(directory), VOCABULARY + 5)
    assert len(ids_without_token(tokenizer, VOCABULARY + 5, [END])) == 5


def test_what_a_tokenizer_adds_is_found_where_it_does_not_know_a_letter(directory: Path) -> None:
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["unk_token"] = "nowhere"
    file.write_text(json.dumps(content))
    tokenizer = loaded(directory, "<bos> $A <eos>")
    with pytest.raises(Exception, match="UNK"):
        tokenizer("a")
    added = added_tokens(tokenizer)
    assert (added.before, added.behind) == (1, 1)


def test_a_text_that_the_tokenizer_refuses_fails_alone(directory: Path) -> None:
    tokenizer = loaded(directory)
    texts = ["1", "lone \ud800", "2"]
    encoded = PromptEncoder(tokenizer, [END]).encode(list(map(of_text, texts)))
    assert [isinstance(ids, Unreadable) for ids in encoded] == [False, True, False]
    assert str(encoded[1]).startswith("the tokenizer refuses it: ")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no file there has its vocabulary.*Copy tokenizer.json"),
        ({"tokenizer.model": b"version https://git-lfs"}, "no model of SentencePiece.*Copy that"),
        ({"spiece.model": b"garbage"}, "spiece.model is no model of SentencePiece.*Copy that"),
        (
            {"tokenizer.model": b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"},
            "read by the package sentencepiece, which is not installed.*Install sentencepiece",
        ),
    ],
    ids=["none", "pointer", "garbage", "whole"],
)
def test_sentencepiece_is_asked_for_only_where_it_would_help(
    files: dict[str, bytes], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore_language.prompts.find_spec", lambda name: None)
    save_model(tmp_path, "llama")
    (tmp_path / "tokenizer.json").unlink()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"(?s)cannot load the tokenizer.*{says}") as error:
        load_tokenizer(str(tmp_path), None)
    text = str(error.value).lower()
    assert ("install sentencepiece" in text) == ("Install sentencepiece" in says)
    assert "tiktoken" not in text


def asked(ordinal: int, text: str = "1+2=", **given: Any) -> SampleRequest:
    return SampleRequest(ordinal=ordinal, sample=0, seed=1, prompt=of_text(text), **given)


def test_given_tokens_are_not_encoded_and_may_end_with_an_end_token(directory: Path) -> None:
    encoder = PromptEncoder(loaded(directory), [END])
    given = np.array([7, 5, END], np.int64)
    requests = [asked(0), asked(1, "<eos>", ids=given), asked(2, "7")]
    fitting, failed = encoder.fitting(requests, context_length=100, version=3)
    assert not failed
    prompts = {request.ordinal: (ids.dtype, ids.tolist(), room) for request, ids, room in fitting}
    plain = {
        place: encoder.encode([asked(place, text).prompt])[0]
        for place, text in ((0, "1+2="), (2, "7"))
    }
    assert prompts[1] == (np.int32, given.tolist(), 97)
    for place, ids in plain.items():
        assert prompts[place][1] == list(ids)


def test_given_tokens_that_fill_the_context_fail_alone(directory: Path) -> None:
    encoder = PromptEncoder(loaded(directory), [END])
    requests = [asked(0, ids=np.full(8, 5)), asked(1, ids=np.zeros(0, np.int32)), asked(2)]
    fitting, failed = encoder.fitting(requests, context_length=8, version=0)
    assert [request.ordinal for request, _, _ in fitting] == [2]
    reasons = {record.request.ordinal: record.reason.partition(":")[0] for record in failed}
    assert reasons == {0: "prompt_too_long", 1: "prompt_empty"}


@pytest.mark.parametrize(("most", "allowed"), [(0, 12), (5, 5), (40, 12)])
def test_a_limit_of_a_request_never_widens_that_of_the_settings(most: int, allowed: int) -> None:
    assert most_actions(asked(0, most=most), 12, room=100) == allowed
    assert most_actions(asked(0, most=most), 12, room=3) == min(allowed, 3)


def test_stops_of_a_request_come_beside_those_of_the_settings() -> None:
    assert stops_of(asked(0, stop=("b", "")), ["a"]) == ["a", "b"]
    assert stops_of(asked(0), []) == []


def test_given_tokens_of_a_prompt_with_images_fail_alone(directory: Path) -> None:
    encoder = PromptEncoder(loaded(directory), [END])
    shows = Prompt(row=0, text="1", images=["a.png"])
    requests = [
        SampleRequest(ordinal=0, sample=0, seed=1, prompt=shows, ids=np.full(3, 5)),
        asked(1),
    ]
    fitting, failed = encoder.fitting(requests, context_length=50, version=0)
    assert [request.ordinal for request, _, _ in fitting] == [1]
    (record,) = failed
    assert record.reason == "prompt_unreadable: it shows images, and its tokens are given"
