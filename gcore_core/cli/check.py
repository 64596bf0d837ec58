"""``g-core check FILE``: resolves and checks a configuration without starting anything."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the job, a YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="values that win over the file",
    )
    parser.epilog = "example:\n  g-core check job.yaml roles.rollout.use=vllm"


def run(args: argparse.Namespace) -> int:
    if args.owns_process:
        gc.disable()  # it ends soon, and to look for cycles would take a tenth of its time
    from gcore_core.cli import print_table, say_phase
    from gcore_core.config import checks
    from gcore_core.config.plan import load_plan
    from gcore_core.contract.errors import ConfigError
    from gcore_core.contract.factories import build
    from gcore_core.run.initial_placement import find_nodes, place
    from gcore_core.run.preflight import check_estimates, check_files, check_parts, check_pushes
    from gcore_core.runtime.main_thread import exits_told

    try:
        with exits_told():
            plan = load_plan(args.file, args.overrides)
            checks.interpreters(plan.settings, plan.provided, plan.source)
            placed = place(plan, find_nodes(plan))
            check_parts(plan)
            seen = check_files(plan, placed.nodes, say_phase)
            expected = check_estimates(plan, placed, args.overrides, seen.facts)
            push_note = check_pushes(plan, placed, build(plan.factory("launcher")))
    except ConfigError as error:
        problems = error.facts.get("problems", ())
        if len(problems) < 2:
            raise
        # All of them, where an error message has room for a few.
        print(f"{args.file}: {len(problems)} problems", file=sys.stderr)
        print("\n".join(f"  {problem}" for problem in problems), file=sys.stderr)
        return error.exit_code
    rows = [[path, item.spec.name, item.plugin, item.owner] for path, item in plan.provided.items()]
    print_table(["at", "provider", "plugin", "distribution"], rows)
    placed_notes = filter(None, [placed.note, push_note])
    for note in [*plan.notes, *seen.notes, *placed_notes, *expected]:
        print(f"note: {note}")
    print(f"{args.file}: nothing wrong found")
    return 0
