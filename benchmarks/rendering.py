"""Holds the rendering of environments to the chat templates that lie in TRL's wheel.

    pip install --no-deps --target TRL trl==1.16.0
    python benchmarks/rendering.py --templates TRL/trl/chat_templates [--json] [--check] [--show]

Each template gets a tokenizer of bytes with the special tokens that it names, or the one that
``--tokenizer`` names. Conversations of one to three turns are held, of which the policy says what
the template writes of it, once answered by the user and once by tools. Numbers are of templates.

strict_equal_user, strict_equal_tool: in which what was sampled and given says the same as the
    template's rendering of the whole conversation, in every turn.
strict_differs: in which it says something else, with either answer.
strict_declined_user, strict_declined_tool: in which a turn has no bridge, so an episode forks.
keep_declined_user: in which there is none though histories are kept.
unsupported_user, unsupported_tool: which cannot be asked at all; ``--show`` says why.

Then ``--conversations`` on each template that has tools: tokens of the policy are cut in two at
random, turns are cut, and users and tools say texts of special tokens.

forged_special_ids: special tokens that a content added.
old_ids_changed: turns after which an id was another than before.
encoded_anew_differs_share: of turns, in how many the encoded text of the whole conversation has
    other ids than the conversation.
bridge_ms: milliseconds of a bridge.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore_environments.rendering import TemplateRenderer
from gcore_environments.templates import RefusedByTemplate, Template, call
from gcore_environments.testing import ADDER, byte_tokenizer, special_texts
from report import Claim, add_options, publish

from gcore_core.contract.errors import DataError

DISTRIBUTIONS = ["gcore-core", "gcore-environments", "transformers", "tokenizers"]
#: Where `tox run -e bench-trl --notest` installs TRL.
TOX = Path(__file__).parents[1] / ".tox" / "bench-trl"
HOW = (
    "pip install --no-deps --target DIRECTORY trl==1.16.0, and give "
    "--templates DIRECTORY/trl/chat_templates"
)
KINDS = ("user", "tool")
MARK = "gcoremark"
WORDS = ("yes", "no", "the answer", "42", " ", "\n", "é", "漢字", "🙂", "</s>", "a  b", "\t")
MORE_WORDS = ('{"x": 1}', "```py\nx=1\n```", "don't", "<", "|>", "<|im_")


@dataclass
class Family:
    """One chat template with a tokenizer, and what ends a turn there."""

    name: str
    tokenizer: Any
    template: Template
    special: list[str]
    ends: list[str] = field(default_factory=list)

    def renderer(self, history: str) -> TemplateRenderer:
        ids = [self.tokenizer.convert_tokens_to_ids(end) for end in self.ends]
        return TemplateRenderer(self.tokenizer, ids, history=history)  # type: ignore[arg-type]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def text(self, ids: Sequence[int]) -> str:
        decoded: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return decoded


class Unsupported(Exception):
    """A template cannot be asked for a kind of conversation; the text says why."""


def family_of(path: Path, tokenizer: str) -> Family:
    source = path.read_text(encoding="utf-8")
    special = special_texts(source)
    if tokenizer:
        from transformers import AutoTokenizer

        made = AutoTokenizer.from_pretrained(tokenizer)
        made.add_special_tokens({"additional_special_tokens": [*special, "<bos>", "<eos>"]})
        made.bos_token, made.eos_token, made.chat_template = "<bos>", "<eos>", source
    else:
        made = byte_tokenizer(source, special)
    family = Family(path.stem, made, Template(made, {}), [*special, "<bos>", "<eos>"])
    family.ends = sorted(ends_of(family), key=len, reverse=True)
    return family


def ends_of(family: Family) -> set[str]:
    """Returns the tokens that a template has behind an answer, and behind a call of a tool."""
    asked = {"role": "user", "content": "asked"}
    said = {"role": "assistant", "content": MARK}
    called = {"role": "assistant", "content": "", "tool_calls": [call("add", {"x": MARK})]}
    ends: set[str] = set()
    for turn, new in ((said, asked), (called, answers(1)[0])):
        try:
            tail = behind(family.template.write([asked, turn, new]))
            alone = behind(family.template.write([asked, turn], opens=False))
        except RefusedByTemplate:
            continue
        if any(end in alone for end in ends):
            continue
        common = os.path.commonprefix([alone.rstrip(), tail])
        both = max((t for t in family.special if t in common), key=common.rfind, default="")
        first = max(
            (t for t in family.special if alone.lstrip().startswith(t)), key=len, default=""
        )
        last = max((t for t in family.special if alone.rstrip().endswith(t)), key=len, default="")
        if turn is said and (both or first):
            ends.add(both or first)
        elif turn is called and last and not last.startswith("</") and "call>" not in last:
            ends.add(last)
        else:
            rest = tail.removeprefix(alone.rstrip()).lstrip()
            ends |= {max((t for t in family.special if rest.startswith(t)), key=len, default="")}
    return ends - {""}


def behind(text: str) -> str:
    return text[text.rfind(MARK) + len(MARK) :] if MARK in text else ""


def answers(count: int, text: str = "") -> list[dict[str, Any]]:
    return [
        {
            "role": "tool",
            "name": "add",
            "tool_call_id": f"call{number:05}",
            "content": text or str(number),
        }
        for number in range(count)
    ]


def said_in(family: Family, messages: list[Any], turn: Any, tools: Any) -> tuple[Any, str]:
    """Returns a turn, with a thought where the prompt has begun one, and what the policy says."""
    before = family.template.write(messages, tools)
    for form in (turn, {**turn, "reasoning_content": "hm"}):
        whole = family.template.write([*messages, form], tools, opens=False)
        if whole.startswith(before):
            text = whole[len(before) :].rstrip()
            place = max((text.rfind(end) for end in family.ends), default=-1)
            return form, text[:place] if place >= 0 else text
    raise Unsupported("what it writes of an answer does not go on behind the prompt")


def converse(family: Family, kind: str, history: str, seed: int) -> Counter[str]:
    """Holds one conversation, and counts how its turns were bridged."""
    chance = random.Random(f"{seed} {kind}")
    renderer = family.renderer(history)
    tools = [ADDER] if kind == "tool" else []
    messages: list[Any] = [{"role": "user", "content": f"asked {seed}"}]
    seen: Counter[str] = Counter()
    try:
        ids = renderer.start(messages, tools)
        for number in range(chance.randint(1, 3)):
            count = chance.randint(1, 2) if kind == "tool" else 0
            calls = [call("add", {"a": n}, f"call{n:05}") for n in range(count)]
            turn: dict[str, Any] = {"role": "assistant", "content": f"said {number} 漢"}
            if calls:
                turn |= {"content": "", "tool_calls": calls}
            turn, text = said_in(family, messages, turn, tools)
            new = answers(count) or [{"role": "user", "content": f"next {number}"}]
            messages += [turn, *new]
            whole = family.template.write(messages, tools)
            if "'content'" in whole or any(str(m["content"]) not in whole for m in new):
                raise Unsupported("it leaves the answer out")
            end = next((e for e in family.ends if text + e in whole), family.ends[0])
            ids = ids + family.ids(text + end)
            bridge = renderer.bridge(ids, new, tools)
            if bridge is None:
                seen["declined"] += 1
                break
            ids = ids[: len(ids) - bridge.drop] + bridge.ids
            same = family.text(ids) == whole
            seen["equal" if same else "differs"] += 1
            if not same:
                break
    except (RefusedByTemplate, DataError) as error:
        raise Unsupported(" ".join(str(error).split())[:90]) from error
    return seen


def outcome(family: Family, kind: str, history: str, count: int) -> tuple[str, str]:
    """Returns equal, differs, declined or unsupported, and why the last."""
    if not family.ends:
        return "unsupported", "no token ends a turn"
    seen: Counter[str] = Counter()
    try:
        for seed in range(count):
            seen += converse(family, kind, history, seed)
    except Unsupported as error:
        return "unsupported", str(error)
    return next(word for word in ("differs", "declined", "equal") if seen[word]), ""


def chopped(family: Family, text: str, chance: random.Random) -> list[int]:
    """Returns ids of a text, of which some tokens are cut in two."""
    known = family.tokenizer.get_vocab()
    ids = family.ids(text)
    cut: list[int] = []
    for id, token in zip(ids, family.tokenizer.convert_ids_to_tokens(ids), strict=True):
        places = [n for n in range(1, len(token)) if token[:n] in known and token[n:] in known]
        if places and token not in family.special and chance.random() < 0.3:
            place = chance.choice(places)
            cut += [known[token[:place]], known[token[place:]]]
        else:
            cut.append(id)
    return cut


def said_by(chance: random.Random, most: int, more: Sequence[str] = ()) -> str:
    """Returns random words; more: that may be among them."""
    words = [*WORDS, *MORE_WORDS, *more]
    return "".join(chance.choice(words) for _ in range(chance.randint(1, most)))


@dataclass
class Attacks:
    """What random conversations with texts of special tokens have shown."""

    turns: int = 0
    forged: int = 0
    changed: int = 0
    differs: int = 0
    declined: int = 0
    bridge_s: float = 0.0


def attack(family: Family, count: int, found: Attacks) -> None:
    renderer = family.renderer("keep")
    special = set(family.tokenizer.all_special_ids) | set(family.tokenizer.added_tokens_decoder)
    harmless_counts: dict[tuple[bool, bool], int] = {}  # what the policy says changes none
    for seed in range(count):
        chance = random.Random(f"{seed} {family.name}")
        messages: list[Any] = [
            {"role": "user", "content": "asked " + said_by(chance, 4, family.special)}
        ]
        ids = renderer.start(messages, [ADDER])
        harmless = renderer.start([{"role": "user", "content": "x"}], [ADDER])
        found.forged += abs(sum(i in special for i in ids) - sum(i in special for i in harmless))
        for number in range(chance.randint(2, 5)):
            said = said_by(chance, 8).strip() or "ok"
            end = family.ids(family.ends[0]) if chance.random() < 0.8 else []
            before = ids + chopped(family, said, chance) + end
            text = f"next {number} " + said_by(chance, 5, family.special) + "."
            as_user = chance.random() < 0.5
            new = [{"role": "user", "content": text}] if as_user else answers(1, text)
            kept = list(before)
            began_s = time.perf_counter()
            bridge = renderer.bridge(before, new, [ADDER])
            found.bridge_s += time.perf_counter() - began_s
            found.turns += 1
            if bridge is None:
                found.declined += 1
                break
            kind = as_user, bool(end)
            if kind not in harmless_counts:
                other = renderer.bridge(before, [{**m, "content": "x"} for m in new], [ADDER])
                harmless_counts[kind] = sum(i in special for i in other.ids) if other else -1
            found.forged += abs(sum(i in special for i in bridge.ids) - harmless_counts[kind])
            ids = before[: len(before) - bridge.drop] + bridge.ids
            length = len(kept) - bridge.drop
            found.changed += before != kept or ids[:length] != kept[:length]
            found.differs += family.ids(family.text(ids)) != ids


def claims_of(folder: Path, args: argparse.Namespace) -> list[Claim]:
    counts: Counter[tuple[str, str, str]] = Counter()
    attacks = Attacks()
    attacked = 0
    for path in sorted(folder.glob("*.jinja")):
        family = family_of(path, args.tokenizer)
        table = {}
        for history in ("strict", "keep"):
            for kind in KINDS:
                word, why = outcome(family, kind, history, args.rounds)
                counts[history, word, kind] += 1
                table[f"{history} {kind}"] = f"{word}: {why}" if why else word
        if args.show:
            print(json.dumps({"template": family.name, "ends": family.ends, **table}), flush=True)
        if table["keep tool"] == "equal" and args.conversations:
            attacked += 1
            attack(family, args.conversations, attacks)
    strict = {
        f"strict_{word}_{kind}": counts["strict", word, kind]
        for word in ("equal", "declined")
        for kind in KINDS
    }
    differs = sum(counts["strict", "differs", kind] for kind in KINDS)
    bars = {"strict_equal_user": 41, "strict_equal_tool": 31}
    return [
        Claim("strict_differs", differs, "templates", 0, "<="),
        *(Claim(name, value, "templates", bars.get(name)) for name, value in strict.items()),
        Claim("keep_declined_user", counts["keep", "declined", "user"], "templates", 0, "<="),
        Claim("keep_declined_tool", counts["keep", "declined", "tool"], "templates"),
        *(
            Claim(f"unsupported_{kind}", counts["strict", "unsupported", kind], "templates")
            for kind in KINDS
        ),
        Claim("templates", sum(1 for _ in folder.glob("*.jinja")), "templates"),
        Claim("templates_attacked", attacked, "templates"),
        Claim("turns_attacked", attacks.turns, "turns"),
        Claim("turns_declined", attacks.declined, "turns"),
        Claim("forged_special_ids", attacks.forged, "ids", 0, "<="),
        Claim("old_ids_changed", attacks.changed, "turns", 0, "<="),
        Claim("encoded_anew_differs_share", attacks.differs / max(attacks.turns, 1), "of turns"),
        Claim("bridge_ms", 1000 * attacks.bridge_s / max(attacks.turns, 1), "ms"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--templates", type=Path, help="folder with *.jinja; TRL's by default")
    parser.add_argument("--tokenizer", default="", help="directory of a tokenizer; else of bytes")
    parser.add_argument("--rounds", type=int, default=5, help="conversations of each kind")
    parser.add_argument("--conversations", type=int, default=200, help="random ones with attacks")
    parser.add_argument("--show", action="store_true", help="print what each template gives")
    add_options(parser)
    args = parser.parse_args()
    folder = args.templates
    if folder is None:
        folder = next(TOX.glob("lib/python*/site-packages/trl/chat_templates"), TOX)
    if not any(folder.glob("*.jinja")):
        parser.error(f"there are no chat templates in {folder}: {HOW}")
    return publish("rendering", claims_of(folder, args), args, DISTRIBUTIONS)


if __name__ == "__main__":
    sys.exit(main())
