"""Makes a job small: each function changes one section of it and says what it did.

What a twin of a model or of a data set is, is the business of the plugins that open them
(``Provider.twin``). What is here are numbers of processes, prompts and steps.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.factories import import_attribute
from gcore_tools.shrink import chance
from gcore_tools.shrink.installed import Installed

Node = dict[str, Any]

#: Name of the reward that is added.
CHANCE = "chance"
#: Records of a group, and prompts of a step, at most.
_GROUP = 4
_PROMPTS = 4
_EVALUATED = 4


@dataclass(kw_only=True)
class Shrinking:
    """Holds a job that is being made small.

    job: as it was read; it is changed in place.
    directory: where twins go.
    steps: of the small job.
    slots: of a role, at most.
    engine: the plugin that takes the place of engines that are not installed.
    nodes: nodes out of namespaces; 1: this machine alone, without any.
    notes: what was done, in the order of the job.
    random: roles whose models are twins.
    """

    job: Node
    directory: Path
    steps: int
    slots: int
    engine: str
    nodes: int = 1
    notes: list[str] = field(default_factory=list)
    random: set[str] = field(default_factory=set)
    installed: Installed = field(default_factory=Installed)

    def run(self) -> None:
        """Makes the job small. Raises what plugins raise for what they cannot make a twin of."""
        self._length()
        self._data()
        self._roles()
        self._rewards()
        self._controller()
        self._cluster()

    # -- sections ----------------------------------------------------------------------------------

    def _length(self) -> None:
        run = _section(self.job, "run")
        for name in ("epochs", "dir"):
            run.pop(name, None)
        run["steps"] = self.steps
        if "evaluation" in self.job:
            evaluation = _section(self.job, "evaluation")
            evaluation["every"] = 1 if evaluation.get("every") else 0
            if evaluation.get("data"):  # else a number of prompts would be refused
                prompts = int(evaluation.get("prompts", _EVALUATED))
                evaluation["prompts"] = min(_EVALUATED, prompts)
        if (self.job.get("checkpoint") or {}).get("every"):
            self.job["checkpoint"]["every"] = 1

    def _data(self) -> None:
        for path, node in self._datasets():
            use = str(node.setdefault("use", "core/jsonl"))
            named = (node.get("config") or {}).get("path")
            if self._take_twin("dataset", use, node, path):
                self.notes.append(f"{path}: {named}: a few rows with its columns, made here")
            elif "limit" not in (node.get("config") or {}):
                self._set_where_there(node, "dataset", path, limit=64)

    def _datasets(self) -> Iterator[tuple[str, Node]]:
        if isinstance(self.job.get("data"), dict):
            yield "data", self.job["data"]
        evaluated = (self.job.get("evaluation") or {}).get("data")
        if isinstance(evaluated, dict):
            yield "evaluation.data", evaluated

    def _roles(self) -> None:
        for name, node in _section(self.job, "roles").items():
            where = f"roles.{name}"
            kind = self.installed.kind_of_role(name, self.job)
            self._replace_engine(where, kind, node)
            original = (node.get("model") or {}).get("path")
            self._take_twin(kind, str(node["use"]), node, where)
            if original and (node.get("model") or {}).get("path") != original:
                self.random.add(name)
                self.notes.append(f"{where}: {original}: a random twin of a few layers, made here")
            given = int(node.get("slots", 1))
            node["slots"] = min(given, self.slots)
            if given > self.slots:
                self.notes.append(f"{where}: {self.slots} of {given} slots")
            if node.get("head_start"):
                node["head_start"] = 1

    def _replace_engine(self, where: str, kind: str, node: Node) -> None:
        """Puts the replacement where the engine is not installed, and drops what it cannot take."""
        use = str(node.get("use", ""))
        lacking = self.installed.lacks(kind, use, node.get("python"), where)
        if not lacking:
            return
        spec = self.installed.provider(kind, self.engine, where)
        known = {one.name for one in dataclasses.fields(spec.config)} if spec.config else set()
        config = node.get("config") or {}
        dropped = [f"config.{name}" for name in config if name not in known]
        dropped += [name for name in ("engine", "python") if name in node]
        node["config"] = {name: value for name, value in config.items() if name in known}
        for name in ("engine", "python"):
            node.pop(name, None)
        node["use"] = self.engine
        left = f"; left out: {', '.join(dropped)}" if dropped else ""
        self.notes.append(f"{where}: {self.engine} in place of {use}, for {lacking}{left}")

    def _rewards(self) -> None:
        rewards = _section(self.job, "rewards")
        if not rewards:
            return
        for name, node in rewards.items():
            where = f"rewards.{name}"
            # A judge that is made by the job knows its work, and keeps its settings.
            knows = "role" in node and node["role"] not in self.random
            if not knows and self._take_twin("reward", str(node.get("use", "")), node, where):
                self.notes.append(f"{where}: settings for a random model")
            if node.pop("workers", 1) > 1:
                self.notes.append(f"{where}: one worker")
        rewards[CHANCE] = {
            "use": "core/function",
            "config": {"path": str(Path(chance.__file__)), "name": CHANCE},
        }
        self.notes.append(f"rewards.{CHANCE}: added, since a random model earns no other reward")
        chosen = (self.job.get("filter") or {}).get("config") or {}
        if chosen.pop("reward", None):
            self.notes.append(f"filter.config.reward: left out, so that {CHANCE} counts")

    def _controller(self) -> None:
        controller = _section(self.job, "controller")
        config = controller.setdefault("config", {}) or {}
        controller["config"] = config
        minibatches = int(config.get("minibatches", 1))
        least = max(_PROMPTS, int(controller.get("shards", 1)), minibatches)
        config["prompts"] = minibatches * -(-least // minibatches)
        if isinstance(self.job.get("advantage"), dict):
            self._set_where_there(
                self.job["advantage"], "advantage", "advantage", group_size=_GROUP
            )

    def _cluster(self) -> None:
        """Leaves roles apart that are apart in the job, and together those that share devices."""
        launcher = self.job.pop("launcher", None)
        if launcher:
            there = "this machine alone" if self.nodes == 1 else f"{self.nodes} nodes here"
            self.notes.append(f"launcher: {there}, not {launcher.get('use')}")
        cluster = _section(self.job, "cluster")
        given_devices = cluster.pop("devices", "auto")
        cluster.pop("device_gib", None)
        given = self._given_slots
        slots = [int(node["slots"]) for node in _section(self.job, "roles").values()]
        together = isinstance(given_devices, int) and sum(given) > given_devices
        cluster["devices"] = max(slots) if together else sum(slots)
        if self.nodes > 1:
            self._spread(cluster)

    def _spread(self, cluster: Node) -> None:
        """Puts the job on several nodes, with as many devices on each."""
        each = -(-int(cluster["devices"]) // self.nodes)
        cluster["devices"] = each * self.nodes
        self.job["launcher"] = {
            "use": "shrink/namespaces",
            "config": {"nodes": self.nodes, "devices": each},
        }
        self.notes.append(f"launcher: nodes of {each} devices, out of namespaces: run it as root")

    def __post_init__(self) -> None:
        roles = (self.job.get("roles") or {}).values()
        self._given_slots = [int((node or {}).get("slots", 1)) for node in roles]

    # -- nodes -------------------------------------------------------------------------------------

    def _take_twin(self, kind: str, use: str, node: Node, where: str) -> bool:
        """Asks the provider for a twin and merges what it says over the node.

        Returns whether it said anything.
        """
        spec = self.installed.provider(kind, use, where)
        if not spec.twin:
            return False
        asked = {**copy.deepcopy(node), "use": use, "like": self._policy_model()}
        try:
            changes = import_attribute(spec.twin)(asked, self.directory)
        except ConfigError as error:
            raise ConfigError(error.what, where=where, why=error.why, todo=error.todo) from error
        _merge(node, changes)
        return bool(changes)

    def _policy_model(self) -> Mapping[str, Any]:
        policy = (self.job.get("roles") or {}).get("policy") or {}
        return dict(policy.get("model") or {})

    def _set_where_there(self, node: Node, kind: str, where: str, **values: int) -> None:
        """Lowers settings of a provider that has them to these values."""
        spec = self.installed.provider(kind, str(node.get("use", "")), where)
        known = {one.name: one for one in dataclasses.fields(spec.config)} if spec.config else {}
        config = node.get("config") or {}
        for name, most in values.items():
            if name not in known:
                continue
            default = known[name].default
            given = config.get(name, default if isinstance(default, int) else most)
            config[name] = min(most, int(given if given is not None else most))
        node["config"] = config


def _section(job: Node, name: str) -> Node:
    """Returns a section of a job, which is made where there is none."""
    if not isinstance(job.get(name), dict):
        job[name] = {}
    section: Node = job[name]
    return section


def _merge(node: Node, changes: Mapping[str, Any]) -> None:
    """Merges changes over a node, in place; None leaves a setting out."""
    for name, value in changes.items():
        if value is None:
            node.pop(name, None)
        elif isinstance(value, Mapping):
            inner = node.get(name)
            node[name] = inner if isinstance(inner, dict) else {}
            _merge(node[name], value)
        else:
            node[name] = value
