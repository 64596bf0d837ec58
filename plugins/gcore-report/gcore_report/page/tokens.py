"""Gathers trained records token by token: log-probs, ratios, entropy, advantage and masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gcore_core.contract import run_files
from gcore_core.contract.run_files import TrainedTokens, read_tokens
from gcore_report.page import limits
from gcore_report.page.answers import halving
from gcore_report.page.curves import rounded
from gcore_report.page.runs import Run

RULE = (
    "A run writes the first records of every tenth step while a sentinel compares log-probs. Here "
    f"are at most {limits.TOKEN_RECORDS}: those of the first and of the last such step, then those "
    "of steps in between, from the middle outwards. The ratio is exp(trainer - generator), before "
    "the step's first update. g-core watch RUN shows the rest, and every token of a record."
)
TOKENIZER = "tokenizer.json"


def tokens(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the records that are shown, and the rule.

    records: each with ``run``, ``step``, ``name`` ("ordinal/sample"), ``replica``, ``version``,
        ``advantage``, ``actions``, the ids ``prompt`` and ``ids``, and for each id ``rollout``,
        ``trainer``, ``entropy`` and ``masked`` (places).
    texts: for each run, id -> text; empty where the run's tokenizer cannot be read here.
    """
    share = max(1, limits.TOKEN_RECORDS // max(1, len(runs)))
    records: list[dict[str, Any]] = []
    texts: list[dict[int, str]] = []
    total = 0
    for number, run in enumerate(runs):
        by_step: dict[int, list[TrainedTokens]] = {}
        for record in read_tokens(run.directory):
            by_step.setdefault(record.step, []).append(record)
        total += sum(map(len, by_step.values()))
        chosen = [record for step in halving(sorted(by_step)) for record in by_step[step]][:share]
        chosen.sort(key=lambda record: (record.step, record.ordinal, record.sample))
        records += [as_json(number, record, limits.TOKENS) for record in chosen]
        texts.append(texts_of(open_tokenizer(run), chosen) if chosen else {})
    return {
        "records": records,
        "texts": texts,
        "shown": len(records),
        "total": total,
        "rule": RULE,
    }


def as_json(number: int, record: TrainedTokens, most: int | None) -> dict[str, Any]:
    """Returns a record as the page reads it, with so many of its tokens; None: with all."""
    return {
        "run": number,
        "step": record.step,
        "name": f"{record.ordinal}/{record.sample}",
        "replica": record.replica,
        "version": record.version,
        "advantage": record.advantage,
        "actions": record.actions,
        "prompt": record.prompt_ids,
        "ids": record.action_ids[:most],
        "rollout": rounded(record.rollout_logp[:most]),
        "trainer": rounded(record.trainer_logp[:most]),
        "entropy": rounded(record.entropy[:most]),
        "masked": record.masked,
    }


# -- texts of tokens -------------------------------------------------------------------------------


def open_tokenizer(run: Run) -> Any:
    """Returns the run's tokenizer, or None where it cannot be read here."""
    path = tokenizer_of(run)
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:  # it comes with transformers, which a machine for reports need not have
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises nothing more special
        return None


def texts_of(tokenizer: Any, records: Iterable[TrainedTokens]) -> dict[int, str]:
    """Returns the text of every token in the records; none without a tokenizer."""
    if tokenizer is None:
        return {}
    ids = {i for record in records for i in (*record.prompt_ids, *record.action_ids)}
    return {i: _text_of(tokenizer, i) for i in sorted(ids)}


def _text_of(tokenizer: Any, number: int) -> str:
    """Returns the text of one token; a special token, which decodes to nothing, by its name."""
    text: str = tokenizer.decode([number])
    name: str | None = tokenizer.id_to_token(number)
    if text and "\ufffd" not in text:
        # A decoder drops the space before a first word, which the token's name still shows.
        return f" {text}" if name and name[0] in "\u0120\u2581" and text[0] != " " else text
    return name or f"<{number}>"


def tokenizer_of(run: Run) -> Path | None:
    """Returns the tokenizer's file of a run: beside its final weights, or beside its model."""
    model = run.config.get("roles", {}).get("policy", {}).get("model") or {}
    places = [run.directory / run_files.WEIGHTS]
    if isinstance(model.get("path"), str):
        places.append(Path(model["path"]).expanduser())
    return next((p / TOKENIZER for p in places if (p / TOKENIZER).is_file()), None)
