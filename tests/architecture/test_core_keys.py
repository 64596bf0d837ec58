"""The core's configuration grows one decision at a time: a new key stands here, in the schema and
in docs/reference/config.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from gcore_core.config.schema import core_keys

ROOT = Path(__file__).parents[2]

CHOICES = [
    "launcher",
    "controller",
    "data",
    "evaluation.data",
    "advantage",
    "objective",
    "filter",
    "balance",
]
CHOICES += ["placement", "roles.*", "rewards.*"]
KEYS = {f"{choice}.{key}" for choice in CHOICES for key in ("use", "config")} | {
    "run.name",
    "run.steps",
    "run.epochs",
    "run.patience_s",
    "run.seed",
    "run.dir",
    "run.deterministic",
    "cluster.devices",
    "placement.sleep_in_training",
    "controller.shards",
    "evaluation.every",
    "evaluation.prompts",
    "evaluation.show",
    "evaluation.data",
    "roles.*.slots",
    "roles.*.least",
    "roles.*.follows",
    "roles.*.python",
    "roles.*.model",
    "roles.*.engine",
    *(
        f"checkpoint.{key}"
        for key in ("every", "last", "keep_every", "best", "best_is", "restarts")
    ),
    "rewards.*.weight",
    "rewards.*.normalise",
    "rewards.*.when",
    "rewards.*.role",
    "rewards.*.workers",
    "rewards.*.timeout_s",
    "rewards.*.worker",
    "plugins",
    "local",
}


def test_the_core_has_exactly_these_keys() -> None:
    assert set(core_keys()) == KEYS


def test_the_page_explains_every_key_and_no_other() -> None:
    page = (ROOT / "docs/reference/config.md").read_text()
    shown = re.findall(r"^\| `([^`]+)` \|", page, flags=re.M)
    assert sorted(key.replace("<name>", "*") for key in shown) == sorted(KEYS)
