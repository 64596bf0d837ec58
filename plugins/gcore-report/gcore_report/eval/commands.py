"""The command ``g-core eval RUN [MODEL ...] --task TASK``."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gcore_core.contract.errors import ConfigError, PluginError
from gcore_core.contract.installing import install_command
from gcore_core.kits.commands import print_table
from gcore_report.eval.asking import Score, Settings, ask
from gcore_report.eval.models import Model, find_model

_EPILOG = """\
A task is one of Inspect's: a file of yours with the name of a function in it (tasks.py@sums), or
what an installed package registers (inspect_evals/gsm8k). Answers and scores go to RUN/evals, where
`inspect view --log-dir RUN/evals` shows them; evals.jsonl has one line a score.

examples:
  g-core eval runs/math/001 --task inspect_evals/gsm8k --limit 200
  g-core eval runs/math/001 Qwen/Qwen3-0.6B --task tasks.py@sums --max-tokens 512"""


def evaluate(words: Sequence[str]) -> int:
    """Asks every model every task, prints a table and returns 0.

    Raises ConfigError for models and tasks that are not there, DataError for a task that fails,
    PluginError where Inspect is not installed.
    """
    args = _parser().parse_args(list(words))
    if find_spec("inspect_ai") is None:
        raise PluginError(
            "Inspect, whose tasks are asked, is not installed.",
            where="g-core eval",
            todo=install_command("gcore-report[eval]"),
        )
    settings = _settings(args)
    with tempfile.TemporaryDirectory() as scratch:
        models = [
            find_model(word, args.step, Path(scratch) / str(number))
            for number, word in enumerate(args.models)
        ]
        to = args.to or _place(models[0])
        scores = [
            score
            for task in args.task
            for model in models
            for score in _asked(task, model, settings, to)
        ]
    _print(models, scores)
    print(f"\nanswers  inspect view --log-dir {to}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="g-core eval",
        description="Ask a run's policy, and other models beside it, the tasks of Inspect.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a run's directory, one in Hugging Face layout, or a name on the hub",
    )
    parser.add_argument("--task", action="append", required=True, help="may be repeated")
    parser.add_argument("--step", type=int, help="of runs: the checkpoint of this step")
    parser.add_argument("--limit", type=int, help="so many samples of each task, the first ones")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of an answer (1024)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)"
    )
    parser.add_argument("--seed", type=int, default=0, help="where answers are drawn (0)")
    parser.add_argument("--batch", type=int, default=32, help="answers at a time (32)")
    parser.add_argument("--device", default="", help="such as cuda:1 (the first GPU, else the CPU)")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where results go (RUN/evals)")
    return parser


def _settings(args: argparse.Namespace) -> Settings:
    """Returns how models are asked. Raises ConfigError for values that mean nothing."""
    for name, least in (("limit", 1), ("max_tokens", 1), ("temperature", 0), ("batch", 1)):
        value = getattr(args, name)
        if value is not None and not least <= value < float("inf"):
            raise ConfigError(
                f"must be at least {least}, is {value}.", where=f"--{name.replace('_', '-')}"
            )
    if not re.fullmatch(r"(cpu|cuda(:[0-9]+)?)?", args.device):
        raise ConfigError(f"must be cpu, cuda or cuda:N, is {args.device!r}.", where="--device")
    return Settings(
        limit=args.limit,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        batch=args.batch,
        device=args.device,
    )


def _place(model: Model) -> Path:
    """Returns where results go that nobody gave a place. Raises ConfigError where there is none."""
    if model.run is None:
        raise ConfigError(
            f"{model.name}: this is a model and no run, so it has no place for results.",
            where="g-core eval",
            todo="name a directory: --to DIR",
        )
    return model.run / "evals"


def _asked(task: str, model: Model, settings: Settings, to: Path) -> list[Score]:
    print(f"asking {model.name}: {task}", file=sys.stderr, flush=True)
    return ask(task, model, settings, to)


def _print(models: Sequence[Model], scores: Sequence[Score]) -> None:
    """Prints a row for each metric, with a column for each model."""
    names = [model.name for model in models]
    values = {(s.task, s.metric, s.samples, s.model): f"{s.value:.3f}" for s in scores}
    rows = [
        [task, metric, str(samples), *(values.get((task, metric, samples, n), "-") for n in names)]
        for task, metric, samples in dict.fromkeys((s.task, s.metric, s.samples) for s in scores)
    ]
    print_table(["task", "metric", "samples", *names], rows)
