"""What tests of renderers share: a tokenizer for any chat template, and a contract."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from gcore_testing import Contract

from .rendering import Renderer
from .templates import Message, call

#: Texts that look like special tokens.
_SPECIAL = re.compile(
    r"<\|?[A-Za-z_/][\w/.:| ]{0,28}\|?>|<\|[^|]{1,30}\|>|\[/?[A-Z_]{3,20}\]|<｜[^｜]{1,30}｜>"
)
#: Whose frequent pairs become tokens, so that one text can be cut in several ways.
_CORPUS = (
    "the answer is yes, and then no: a tool said that it is 42, so the user asked again.",
    "assistant user system tool name arguments parameters function said next asked observation",
)


def byte_tokenizer(
    template: str, special: Sequence[str] = (), structural: Sequence[str] = ()
) -> Any:
    """Makes a tokenizer of bytes and some 200 longer tokens, with a chat template.

    special: texts of its special tokens besides <bos> and <eos>.
    structural: texts of tokens that are added without being special.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=460,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return _with_added(backend, template, special, structural)


def spaced_tokenizer(
    template: str, special: Sequence[str] = (), structural: Sequence[str] = ()
) -> Any:
    """Makes a tokenizer as SentencePiece has them: a space is a part of the word behind it.

    It writes a character that it does not know by its bytes, and one of several forms, as ＜, by
    the plain one. Arguments as of ``byte_tokenizer``.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=[chr(code) for code in range(33, 127)],
        special_tokens=["<unk>", *(f"<0x{code:02X}>" for code in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    described = json.loads(backend.to_str())
    described["added_tokens"] = []  # bytes are no special tokens
    return _with_added(Tokenizer.from_str(json.dumps(described)), template, special, structural)


def _with_added(
    backend: Any, template: str, special: Sequence[str], structural: Sequence[str]
) -> Any:
    """Returns a tokenizer of transformers with further tokens and a chat template."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    backend.add_special_tokens(["<bos>", "<eos>", *special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in structural])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = template
    return tokenizer


def letter_by_letter(tokenizer: Any, text: str) -> list[int]:
    """Returns the ids of a text that is cut into its letters, as a sampler may cut it."""

    def ids_of(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False).input_ids)

    # ~ is in no longer token; behind it no tokenizer puts a space in front of the letter
    behind = len(ids_of("~"))
    rest = [id for letter in text[1:] for id in ids_of(f"~{letter}")[behind:]]
    return ids_of(text[:1]) + rest


def special_texts(template: str) -> list[str]:
    """Returns what looks like special tokens in the text of a chat template."""
    return sorted(set(_SPECIAL.findall(template)))


#: Writes each turn between two tokens, with a line break behind the second.
CHATML = """
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

#: The same, and drops thoughts of the turns before the last question.
STRIPPING = CHATML.replace(
    "{%- for message in messages %}",
    "{%- set last = namespace(at=0) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{%- endfor %}"
    "{%- for message in messages %}",
).replace("if message.reasoning_content", "if message.reasoning_content and loop.index0 > last.at")

#: Trims contents, names roles in headers, and writes tool results as JSON.
LLAMA = """
{{- '<bos>' }}
{%- for message in messages %}
{{- '<|head|>' + ('ipython' if message.role == 'tool' else message.role) + '<|neck|>\\n\\n' }}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- elif message.role == 'tool' %}{{ message.content | tojson }}
{%- else %}{{ message.content | trim }}{% endif %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|neck|>\\n\\n' }}{% endif %}
"""

#: Ends no turn: the next turn's role does.
GLM = """
{{- '[gMASK]' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|observation|>\\n' + message.content }}
{%- else %}
{{- '<|' + message.role + '|>\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key><arg_value>' + (value | string) + '</arg_value>' }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""

#: Begins no turn of the assistant by a token, and names no role.
MISTRAL = """
{{- '<bos>' }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ ' ' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + (call.function.arguments | tojson) }}
{%- endfor %}{{ '<eos>' }}{% endif %}
{%- endfor %}
"""

#: Begins a turn of the assistant whatever it is asked to begin.
DEAF = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
"""

_CHATML = ["<|im_start|>", "<|im_end|>"]
_TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]

_MISTRAL = [
    f"[{slash}{name}]"
    for name in ("INST", "TOOL_RESULTS", "AVAILABLE_TOOLS")
    for slash in ("", "/")
] + ["[TOOL_CALLS]"]

#: Name -> template, its special tokens, other added tokens, those that end a turn.
FAMILIES: dict[str, tuple[str, list[str], list[str], list[str]]] = {
    "chatml": (CHATML, _CHATML, _TAGS, ["<|im_end|>"]),
    "stripping": (STRIPPING, _CHATML, _TAGS, ["<|im_end|>"]),
    "llama": (LLAMA, ["<|head|>", "<|neck|>", "<|eot|>"], [], ["<|eot|>"]),
    "glm": (
        GLM,
        ["[gMASK]", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"],
        _TAGS[:2],
        ["<|user|>", "<|observation|>"],
    ),
    "mistral": (MISTRAL, _MISTRAL, [], ["<eos>"]),
}


def tokenizer_of(family: str) -> tuple[Any, list[int]]:
    """Returns a tokenizer with a family's template, and the ids that end a turn."""
    template, special, structural, ends = FAMILIES[family]
    made = spaced_tokenizer if family == "mistral" else byte_tokenizer
    tokenizer = made(template, special, structural)
    return tokenizer, [tokenizer.convert_tokens_to_ids(end) for end in ends]


@dataclass(frozen=True, kw_only=True)
class Made:
    """A renderer, and what it was made of.

    tools: whether its template has a place for answers of tools.
    """

    renderer: Renderer
    tokenizer: Any
    end_ids: Collection[int]
    tools: bool = True

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def text(self, ids: Sequence[int]) -> str:
        decoded: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return decoded

    def count_special(self, ids: Sequence[int]) -> int:
        """Returns how many of the ids are special tokens, or such as were added."""
        known = set(self.tokenizer.added_tokens_decoder) | set(self.tokenizer.all_special_ids)
        return sum(id in known for id in ids)


QUESTION: Message = {"role": "user", "content": "is it so?"}
ADDER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


class RendererContract(Contract):
    """What the rest of G-Core takes for granted of a renderer; one fixture is overridden."""

    kind: ClassVar[str] = "renderer"

    @pytest.fixture
    def made(self) -> Made:
        raise NotImplementedError("Override the fixture `made`.")

    def replies(self, made: Made, text: str) -> list[list[Message]]:
        """Returns what may follow a turn of the policy, each with a text in it."""
        user: Message = {"role": "user", "content": text}
        answer = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": text}
        return [[user], [answer]] if made.tools else [[user]]

    def turns(self, made: Made) -> list[list[int]]:
        """Returns turns of the policy without an end, some of tokens that no encoding gives."""
        return [made.ids("yes"), [*made.ids("th"), *made.ids("e ans"), *made.ids("wer")]]

    def test_a_bridge_is_behind_what_was_there_and_changes_none_of_it(self, made: Made) -> None:
        for turn in self.turns(made):
            for new in self.replies(made, "then no"):
                for end in [*([id] for id in made.end_ids), []]:
                    ids = made.renderer.start([QUESTION]) + turn + end
                    before = list(ids)
                    bridge = made.renderer.bridge(ids, new)
                    assert ids == before
                    if bridge is not None:
                        assert bridge.drop in ((0, 1) if end else (0,))
                        assert "then no" in made.text(bridge.ids)

    def test_a_cut_turn_is_ended_as_one_that_has_ended(self, made: Made) -> None:
        for turn in self.turns(made):
            for new in self.replies(made, "then no"):
                ids = made.renderer.start([QUESTION]) + turn
                cut = made.renderer.bridge(ids, new)
                for end in made.end_ids:
                    ended = made.renderer.bridge([*ids, end], new)
                    assert (cut is None) == (ended is None)
                    if cut is not None and ended is not None:
                        left = [*ids, end][: len(ids) + 1 - ended.drop]
                        assert made.text(ids + cut.ids) == made.text(left + ended.ids)

    def test_a_bridge_says_what_the_whole_conversation_says(self, made: Made) -> None:
        said = {"role": "assistant", "content": "yes"}
        new: Message = {"role": "user", "content": "then no"}
        for end in made.end_ids:
            ids = [*made.renderer.start([QUESTION]), *made.ids("yes"), end]
            bridge = made.renderer.bridge(ids, [new])
            if bridge is not None:
                ids = ids[: len(ids) - bridge.drop] + bridge.ids
                assert made.text(ids) == made.text(made.renderer.start([QUESTION, said, new]))

    def test_words_of_another_as_the_assistants_are_given_or_declined(self, made: Made) -> None:
        """They are no turn of the policy's: nothing but its own tokens stays where it stood."""
        ids = made.renderer.start([QUESTION]) + made.ids("yes")
        told: Message = {"role": "assistant", "content": "asked again"}
        bridge = made.renderer.bridge(ids, [QUESTION, told, QUESTION])
        if bridge is not None:
            assert "asked again" in made.text(bridge.ids)

    def test_no_content_becomes_a_special_token(self, made: Made) -> None:
        special = [token.content for token in made.tokenizer.added_tokens_decoder.values()]
        for text in (*special, f"a{special[-1]}b {special[-1]}", "".join(special)):
            ids = made.renderer.start([QUESTION]) + made.ids("yes")
            for new, harmless in zip(
                self.replies(made, text), self.replies(made, "x"), strict=True
            ):
                bridge, other = (made.renderer.bridge(ids, each) for each in (new, harmless))
                assert (bridge is None) == (other is None)
                if bridge is not None and other is not None:
                    assert text in made.text(bridge.ids)
                    assert made.count_special(bridge.ids) == made.count_special(other.ids)
            asked = made.renderer.start([{"role": "user", "content": text}])
            assert text in made.text(asked)
            assert made.count_special(asked) == made.count_special(
                made.renderer.start([{"role": "user", "content": "x"}])
            )

    def test_no_given_call_and_no_description_of_a_tool_becomes_a_special_token(
        self, made: Made
    ) -> None:
        special = [token.content for token in made.tokenizer.added_tokens_decoder.values()]
        if not made.tools:
            pytest.skip("its template knows no tools")

        def written(text: str) -> list[int]:
            said = {
                "role": "assistant",
                "content": "",
                "tool_calls": [call("add", {"a": text, "b": f"{text} and {text}"})],
            }
            answer = {"role": "tool", "tool_call_id": "call00000", "content": text}
            tool = {**ADDER, "function": {**ADDER["function"], "description": text}}
            return made.renderer.start([QUESTION, said, answer, QUESTION], [tool])

        harmless = made.count_special(written("x"))
        for text in special:
            assert made.count_special(written(text)) == harmless

    def test_what_was_said_is_read_without_the_token_that_ended_it(self, made: Made) -> None:
        for end in made.end_ids:
            assert made.renderer.reply([*made.ids("yes"), end]).text == "yes"
        assert made.renderer.reply(made.ids("yes")).text == "yes"
        assert made.renderer.reply([]).text == ""

    def test_no_ids_are_too_odd_to_be_read(self, made: Made) -> None:
        for id in range(len(made.tokenizer)):
            said = made.renderer.reply([id, *made.ids("{"), id])
            assert said.unparsed <= len(said.calls)
