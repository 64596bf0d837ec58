"""Reads a run's configuration: where its rewards ask people, and whether it waits long enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore_core.contract.deadlines import Deadlines, Wait
from gcore_rewards.human.config import DIRECTORY, USES


def queues(plan: Mapping[str, Any], run: Path) -> list[Path]:
    """Returns the directories in which the rewards of a run ask people.

    plan: the resolved configuration.
    run: the run's directory.
    """
    rewards = plan.get("rewards", {}).values()
    configs = [reward.get("config", {}) for reward in rewards if reward.get("use") in USES]
    return list(dict.fromkeys(Path(config.get("path") or run / DIRECTORY) for config in configs))


def problems_of(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each setting with which a run would not wait as long as it says."""
    longest_s = 0.0
    patience_s = float(plan.get("run", {}).get("patience_s", 600.0))
    for name, reward in plan.get("rewards", {}).items():
        if reward.get("use") not in USES:
            continue
        wait_s = float(reward.get("config", {}).get("wait_s", 0.0))
        longest_s = max(longest_s, wait_s)
        poll_s = float(reward.get("config", {}).get("poll_s", 0.0))
        if poll_s >= patience_s:
            yield (
                f"rewards.{name}.config.poll_s: must be shorter than run.patience_s "
                f"({patience_s:g} s), is {poll_s:g}; only each look at the labels shows that the "
                "reward waits."
            )
        if reward["timeout_s"] <= wait_s:
            yield (
                f"rewards.{name}.timeout_s: must be longer than config.wait_s ({wait_s:g} s), is "
                f"{reward['timeout_s']:g}; set timeout_s: {wait_s + 60:g}."
            )
    shards = plan.get("controller", {}).get("shards", 1)
    others_s = Deadlines(patience_s).seconds(Wait.SHARDS)
    # The reward shows its own shard that it waits. What other shards wait for is all shards.
    if shards > 1 and longest_s >= others_s:
        yield (
            f"run.patience_s: with {shards} shards, one waits {others_s:g} s for another, and "
            f"people may take {longest_s:g} s; set controller.shards: 1, or run.patience_s: "
            f"{longest_s / 3 + 60:.0f}."
        )
