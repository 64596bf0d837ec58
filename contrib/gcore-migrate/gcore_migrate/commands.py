"""The commands ``g-core migrate verl``, ``g-core migrate trl`` and ``g-core migrate keys``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError
from gcore_core.kits.commands import print_table, write_file
from gcore_migrate import trl, verl
from gcore_migrate.reading import read_trl, read_verl
from gcore_migrate.rules import Draft, Outcome, Rule, apply_rules
from gcore_migrate.writing import written


def from_verl(words: Sequence[str]) -> int:
    """Makes a job of a verl configuration."""
    parser = _parser("verl", "Make a job of a verl configuration: YAML, or a shell script.")
    args = parser.parse_args(list(words))
    draft, outcomes = job_of_verl(read_verl(args.file))
    return _give(draft, outcomes, f"{args.file.name}, a configuration of verl", args.to)


def from_trl(words: Sequence[str]) -> int:
    """Makes a job of a TRL configuration."""
    parser = _parser("trl", "Make a job of a TRL configuration: YAML, a shell or Python script.")
    parser.add_argument("--kind", choices=trl.KINDS, help="which trainer it is for")
    args = parser.parse_args(list(words))
    kind, given = read_trl(args.file)
    kind = args.kind or kind
    if not kind:
        raise ConfigError(
            "it does not say which trainer it is for",
            where=str(args.file),
            todo=f"add --kind, one of {', '.join(trl.KINDS)}",
        )
    draft, outcomes = job_of_trl(kind, given)
    return _give(draft, outcomes, f"{args.file.name}, a configuration of TRL for {kind}", args.to)


def list_keys(words: Sequence[str]) -> int:
    """Prints what becomes of every key that is known."""
    parser = argparse.ArgumentParser(
        prog="g-core migrate keys", description="What becomes of every key that is known."
    )
    parser.add_argument("trainer", choices=("verl", "trl"))
    args = parser.parse_args(list(words))
    print_table(
        [args.trainer, "here"], rows_of(verl.RULES if args.trainer == "verl" else trl.RULES)
    )
    return 0


def rows_of(rules: Mapping[str, Rule]) -> list[list[str]]:
    """Returns a row for each key: the key, and its targets or why it has none."""
    return [
        [rule.key, ", ".join(rule.targets) or f"- ({rule.why})"]
        for rule in rules.values()
        if rule.key != trl.KIND
    ]


def job_of_verl(given: Mapping[str, Any]) -> tuple[Draft, list[Outcome]]:
    """Returns the job of verl's settings, and what became of each."""
    draft, outcomes = apply_rules(verl.RULES, given, verl.defaults_of(given))
    verl.finish(draft)
    return draft, outcomes


def job_of_trl(kind: str, given: Mapping[str, Any]) -> tuple[Draft, list[Outcome]]:
    """Returns the job of TRL's settings, and what became of each.

    kind: one of ``trl.KINDS``.
    """
    defaults = {trl.KIND: kind, **trl.DEFAULTS[kind]}
    draft, outcomes = apply_rules(trl.RULES, given, defaults)
    trl.finish(draft)
    return draft, outcomes


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"g-core migrate {name}", description=description)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--to", type=Path, metavar="FILE", help="where the job goes; else printed")
    return parser


def _give(draft: Draft, outcomes: Sequence[Outcome], source: str, to: Path | None) -> int:
    text = written(draft, outcomes, source)
    if to is None:
        print(text, end="")
        return 0
    if to.exists():
        raise ConfigError(
            "there is a file already", where=str(to), todo="take another name for --to"
        )
    write_file(to, text, option="--to")
    taken = sum(bool(outcome.targets) for outcome in outcomes)
    print(f"{to}: {taken} of {len(outcomes)} keys taken over", file=sys.stderr)
    for todo in dict.fromkeys(draft.todo):
        print(f"to do: {todo}", file=sys.stderr)
    return 0
