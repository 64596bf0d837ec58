"""``g-core plan FILE``: what a job needs on each device in each phase, before anything starts.

Exit code: 0 it fits as far as anybody knows, 1 it does not, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_core.kits.commands import command_parser
from gcore_tools.plan import SUMMARY

if TYPE_CHECKING:
    from gcore_core.contract.launching import NodeFacts
    from gcore_core.kits.commands import Plan
    from gcore_tools.plan.memory_needs import MemoryNeeds, Pool

GIB = 2**30


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("plan", SUMMARY)
    parser.add_argument("file", type=Path, metavar="FILE", help="the job, a YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="values that win over the file",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="plan for so many GPUs a node, not for what is here",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes, with --devices; 1")
    parser.add_argument(
        "--device-gib", type=float, metavar="GIB", help="memory of a GPU, with --devices"
    )
    parser.add_argument(
        "--host-gib", type=float, metavar="GIB", help="memory of a node, with --devices"
    )
    parser.add_argument(
        "--measured", type=Path, metavar="RUN", help="a run that has measured how long things take"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = (
        "exit code: 0 it fits as far as anybody knows, 1 it does not, 2 bad input\n\n"
        "example:\n  g-core plan job.yaml --devices 8 --device-gib 80 roles.policy.slots=8"
    )
    return parser


def run(words: Sequence[str]) -> int:
    """Prints what the job needs, and returns the exit code."""
    # Intermixed: options may stand between the file and the overrides.
    args = make_parser().parse_intermixed_args(words)
    from gcore_core.kits.commands import load_plan
    from gcore_core.kits.planning import check_parts, exits_told, find_nodes, place
    from gcore_tools.plan.memory_fit import changes_for
    from gcore_tools.plan.memory_needs import memory_needs
    from gcore_tools.plan.step_seconds import expected_seconds

    imagined = _imagined(args)
    overrides = list(args.overrides)
    if args.device_gib is not None:  # of what the job itself says, the option wins
        overrides.append(f"cluster.device_gib={args.device_gib}")
    with exits_told():
        plan = load_plan(args.file, overrides)
        nodes = find_nodes(plan) if imagined is None else imagined
        placed = place(plan, nodes)
        check_parts(plan)
        needs = memory_needs(plan, placed, _facts(plan, nodes))
    full = needs.too_full()
    changes = (
        [str(change) for change in changes_for(plan.source, overrides, nodes, needs, full[0])]
        if full
        else []
    )
    seconds = expected_seconds(plan, needs.placed, args.measured)
    if args.json:
        import msgspec

        print(msgspec.json.encode(_plain(needs, changes, seconds)).decode())
    else:
        _print(plan, needs, changes, seconds)
    return 1 if full else 0


def _facts(plan: Plan, nodes: Sequence[NodeFacts]) -> Mapping[str, int]:
    """Returns what looks count of the job's rows.

    A job that ``g-core check`` would refuse is planned too, before its data and models are there;
    then it is said, since less is counted.
    """
    from gcore_core.contract.errors import GcoreError
    from gcore_core.kits.commands import say_phase
    from gcore_core.kits.planning import see_files

    facts: Mapping[str, int] = {}
    try:
        seen = see_files(plan, nodes, say_phase)
        problems, facts = seen.problems, seen.facts
    except GcoreError as error:  # of a file of known rewards
        problems = [error.sentence()]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        print(f"g-core check refuses this job: {problems[0]}{more}", file=sys.stderr)
    return facts


def _imagined(args: argparse.Namespace) -> list[NodeFacts] | None:
    """Returns the machines that the options describe; None where they describe none.

    Raises ConfigError for sizes of 0, and for sizes without ``--devices``.
    """
    from gcore_core.contract.errors import ConfigError
    from gcore_core.contract.launching import NodeFacts
    from gcore_core.contract.placement import Device

    sizes = {
        "--devices": args.devices,
        "--nodes": args.nodes,
        "--device-gib": args.device_gib,
        "--host-gib": args.host_gib,
    }
    for option, value in sizes.items():
        if value is not None and not 0 < value < 2**40:
            raise ConfigError(f"must be positive, is {value}.", where=option)
    given = [option for option, value in sizes.items() if value is not None]
    if given and args.devices is None:
        raise ConfigError(
            "is a size of machines that are not here, and --devices is not given.",
            where=given[0],
            todo="add --devices N, the GPUs of each of them",
        )
    if args.devices is None:
        return None
    devices = tuple(Device(index=index, kind="cuda") for index in range(args.devices))
    return [
        NodeFacts(
            name=f"agent.{number}",
            devices=devices,
            host=f"node {number}",
            is_private=True,
            device_bytes=int((args.device_gib or 0) * GIB),
            host_bytes=int((args.host_gib or 0) * GIB),
        )
        for number in range(1 if args.nodes is None else args.nodes)
    ]


def _print(plan: Plan, needs: MemoryNeeds, changes: Sequence[str], seconds: Sequence[str]) -> None:
    from gcore_core.kits.commands import print_table

    print(f"placement ({plan.provided['placement'].reference}): {needs.placed.reason}")
    rows = [
        [role, str(len(workers)), _ranges([index for worker in workers for index in worker])]
        for role, workers in needs.placed.workers.items()
    ]
    print_table(["role", "workers", "devices"], rows)
    for names, pool in _alike(needs):
        print(f"\n{names}")
        print_table(["phase", "role", "holds", "GiB", "rests on"], list(_rows(needs, pool)))
    print()
    for role, why in needs.silent.items():
        print(f"not known: {role}: {why}")
    print("\n".join(seconds))
    for names, pool in _alike(needs):
        if pool in needs.too_full():
            print(_verdict(needs, names, pool))
    print("\n".join(f"  {change}" for change in changes))
    if not needs.too_full():
        print(f"{plan.source}: {_well(needs)}")


def _well(needs: MemoryNeeds) -> str:
    sizeless = [pool for pool in needs.held if pool.device >= 0 and pool not in needs.there]
    if sizeless:
        return "the memory of its devices is not known; set cluster.device_gib"
    return "what is known fits" if needs.silent else "fits"


def _verdict(needs: MemoryNeeds, names: str, pool: Pool) -> str:
    phase = needs.fullest_phase(pool)
    always = needs.total(pool, phase, full=False) > needs.there[pool]
    return (
        f"too small: {names}: {phase} needs {needs.total(pool, phase) / GIB:.1f} "
        f"GiB{'' if always else ' in a full step'}, and it has {needs.there[pool] / GIB:.1f}"
    )


def _rows(needs: MemoryNeeds, pool: Pool) -> Iterator[list[str]]:
    """Yields a line for each purpose, and one for the sum of each phase."""
    for phase, held in needs.held[pool].items():
        if not held:
            continue
        for row in (row for row in held if row.need.nbytes != 0):
            role = row.role if row.workers == 1 or row.need.shared else f"{row.role} x{row.workers}"
            nbytes = "?" if row.need.nbytes is None else f"{row.nbytes / GIB:.2f}"
            bound = "at most, " if row.need.at_most else ""
            yield [phase, role, row.need.what, nbytes, f"{bound}{row.need.note}"]
        there = f"of {needs.there[pool] / GIB:.2f}" if pool in needs.there else "of ?"
        if any(row.need.nbytes is None for row in held):
            there += ", without what is not known"
        yield [phase, "", "sum", f"{needs.total(pool, phase) / GIB:.2f}", there]


def _alike(needs: MemoryNeeds) -> list[tuple[str, Pool]]:
    """Returns names -> one of the pools that hold the same, so that each table is printed once."""
    groups: list[list[Pool]] = []
    for pool in needs.held:
        for group in groups:
            first = group[0]
            same = needs.held[first] == needs.held[pool]
            if same and needs.there.get(first) == needs.there.get(pool):
                group.append(pool)
                break
        else:
            groups.append([pool])
    return [
        (", ".join(map(needs.name, group[:2])) + _more(len(group) - 2), group[0])
        for group in groups
    ]


def _more(count: int) -> str:
    return f" and {count} more like these" if count > 0 else ""


def _ranges(numbers: Sequence[int]) -> str:
    """Returns 0-3,6 for 0 1 2 3 6."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _plain(needs: MemoryNeeds, changes: Sequence[str], seconds: Sequence[str]) -> dict[str, Any]:
    """Returns the same as plain values."""
    return {
        "workers": dict(needs.placed.workers),
        "pools": [
            {
                "name": needs.name(pool),
                "node": pool.node,
                "device": pool.device,
                "there": needs.there.get(pool),
                "phases": {
                    phase: {
                        "needed": needs.total(pool, phase),
                        "in any case": needs.total(pool, phase, full=False),
                        "held": [
                            {"role": row.role, "workers": row.workers, "need": row.need}
                            for row in held
                        ],
                    }
                    for phase, held in phases.items()
                },
            }
            for pool, phases in needs.held.items()
        ],
        "not known": dict(needs.silent),
        "too full": [needs.name(pool) for pool in needs.too_full()],
        "changes": list(changes),
        "seconds": list(seconds),
    }
