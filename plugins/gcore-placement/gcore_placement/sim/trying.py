"""Runs ``g-core simulate``: compares placement policies on a simulated cluster.

The result is printed as a table or as JSON, and drawn as a plot if asked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.contract.factories import FactorySpec, build, reference_to
from gcore_core.contract.providers import Provider
from gcore_core.kits.commands import Plugins, catalog, print_table
from gcore_placement.sim.cluster import ORACLE, Cluster, Row, simulate
from gcore_placement.sim.workloads import PUBLISHED, Lengths, Published, Recorded, recorded

#: With this word another simulation runs, which has words of its own.
_AHEAD = "--async"

_EXAMPLE = """\
examples:
  g-core simulate --workload drift --devices 512 --policies replay,split:0.25,colocated
  g-core simulate --trace runs/judged/001 --devices 64 --policies replay,split:0.25 --plot steps.png

A policy is a provider of the plugin `placement`, or PLUGIN or PLUGIN/NAME of another; what follows a colon is the value of its
first setting. Engines take what a profile says, by default a roofline of 32e9 parameters on four devices of 80 GB:
--profile '{"base_s": 0.02}' changes terms of it.

g-core simulate --async --trace RUN simulates generation that runs ahead of training, see g-core simulate --async --help.
"""  # noqa: E501


def run(words: list[str]) -> int:
    """Runs ``g-core simulate`` with these command-line arguments; returns the exit code.

    Raises ConfigError for arguments that do not fit together, DataError for a trace without steps.
    """
    if _AHEAD in words:
        from gcore_placement.sim import ahead_command

        return ahead_command.run([word for word in words if word != _AHEAD])
    args = _parser().parse_args(words)
    _check_numbers(args)
    policies = {
        name: _build_provider("placement", name, "placement") for name in args.policies.split(",")
    }
    judge = Lengths(median=args.judge_tokens, sigma=0.5, limit=args.judge_tokens * 8)
    workload: Published | Recorded
    if args.trace is not None:
        workload = recorded(args.trace, judge)
        needed_groups = args.groups or workload.needed
        if len(workload.judges) > 1:
            print(
                f"note: the judges {', '.join(sorted(workload.judges))} of the run are one judge "
                "here, which writes all verdicts on a record as one; no policy is tried on how the "
                "judges share their cells",
                file=sys.stderr,
            )
    else:
        workload = Published(name=args.workload, steps=args.steps)
        needed_groups = args.groups or min(args.devices, 1024)
    profile = _profile(args.profile)
    cluster = Cluster(
        devices=args.devices,
        size=args.size,
        needed=needed_groups,
        switch_s=args.switch_s,
        profiles=(profile, profile),
    )
    if cluster.replicas < 2:
        raise ConfigError(
            (
                f"{args.devices} devices make {cluster.replicas} replicas of {args.size}, two are "
                "needed"
            ),
            where="--devices",
            todo="give more devices, or a smaller --size",
        )
    balancer = _build_provider("balancer", args.balance, "balance")
    rows = list(simulate(cluster, workload, policies, args.steps, args.seed, balancer))
    summaries = summary(rows)
    if args.plot is not None:
        from gcore_placement.sim.plot import plot

        plot(rows, args.plot)
    if args.json:
        print(
            json.dumps(
                {
                    "cluster": asdict(cluster),
                    "policies": summaries,
                    "steps": list(map(asdict, rows)),
                },
                indent=2,
            )
        )
    else:
        _print(summaries, cluster)
    return 0


def _check_numbers(args: argparse.Namespace) -> None:
    """Raises ConfigError for a number with which nothing can be simulated."""
    for name, least in (("size", 1), ("steps", 1), ("groups", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"must be at least {least}, is {value}.", where=f"--{name}")


def summary(rows: Sequence[Row], skip: int = 0) -> dict[str, dict[str, Any]]:
    """Returns policy -> means over its steps, fastest first.

    The entries of a policy are these:

    seconds: of the rollout.
    step_seconds: of the rollout, preparation, training and the push.
    excess_mean, excess_p95, excess_max: share of time above the best fixed split of the same step.
    over_bound: time over the lower bound, as a factor.
    judge_share: share of the cells that judge.
    moved_cells: cells that change roles in a step.
    prediction_error: mean relative error of predictions; None when the policy makes none.
    decision_share_of_step: processor time of decisions over the time of the steps.
    idle: cause -> share of replica-seconds.

    skip: number of first steps that are left out.
    """
    summaries: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row.policy for row in rows):
        policy_rows = [row for row in rows if row.policy == name and row.step >= skip]
        excess = np.array([row.excess for row in policy_rows])
        errors = [
            abs(row.predicted_s / row.seconds - 1)
            for row in policy_rows
            if row.predicted_s is not None
        ]
        step_s = np.array([row.seconds + row.train_s for row in policy_rows])
        summaries[name] = {
            "seconds": float(np.mean([row.seconds for row in policy_rows])),
            "step_seconds": float(step_s.mean()),
            "excess_mean": float(excess.mean()),
            "excess_p95": float(np.quantile(excess, 0.95)),
            "excess_max": float(excess.max()),
            "over_bound": float(np.mean([row.seconds / row.bound_s for row in policy_rows])),
            "judge_share": float(np.mean([row.share for row in policy_rows])),
            "moved_cells": float(np.mean([row.moved for row in policy_rows])),
            "prediction_error": float(np.mean(errors)) if errors else None,
            "decision_share_of_step": float(
                sum(row.decision_s for row in policy_rows) / step_s.sum()
            ),
            "idle": {
                cause: float(np.mean([row.idle[cause] for row in policy_rows]))
                for cause in policy_rows[0].idle
            },
        }
    return dict(sorted(summaries.items(), key=lambda item: item[1]["seconds"]))


def _print(summaries: dict[str, dict[str, Any]], cluster: Cluster) -> None:
    """Prints the summaries as two tables: times, then idle shares by cause."""
    head = [
        "policy",
        "rollout s",
        "step s",
        "over oracle",
        "p95",
        "worst",
        "judge cells",
        "off by",
        "idle",
    ]
    rows = []
    for name, means in summaries.items():
        error = means["prediction_error"]
        rows.append(
            [
                name,
                f"{means['seconds']:.0f}",
                f"{means['step_seconds']:.0f}",
                f"{means['excess_mean']:+.1%}" if name != ORACLE else "",
                f"{means['excess_p95']:+.1%}" if name != ORACLE else "",
                f"{means['excess_max']:+.1%}" if name != ORACLE else "",
                f"{means['judge_share']:.0%}",
                "" if error is None else f"{error:.0%}",
                f"{sum(means['idle'].values()):.0%}",
            ]
        )
    print(f"{cluster.devices} devices, replicas of {cluster.size}, {cluster.needed} groups a step")
    print_table(head, rows)
    best = summaries[ORACLE]
    print(
        f"\noracle: the best fixed split of each step; it takes {best['over_bound']:.2f} times "
        "the lower bound."
    )
    print("idle share of all replica-seconds, by cause:")
    causes = list(best["idle"])
    print_table(
        ["policy", *causes],
        [[name, *(f"{means['idle'][c]:.1%}" for c in causes)] for name, means in summaries.items()],
    )


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="g-core simulate",
        description=(
            "Tries placement policies on a simulated cluster: the objects that decide in a run."
        ),
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    workload_options = parser.add_mutually_exclusive_group()
    workload_options.add_argument(
        "--trace", type=Path, metavar="RUN", help="answers as long as those of this run"
    )
    workload_options.add_argument(
        "--workload", choices=sorted(PUBLISHED), default="drift", help="a published one (drift)"
    )
    parser.add_argument("--devices", type=int, default=512, help="512")
    parser.add_argument(
        "--size", type=int, default=4, help="devices of a replica, of either role (4)"
    )
    parser.add_argument(
        "--policies", default="replay,split:0.25,colocated,utilisation", metavar="NAME[:VALUE],..."
    )
    parser.add_argument(
        "--balance", default="core/in-order", help="balancer of training (core/in-order)"
    )
    parser.add_argument("--steps", type=int, default=18, help="18")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--groups",
        type=int,
        help="groups a step keeps (of the trace; or one a device, at most 1,024)",
    )
    parser.add_argument(
        "--judge-tokens",
        type=float,
        default=600.0,
        help="median verdict, if a trace tells none (600)",
    )
    parser.add_argument("--switch-s", type=float, default=30.0, help="seconds to change roles (30)")
    parser.add_argument(
        "--profile", default="{}", metavar="JSON", help="terms of the engines' profile"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the steps; needs matplotlib"
    )
    return parser


def _specs(kind: str, plugin: str, name: str) -> dict[str, Provider]:
    """Returns the plugin's providers of this kind, by name.

    name: the user's words that ask for one; they are shown when the plugin is not installed.
    """
    plugins = Plugins()
    where = f"--policies {name}" if kind == "placement" else "--balance"
    plugins.load(catalog.scan().get(plugin, where=where))
    return {item.spec.name: item.spec for item in plugins.providers(kind)}


def _build_provider(kind: str, name: str, plugin: str) -> Any:
    """Builds the provider that ``name`` asks for: ``name[:value]`` or ``plugin[/name][:value]``.

    ``value`` is turned into the type of the default of the provider's first setting. Raises
    ConfigError where there is no such provider, it has no settings, or the value does not fit.
    """
    path, _, value = name.partition(":")
    plugin, _, provider = path.rpartition("/") if "/" in path else (plugin, "", path)
    specs = _specs(kind, plugin, name)
    if provider not in specs and "/" not in path and provider in catalog.scan().names():
        # As in `use`: a plugin's name alone means its default.
        plugin = path
        provider = "default"
        specs = _specs(kind, plugin, name)
    if provider not in specs:
        raise ConfigError(
            f"plugin {plugin!r} has no {kind} {provider!r}{did_you_mean(provider, list(specs))}.",
            where="--policies" if kind == "placement" else "--balance",
            why=f"there are {', '.join(specs)}",
        )
    config = specs[provider].config
    if config is None:
        if value:
            raise ConfigError(f"{path} has no settings, but {value!r} is given", where="--policies")
        return build(FactorySpec(specs[provider].factory))
    settings = {}
    if value:
        first = fields(config)[0]
        try:
            make: Callable[[str], Any] = type(first.default)
            settings = {first.name: make(value)}
        except ValueError:
            raise ConfigError(
                f"{value!r} is not valid for {first.name} of {path}", where="--policies"
            ) from None
    return build(FactorySpec(specs[provider].factory, reference_to(config), settings))


def _profile(text: str) -> Profile:
    """Returns the profile whose terms a JSON object gives. Raises ConfigError."""
    try:
        return Profile(**json.loads(text))
    except (TypeError, ValueError) as error:
        terms = ", ".join(field.name for field in fields(Profile))
        raise ConfigError(
            f"{text!r} is no profile: {error}", where="--profile", why=f"terms: {terms}"
        ) from None
