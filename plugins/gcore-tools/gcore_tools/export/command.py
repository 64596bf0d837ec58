"""``g-core export RUN_DIR --to DIR``: a run's final weights, or those of a checkpoint, in Hugging
Face layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gcore_core.contract.job_settings import POLICY
from gcore_core.kits.commands import command_parser
from gcore_tools.export import SUMMARY


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("export", SUMMARY)
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="the run's directory, e.g. runs/quickstart/001",
    )
    parser.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="a directory that does not exist yet"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="the checkpoint of step N instead of the final weights",
    )
    parser.add_argument(
        "--role",
        default=POLICY,
        metavar="ROLE",
        help="whose weights: a role that the run trains (default: policy)",
    )
    parser.epilog = (
        "examples:\n  g-core export runs/quickstart/001 --to my-model\n"
        "  g-core export runs/quickstart/001 --step 20 --to my-model"
    )
    return parser


def run(words: Sequence[str]) -> int:
    from gcore_core.kits.runs import weights_sha256
    from gcore_tools.export.of_run import export

    args = make_parser().parse_intermixed_args(words)
    if args.step is None:
        size = export(args.run_dir, args.to, args.role)
    else:
        from gcore_tools.export.of_checkpoint import export_step

        size = export_step(args.run_dir, args.step, args.to, args.role)
    print(f"{args.to}: {size / 1e6:.1f} MB")
    if not args.to.is_dir() or any(args.to.glob("*.safetensors")):  # not of a pipeline of models
        print(f"weights_sha256 {weights_sha256(args.to)}")
    return 0
