"""Rewrites imports, factory strings and mentions of gcore-core 0.1's modules to those of 0.2.

    python rename_modules.py PATH ...

It changes text files in place: Python, YAML, TOML, JSON, Markdown and templates. Run a formatter
that sorts imports afterwards. Nothing of 0.1 was published, so 0.2 has no aliases for the old
names.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".tmpl", ".ini", ".txt", ".cfg"}

#: Old module -> new module, both below ``gcore_core``.
MODULES = {
    # what a plugin's author imports
    "hookspecs": "contract.hookspecs",
    "providers": "contract.providers",
    "errors": "contract.errors",
    "records": "contract.records",
    "factories": "contract.factories",
    "order": "contract.order",
    "protocols": "contract.generator",
    "questions": "contract.questions",
    "weight_transfer": "contract.weight_transfer",
    "placement.devices": "contract.placement",
    "placement.measured": "contract.measurements",
    # what is installed, what was chosen
    "catalog": "config.catalog",
    "plugins": "config.plugins",
    "schema": "config.schema",
    "sources": "config.yaml_source",
    "config": "config.plan",
    "checks": "config.checks",
    "interpreters": "config.interpreters",
    "environments": "config.venvs",
    "user_functions": "config.user_functions",
    # processes and what they carry
    "processes.service": "runtime.rpc.service",
    "processes.rpc": "runtime.rpc.sockets",
    "processes.wire": "runtime.rpc.wire",
    "processes.inline": "runtime.rpc.in_process",
    "processes.insist": "runtime.rpc.retry",
    "processes.gathering": "runtime.rpc.gathering",
    "processes.store": "runtime.store.client",
    "processes.slabs": "runtime.store.server",
    "processes.columns": "runtime.store.columns",
    "processes.worker": "runtime.process.worker",
    "processes.agent": "runtime.process.agent",
    "processes.spawning": "runtime.process.spawn",
    "processes.launchers": "runtime.process.launchers",
    "processes.handshake": "runtime.process.handshake",
    "processes.compute": "runtime.process.compute",
    "processes.config": "runtime.process.config",
    "processes.shells.generator": "runtime.shells.generator",
    "processes.shells.trainer": "runtime.shells.trainer",
    "processes.shells.scorer": "runtime.shells.scorer",
    "processes.shells.asking": "runtime.shells.questions",
    "processes.shells": "runtime.shells",
    "processes.sampling": "runtime.shells.role_sampler",
    "processes.messages": "runtime.messages",
    "processes.push": "runtime.push",
    "processes.relay": "runtime.relay",
    "processes.agreements": "runtime.agreements",
    # one run from start to end
    "processes.jobs": "run.jobs",
    "processes.supervisor": "run.supervisor",
    "processes.keeper": "run.checkpoint_service",
    "processes.surplus": "run.carried_records",
    "placement.placed": "run.initial_placement",
    "run.checkpoints_manifest": "run.manifest",
    "run.making": "run.make_model",
    "cli.running": "run.start",
    "cli.signals": "run.signals",
    "cli.first_placement": "run.initial_placement",
    "cli.sameness": "run.preflight",
    "cli.host_memory": "run.host_memory",
    "cli.devices": "run.initial_placement",
    # step programs
    "ledger": "controllers.window.ledger",
    "oversampling": "controllers.keep_rate",
    "controllers.quota": "controllers.window.in_step",
    "controllers.rollout": "controllers.window.drawing",
    "controllers.scoring": "controllers.window.scoring",
    "controllers.weighing": "controllers.reward_weights",
    "controllers.stopping": "controllers.checkpointing",
    "controllers.moving": "controllers.placement.lead",
    "controllers.placing": "controllers.placement.shard",
    "controllers.sleeping": "controllers.placement.sleepers",
    "controllers.measuring": "controllers.placement.requests",
    "placement.journal": "controllers.placement.journal",
    # the plugin ``core``
    "builtin": "builtin.hooks",
    "datasets": "builtin.json_lines",
    "rewards": "builtin.function_reward",
    "filters": "builtin.filters",
    "data_config": "builtin.config",
    "placement.balance": "builtin.balancer",
    "placement.policy": "builtin.placement",
}

_HOMES = {
    "contract.context": "WorkerContext",
    "contract.scorer": "ScoredRecord Score Scorer AsyncScorer",
    "contract.trainer": "TrainRecord Trainer SavesInBackground",
    "contract.algorithms": (
        "Objective GroupScalars Advantage ActionAdvantage Filter Work Balancer LearnsCosts"
    ),
    "contract.dataset": "Dataset",
    "contract.controller": "Controller",
    "contract.columns": "Columns",
}
#: (old module, name) -> new module, where a module was taken apart.
SYMBOLS = {("protocols", name): new for new, names in _HOMES.items() for name in names.split()}
SYMBOLS |= {
    ("rewards", "failure"): "contract.scorer",
    ("placement.policy", "every_slot"): "contract.placement",
    ("placement.balance", "KeepsCosts"): "contract.algorithms",
    ("placement.balance", "learned"): "controllers.training",
    ("placement.balance", "go_on"): "controllers.training",
    ("data_config", "RowsConfig"): "contract.rows",
    ("datasets", "prompt_from"): "contract.rows",
    ("datasets", "require_there"): "contract.rows",
    ("datasets", "data_files_in"): "contract.rows",
    ("config", "load"): "config.plan",
}
#: Functions that have another name, by their new module.
FUNCTIONS = {
    ("config.plan", "load"): "load_plan",
    ("controllers.training", "learned"): "learned_costs",
    ("controllers.training", "go_on"): "restore_costs",
}

_IMPORT = re.compile(
    r"(?:(?<![\w.])|(?<=\\n))from (gcore_core(?:\.\w+)*) import[ ]?(\((?:[^()]|\n)*?\)|\*|[\w, ]+)"
)
_DOTTED = re.compile(r"gcore_core((?:[.]\w+)+)(:\w+)?")
_PATH = re.compile(r"gcore_core/((?:\w+/)*\w+)\.py")
_PARTIAL = re.compile(r"(?<![\w./])(processes|placement|controllers)\.(\w+)(?![\w/])")


def rewritten(text: str) -> str:
    """Returns the text with every name of 0.1 in it replaced."""
    kept: list[str] = []

    def put_by(match: re.Match[str]) -> str:
        kept.append(_import(match, text))
        return f"\0{len(kept) - 1}\0"

    text = _IMPORT.sub(put_by, text)
    text = _DOTTED.sub(_dotted, text)
    text = _PATH.sub(lambda m: f"gcore_core/{_path(m[1])}.py", text)
    text = _PARTIAL.sub(_partial, text)
    return re.sub(r"\0(\d+)\0", lambda match: kept[int(match[1])], text)


def _import(match: re.Match[str], text: str) -> str:
    """Returns the statements that take the place of one import, one for each new module."""
    old = match[1].removeprefix("gcore_core").lstrip(".")
    body = re.sub(r"#[^\n]*", "", match[2]).strip("()")
    tail = match[2][len(match[2].rstrip()) :] if not match[2].startswith("(") else ""
    groups: dict[str, list[str]] = defaultdict(list)
    for item in filter(None, (part.strip() for part in body.replace("\\n", " ").split(","))):
        name, _, alias = item.partition(" as ")
        module, new_name = _home(old, name.strip())
        groups[module].append(f"{new_name} as {alias}" if alias else new_name)
    start = text.rfind("\n", 0, match.start()) + 1
    indent = text[start : match.start()]
    separator = "\n" + indent if not indent.strip() else "; "
    statements = []
    for module, names in groups.items():
        listed = ", ".join(names)
        wide = len(f"{indent}from {module} import {listed}") > 100 and not indent.strip()
        statements.append(f"from {module} import " + (f"({listed})" if wide else listed))
    return separator.join(statements) + tail


def _home(old: str, name: str) -> tuple[str, str]:
    """Returns (module, name) of what ``from gcore_core.<old> import <name>`` imports now."""
    inner = f"{old}.{name}" if old else name
    if inner in MODULES:
        parent, _, leaf = f"gcore_core.{MODULES[inner]}".rpartition(".")
        return parent, leaf
    new = SYMBOLS.get((old, name)) or MODULES.get(old, old)
    return f"gcore_core.{new}".rstrip("."), FUNCTIONS.get((new, name), name)


def _dotted(match: re.Match[str]) -> str:
    """Returns a dotted name of 0.2 for one of 0.1; the longest known module counts."""
    parts = match[1][1:].split(".")
    attribute = (match[2] or "")[1:]
    for size in range(len(parts), 0, -1):
        old = ".".join(parts[:size])
        rest = parts[size:]
        first = rest[0] if rest else attribute
        new = SYMBOLS.get((old, first)) or MODULES.get(old)
        if new is not None:
            tail = "".join(f".{part}" for part in rest)
            return f"gcore_core.{new}{tail}{match[2] or ''}"
    return match[0]


def _path(old: str) -> str:
    """Returns a module's path of 0.2 for one of 0.1, both without ending."""
    dotted = old.replace("/", ".")
    return MODULES.get(dotted, dotted).replace(".", "/")


def _partial(match: re.Match[str]) -> str:
    """Returns the new name of a module that is mentioned without ``gcore_core``."""
    new = MODULES.get(f"{match[1]}.{match[2]}")
    return new if new is not None and match[1] == "processes" else match[0]


def main() -> None:
    for word in sys.argv[1:]:
        path = Path(word)
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.suffix in SUFFIXES and file.is_file():
                text = file.read_text(encoding="utf-8")
                new = rewritten(text)
                if new != text:
                    file.write_text(new, encoding="utf-8")
                    print(file)


if __name__ == "__main__":
    main()
