"""Runs ``g-core human rate``, ``label``, ``pairs`` and ``agreement``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_core.contract.errors import ConfigError, DataError, PluginError, did_you_mean
from gcore_core.contract.installing import install_command
from gcore_core.kits.commands import write_file
from gcore_rewards.human.config import DIRECTORY

if TYPE_CHECKING:
    from gcore_rewards.human.agreement import Agreement, Measure
    from gcore_rewards.human.answers import Found
    from gcore_rewards.human.judgements import Judgement
    from gcore_rewards.human.tasks import Task

_COMMANDS = ("rate", "label", "pairs", "agreement")
_EPILOG = """\
commands (each has its own --help):
  rate RUN         a page on which people compare two answers to one prompt
  label RUN        a page on which people answer what a run's reward asks them
  pairs FILE       judgements as preference data: prompt, chosen, rejected
  agreement FILE   how far raters agree, with intervals

examples:
  g-core human rate runs/quickstart/001
  g-core human rate --file answers.jsonl --raters 3
  g-core human pairs runs/quickstart/001/human/judgements.jsonl --to pairs.jsonl
"""
_EPILOG_OF_RATE = """\
The page is on 127.0.0.1 alone. From another machine, make a tunnel: ssh -L PORT:127.0.0.1:PORT HOST

Keys: left and right arrow, t (equally good), b (both bad), s (skip), u (undo).

examples:
  g-core human rate runs/quickstart/001                     before training against after it
  g-core human rate runs/quickstart/001 --steps 40          greedy against sampled, at one step
  g-core human rate runs/quickstart/001 --against runs/quickstart/002
"""


def default(words: list[str]) -> int:
    """Runs ``g-core human``, which prints what there is.

    Raises ConfigError for an unknown command.
    """
    parser = _parser("", "Asks people about answers.", _EPILOG)
    if words and not words[0].startswith("-"):
        raise ConfigError(
            f"no such command: {words[0]!r}{did_you_mean(words[0], list(_COMMANDS))}.",
            where="g-core human",
            todo=f"choices: {', '.join(_COMMANDS)}",
            choices=list(_COMMANDS),
        )
    parser.parse_args(words)
    parser.print_help()
    return 0


def rate(words: list[str]) -> int:
    """Runs ``g-core human rate`` with these words, until it is stopped."""
    args = _parser_of_rate().parse_args(words)
    if (args.run is None) == (args.file is None):
        raise ConfigError(
            "give a run or a file of answers.",
            where="g-core human rate",
            todo="g-core human rate RUN, or g-core human rate --file FILE",
        )
    if args.file is not None and (args.against is not None or args.steps):
        raise ConfigError("--against and --steps are of runs, and --file is given.", where="--file")
    from gcore_rewards.human.comparing import Comparing, Rules

    found = _found(args)
    path = args.to or _judgements_path(args)
    rules = Rules(raters=args.raters, twice=args.twice, seed=args.seed)
    task = Comparing(found.pairs, path, rules)
    left_out = [f"{found.equal} of equal texts"] if found.equal else []
    left_out += [f"{found.pictures} answers with pictures"] if found.pictures else []
    print(f"{len(found.pairs)} pairs" + (f"; left out: {', '.join(left_out)}" if left_out else ""))
    print(f"judgements: {path}")
    return _serve(task, args.port)


def label(words: list[str]) -> int:
    """Runs ``g-core human label`` with these words, until it is stopped."""
    parser = _parser("label", "Opens a page on which people answer what a run's reward asks.")
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="the run's directory, or the directory that the reward's path names",
    )
    _add_port(parser)
    args = parser.parse_args(words)
    from gcore_rewards.human.labelling import Labelling

    directory = _queue(args.run)
    task = Labelling(directory)
    print(f"labels: {directory}")
    return _serve(task, args.port)


def pairs(words: list[str]) -> int:
    """Runs ``g-core human pairs FILE --to FILE`` with these words; returns the exit code."""
    parser = _parser("pairs", "Writes judgements as preference data: prompt, chosen, rejected.")
    _add_file(parser)
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="the file of JSON lines to write"
    )
    parser.add_argument(
        "--by",
        choices=["majority", "all", "each"],
        default="majority",
        help="which pairs: where most raters prefer one answer, where all do, or a row per rater",
    )
    parser.add_argument(
        "--ties",
        choices=["leave-out", "both"],
        default="leave-out",
        help="what a tie becomes: nothing, or two rows, one in each direction",
    )
    args = parser.parse_args(words)
    from gcore_rewards.human.preferences import preferences

    if args.to.resolve() == args.file.resolve():
        raise ConfigError(
            "the rows would replace the judgements.", where="--to", todo="name another file"
        )
    judgements = _judgements(args.file)
    rows = list(preferences(judgements, args.by, args.ties))
    if not rows:
        raise DataError(
            "the file has no preference to write.",
            where=str(args.file),
            why=f"{len(judgements)} judgements, by {args.by}, with ties {args.ties}",
            todo="judge more pairs, or choose another --by or --ties",
        )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_file(args.to, text, option="--to")
    print(f"{args.to}: {len(rows)} rows of {len({each.pair for each in judgements})} judged pairs")
    return 0


def agreement(words: list[str]) -> int:
    """Runs ``g-core human agreement FILE`` with these words; returns the exit code."""
    parser = _parser("agreement", "Says how far raters agree, with intervals of 95%.")
    _add_file(parser)
    parser.add_argument("--seed", type=_whole(0), default=0, help="of the bootstrap")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(words)
    from gcore_rewards.human.agreement import agreement as measured
    from gcore_rewards.human.judgements import read_lines
    from gcore_rewards.human.places import places, table_of

    said = read_lines(args.file)
    table = table_of(said)
    result = measured(table, seed=args.seed)
    if not result.units:
        raise DataError(
            "no pair was judged by two raters.",
            where=str(args.file),
            why=f"{len(table)} were judged at all",
            todo="have another person rate them: g-core human rate ... --raters 2",
        )
    shown_places = places(said)
    if args.json:
        print(json.dumps(_as_json(result) | shown_places, indent=2))
    else:
        print("\n".join(_lines(result, shown_places)))
    return 0


# -- what the commands read ------------------------------------------------------------------------


def _found(args: argparse.Namespace) -> Found:
    from gcore_rewards.human.answers import pairs_of_file, pairs_of_runs

    if args.file is not None:
        return pairs_of_file(args.file, args.per_prompt)
    return pairs_of_runs(args.run, args.against, args.steps, args.per_prompt)


def _judgements_path(args: argparse.Namespace) -> Path:
    """Returns where judgements are written when the user does not say it."""
    if args.file is not None:
        file: Path = args.file
        return file.with_name(f"{file.name}.judgements.jsonl")
    run: Path = args.run
    return run / DIRECTORY / "judgements.jsonl"


def _queue(directory: Path) -> Path:
    """Returns the directory of questions of a run, or the one that is given itself.

    Raises DataError for a run that asks nobody, and for a directory without questions.
    """
    from gcore_rewards.human.queue import questions_path, queues_of

    queues = queues_of(directory)
    if len(queues) > 1:
        raise ConfigError(
            "the run's rewards ask in several directories.",
            where=str(directory),
            why="\n".join(map(str, queues)),
            todo="give one of them, and start this once for each",
        )
    if queues:
        return queues[0]
    if questions_path(directory).exists():
        return directory
    raise DataError(
        "nothing is asked here.",
        where=str(directory),
        why="a run asks people with rewards.<name>.use: human",
        todo="give the directory of such a run, or the one that its reward's path names",
    )


def _judgements(path: Path) -> list[Judgement]:
    """Returns the judgements of a file. Raises DataError for one of labels."""
    from gcore_rewards.human.judgements import Judgement, read_lines

    said = read_lines(path)
    judgements = [each for each in said if isinstance(each, Judgement)]
    if len(judgements) < len(said):
        raise DataError(
            "the file has labels of single answers, which are no preferences.", where=str(path)
        )
    return judgements


def _serve(task: Task, port: int) -> int:
    try:
        from gcore_rewards.human.serving import serve
    except ModuleNotFoundError as error:
        raise PluginError(
            f"the page for people needs {error.name}, which is not installed.",
            where="g-core human",
            todo=install_command("gcore-rewards[human]"),
        ) from error

    try:
        serve(task, port)
    finally:
        task.close()
    return 0


# -- what they print -------------------------------------------------------------------------------


def _lines(result: Agreement, shown_places: dict[str, Any]) -> list[str]:
    lines = [f"{result.raters} raters, {result.units} units with two judgements or more"]
    names: list[tuple[str, Measure | None]] = [
        ("equal judgements", result.equal),
        ("Cohen's kappa", result.kappa),
        ("Krippendorff's alpha", result.alpha),
    ]
    for name, measure in names:
        if measure is None:
            continue
        if math.isnan(measure.value):
            lines.append(f"{name:<22} undefined: all judgements are alike")
        else:
            interval = f"95% interval {measure.low:.3f} to {measure.high:.3f}"
            lines.append(f"{name:<22} {measure.value:.3f}   {interval}")
    lines += [f"{name.replace('_', ' '):<22} {value:.3f}" for name, value in shown_places.items()]
    return lines


def _as_json(result: Agreement) -> dict[str, Any]:
    def plain(measure: Measure | None) -> dict[str, float | None] | None:
        if measure is None:
            return None
        values = {"value": measure.value, "low": measure.low, "high": measure.high}
        return {name: None if math.isnan(value) else value for name, value in values.items()}

    return {
        "raters": result.raters,
        "units": result.units,
        "equal": plain(result.equal),
        "kappa": plain(result.kappa),
        "alpha": plain(result.alpha),
    }


# -- what they take --------------------------------------------------------------------------------


def _parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Returns a parser for a command; an empty ``command`` is ``g-core human`` itself."""
    return argparse.ArgumentParser(
        prog=f"g-core human {command}".rstrip(),
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _parser_of_rate() -> argparse.ArgumentParser:
    description = "Opens a page on which people compare two answers to one prompt."
    parser = _parser("rate", description, _EPILOG_OF_RATE)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument(
        "--against", type=Path, metavar="RUN", help="the run that the other answers come from"
    )
    parser.add_argument(
        "--steps",
        type=_whole(0),
        nargs="+",
        default=[],
        metavar="STEP",
        help="one evaluated step or two; default: the first and the last, of two runs the last",
    )
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="JSON lines of prompt and answers, without a run"
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FILE",
        help="where judgements are written; default: RUN/human/judgements.jsonl",
    )
    parser.add_argument(
        "--raters", type=_whole(1), default=2, metavar="N", help="how many people judge each pair"
    )
    parser.add_argument(
        "--twice",
        action="store_true",
        help="have each rater judge each pair once more, in the other order",
    )
    parser.add_argument(
        "--per-prompt",
        type=_whole(0),
        default=0,
        metavar="N",
        help="most pairs of one prompt; default: all",
    )
    parser.add_argument("--seed", type=int, default=0, help="of left and right, and of the order")
    _add_port(parser)
    return parser


def _add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port", type=_whole(0, 65535), default=0, help="of the page; default: a free one"
    )


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a file that rate or label has written"
    )


def _whole(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """Returns a type for argparse: a whole number in a range."""

    def whole(text: str) -> int:
        number = int(text)
        if number < lowest or (highest is not None and number > highest):
            limit = f"{lowest} to {highest}" if highest is not None else f"at least {lowest}"
            raise argparse.ArgumentTypeError(f"must be {limit}, is {number}")
        return number

    whole.__name__ = "whole number"
    return whole
