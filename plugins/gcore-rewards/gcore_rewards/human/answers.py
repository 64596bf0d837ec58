"""Finds pairs of answers to one prompt: in what runs have evaluated, or in a file."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.run_files import SAMPLES, read_samples, samples_path

Prompt = str | list[dict[str, Any]]
_MORE = (
    "set evaluation.show in the job to write more answers, such as evaluation.show: 64, or give "
    "answers by --file"
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, and where it comes from, which raters are not shown.

    origin: such as ``runs/quickstart/001 step 20 greedy``.
    """

    text: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two different answers to one prompt, in the order of their texts.

    prompt: text, or chat messages.
    """

    prompt: Prompt
    answers: tuple[Answer, Answer]

    @property
    def digest(self) -> str:
        """Names the pair by its content: 32 hexadecimal digits, whatever the order or origin."""
        texts = [answer.text for answer in self.answers]
        return digest_of(self.prompt, *texts)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The pairs of a source, and how many were left out.

    equal: pairs whose answers are the same text.
    pictures: answers with pictures, which the page cannot show.
    seen: what the source held, for errors.
    """

    pairs: list[Pair]
    equal: int = 0
    pictures: int = 0
    seen: list[str] = field(default_factory=list)

    def required(self, where: str) -> Found:
        """Returns itself. Raises DataError when it has no pair."""
        if self.pairs:
            return self
        reasons = [*self.seen]
        if self.equal:
            reasons.append(f"{self.equal} pairs are equal texts")
        if self.pictures:
            reasons.append(f"{self.pictures} answers have pictures, which the page does not show")
        raise DataError(
            "there are no two different answers to one prompt.",
            where=where,
            why="; ".join(reasons),
            todo=_MORE,
        )


def digest_of(*parts: Any) -> str:
    """Returns 32 hexadecimal digits of blake2b over the parts as JSON."""
    content = msgspec.json.encode(parts, order="sorted")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# -- of runs ---------------------------------------------------------------------------------------


def pairs_of_runs(
    run: Path, against: Path | None = None, steps: Sequence[int] = (), per_prompt: int = 0
) -> Found:
    """Pairs the evaluated answers of one or two steps, of one run or two.

    Answers of two sources are paired where prompt and mode (greedy, sampled) are equal. Of one
    source, the greedy and the sampled answer to a prompt are a pair.

    run: directory of a run.
    against: that of another; None: both answers come from ``run``.
    steps: of ``run`` and of the other source; one step: the same of both. Empty: of one run its
        first and its last evaluated step, of two runs the last of each.
    per_prompt: most pairs of a prompt; 0: all.

    Raises DataError where a run has no answers, or no pair is found.
    """
    sources = _sources(run, against, steps)
    rows = [_rows(path, step) for path, step in sources]
    seen = [
        f"{path} shows {len(_prompts(each))} prompts at step {step}"
        for (path, step), each in zip(sources, rows, strict=True)
    ]
    groups: dict[str, tuple[Prompt, list[Answer]]] = {}
    pictures = 0
    for (path, step), each in zip(sources, rows, strict=True):
        for row in each:
            if row.get("arrays"):
                pictures += 1
                continue
            prompt = row["prompt"]
            mode = str(row.get("mode", ""))
            key = digest_of(prompt, mode if len(sources) == 2 else "")
            answer = Answer(text=row["text"], origin=f"{path} step {step} {mode}".rstrip())
            groups.setdefault(key, (prompt, []))[1].append(answer)
    return _paired(groups.values(), per_prompt, seen, pictures).required(str(run))


def _sources(run: Path, against: Path | None, steps: Sequence[int]) -> list[tuple[Path, int]]:
    """Returns (run, step) of the one source or the two."""
    if len(steps) > 2:
        raise ConfigError("give one step or two.", where="--steps", why=f"{len(steps)} are given")
    if against is None:
        evaluated = evaluated_steps(run)
        chosen = list(steps) or sorted({evaluated[0], evaluated[-1]})
        runs = [run] * len(chosen)
    else:
        chosen = list(steps) or [evaluated_steps(run)[-1], evaluated_steps(against)[-1]]
        chosen = chosen * 2 if len(chosen) == 1 else chosen
        runs = [run, against]
    sources = list(zip(runs, chosen, strict=True))
    for path, step in sources:
        if step not in evaluated_steps(path):
            shown = ", ".join(map(str, evaluated_steps(path)))
            raise ConfigError(
                f"the run has no answers of step {step}.", where="--steps", why=f"it has: {shown}"
            )
    return list(dict.fromkeys(sources))


def evaluated_steps(run: Path) -> list[int]:
    """Returns the steps whose answers a run has written, in order. Raises DataError for none."""
    if not run.is_dir():
        raise DataError("there is no such run.", where=str(run), todo="give the directory of a run")
    steps = [
        int(path.stem.removeprefix("step_"))
        for path in (run / SAMPLES).glob("step_*.jsonl")
        if path.stem.removeprefix("step_").isdecimal()
    ]
    if not steps:
        raise DataError(
            "the run has no answers to compare.",
            where=str(run / SAMPLES),
            why="answers are written by an evaluation",
            todo=f"set evaluation.data in the job, and evaluation.every; {_MORE}",
        )
    return sorted(steps)


def _rows(run: Path, step: int) -> list[dict[str, Any]]:
    """Reads the answers of one step. Raises DataError for a file that cannot be read."""
    try:
        rows = read_samples(run, step)
    except msgspec.MsgspecError as error:
        raise DataError(
            "the answers cannot be read.", where=str(samples_path(run, step)), why=str(error)
        ) from None
    return [row for row in rows if isinstance(row.get("text"), str) and _is_prompt(row["prompt"])]


def _prompts(rows: Iterable[dict[str, Any]]) -> set[str]:
    return {digest_of(row["prompt"]) for row in rows}


# -- of a file -------------------------------------------------------------------------------------


def pairs_of_file(path: Path, per_prompt: int = 0) -> Found:
    """Pairs the answers in a file of JSON lines.

    A row has ``prompt`` (text or chat messages) and one of:

    - ``answers``, a list of texts;
    - ``answer``, ``completion`` or ``text``, one text: rows with the same prompt belong together;
    - ``chosen`` and ``rejected``, two texts.

    In place of a text may stand a list of one turn of the assistant.

    Raises DataError, with the line, for a row of another form, and where no pair is found.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(
            "the file cannot be read.", where=str(path), why=f"the system says: {error.strerror}"
        ) from None
    groups: dict[str, tuple[Prompt, list[Answer]]] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"{path}:{number}"
        prompt, texts = _read_row(text, where)
        answers = [Answer(text=each, origin=where) for each in texts]
        groups.setdefault(digest_of(prompt), (prompt, []))[1].extend(answers)
    seen = [f"the file has {len(groups)} prompts"]
    return _paired(groups.values(), per_prompt, seen, 0).required(str(path))


def _read_row(text: bytes, where: str) -> tuple[Prompt, list[str]]:
    """Returns prompt and answers of a row. Raises DataError for a row of another form."""
    form = 'a row is {"prompt": ..., "answers": ["...", "..."]} or {"prompt": ..., "answer": "..."}'
    try:
        row = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError("the row is no JSON.", where=where, why=str(error), todo=form) from None
    if not isinstance(row, dict) or not _is_prompt(row.get("prompt")):
        raise DataError("the row has no prompt.", where=where, todo=form)
    answers = [_text_of(answer) for answer in _answers(row)]
    if not answers or not all(isinstance(answer, str) for answer in answers):
        named = ", ".join(map(str, row))
        raise DataError("the row has no answer.", where=where, why=f"it has: {named}", todo=form)
    return row["prompt"], answers


def _answers(row: dict[str, Any]) -> list[Any]:
    if isinstance(row.get("answers"), list):
        return list(row["answers"])
    if "chosen" in row and "rejected" in row:
        return [row["chosen"], row["rejected"]]
    return [row[name] for name in ("answer", "completion", "text") if name in row][:1]


def _text_of(answer: Any) -> Any:
    """Returns the content of a list of one turn of the assistant; other answers as they are."""
    match answer:
        case [{"role": "assistant", "content": content}]:
            return content
        case _:
            return answer


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and "role" in turn and "content" in turn for turn in value)
    )


# -- of answers to one prompt ----------------------------------------------------------------------


def _paired(
    groups: Iterable[tuple[Prompt, list[Answer]]], per_prompt: int, seen: list[str], pictures: int
) -> Found:
    """Pairs every two answers of each group, each pair of texts once."""
    pairs: dict[str, Pair] = {}
    equal = 0
    for prompt, answers in groups:
        in_order = sorted(answers, key=lambda answer: answer.text)
        of_prompt: dict[str, Pair] = {}
        for first, second in itertools.combinations(in_order, 2):
            if first.text == second.text:
                equal += 1
                continue
            pair = Pair(prompt=prompt, answers=(first, second))
            of_prompt.setdefault(pair.digest, pair)
        # A digest is as good as a drawn number, and the same pairs come again at the next start.
        taken = sorted(of_prompt)[: per_prompt or None]
        pairs |= {digest: of_prompt[digest] for digest in taken}
    return Found(pairs=list(pairs.values()), equal=equal, pictures=pictures, seen=seen)
