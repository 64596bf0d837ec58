"""Makes a job of a Python call, shows it as YAML, writes it and trains it."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from gcore import rewards, rows, templates
from gcore.functions import files_of
from gcore.overrides import Overrides, flow, with_paths_as_texts, words
from gcore_core.contract.errors import ConfigError, GcoreError
from gcore_core.kits.commands import flat, load_plan, yaml12

if TYPE_CHECKING:
    from gcore.finished import Run
    from gcore_core.kits.commands import Plan

FOLDER = "job"
FILE = "job.yaml"
#: Keys of a job that hold paths of files.
_PATHS = ("path", "known", "python")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Holds a job: the tree of its YAML, and the files that it names beside it.

    tree: what the YAML holds, defaults left out.
    files: name -> content.
    """

    tree: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def yaml(self) -> str:
        """Returns the job as ``g-core run`` reads it; file names are relative to it.

        Raises ConfigError for a value for which YAML has no word.
        """
        try:
            return yaml12.dump(with_paths_as_texts(self.tree))
        except yaml.YAMLError as error:
            value = error.args[-1]
            raise ConfigError(
                f"a value of type {type(value).__qualname__} cannot stand in YAML: {value!r:.60}.",
                where="gcore.train",
                todo="give numbers, texts, lists or mappings",
            ) from error

    def __str__(self) -> str:
        return self.yaml

    def write(self, folder: str | Path) -> Path:
        """Writes the YAML and its files into a folder, and returns the YAML's path.

        ``g-core run`` of it does what ``train`` does.
        """
        directory = Path(folder).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
        file = directory / FILE
        file.write_text(self.yaml, encoding="utf-8")
        return file

    def train(self) -> Run:
        """Trains in processes of its own and returns the finished run.

        Raises the run's own error, and KeyboardInterrupt after Ctrl-C.
        """
        from gcore.follow import follow
        from gcore_core.kits.calls import create_directory

        run = self.tree["run"]
        directory = create_directory(Path("runs"), run["name"], run.get("dir"))
        file = self.write(directory / FOLDER)
        return follow(file, words({"run.dir": str(directory)}, {}))


def make_job(
    model: Any,
    reward: Any,
    data: Any,
    algorithm: str | Mapping[str, Any],
    evaluation: Any,
    overrides: Overrides,
    keywords: Mapping[str, Any],
) -> Job:
    """Returns the job that a call of ``gcore.train`` stands for; its settings are checked.

    What only ``g-core check`` looks at is not: devices, memory, interpreters, content of files.

    Raises ConfigError, DataError or PluginError.
    """
    files: dict[str, bytes] = {}
    if isinstance(algorithm, str):
        tree = templates.template(algorithm)
        name = algorithm.replace("/", "-")
    else:
        tree = copy.deepcopy(_placed("", algorithm))
        name = "train"
    tree["run"] = {"name": name, **tree.get("run", {})}
    tree["data"], added = rows.dataset_of(data, "rows.jsonl", "data")
    files |= added
    if evaluation is not None:
        dataset, added = rows.dataset_of(evaluation, "evaluation.jsonl", "evaluation")
        tree["evaluation"] = {**tree.get("evaluation", {}), "data": dataset}
        files |= added
    else:
        tree.pop("evaluation", None)
    tree["rewards"], added = rewards.rewards_of(reward, columns=rows.names_in(files))
    files |= added
    if model is not None:
        policy = tree.setdefault("roles", {}).setdefault("policy", {})
        policy["model"], added = _model(model, files)
        files |= added
    return _with_overrides(tree, files, [_from_here(w) for w in words(overrides, keywords)])


def _from_here(word: str) -> str:
    """Returns an override whose paths, where they are of this directory, are absolute.

    The job is written elsewhere, and paths in it are relative to that place.
    """
    key, _, text = word.partition("=")
    try:
        value = yaml12.load(text)
    except yaml.YAMLError:  # told where the job is read
        return word
    placed = _placed(key.rpartition(".")[2], value)
    is_same = placed is value or placed == value  # NaN equals nothing
    return word if is_same else f"{key}={flow(placed).rstrip()}"


def _placed(key: str, value: Any) -> Any:
    """Returns a value with its paths absolute, those that are there; ``key`` names it."""
    if isinstance(value, Mapping):
        return {name: _placed(str(name), inner) for name, inner in value.items()}
    if key == "local" and isinstance(value, list):
        return [_placed("path", inner) for inner in value]
    is_path = (key in _PATHS or key.endswith("_path")) and isinstance(value, str) and value
    return rows.placed(value) if is_path and Path(value).expanduser().exists() else value


def _model(model: Any, taken: Iterable[str] = ()) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns (``model`` of the role policy, files beside the job).

    model: a name of the hub, a folder, a section as a mapping, or a function that makes one:
        ``f(directory, config, progress)``.
    taken: names of files that are beside the job already, such as those of rewards.
    """
    if isinstance(model, Mapping):
        node = rows.anchored(model)
        if isinstance(node.get("make"), Mapping):
            node["make"] = rows.anchored(node["make"])
        return node, {}
    if isinstance(model, str | Path):
        is_there = Path(model).expanduser().exists()
        return {"path": rows.placed(model) if is_there else str(model)}, {}
    if inspect.isfunction(model):
        text, beside = files_of(model, "model")
        name = rewards.free_name(model.__name__, [*taken, *beside])
        files = {**beside, name: text.encode()}
        return {"make": {"path": name, "name": model.__name__}}, files
    raise ConfigError(
        f"a value of type {type(model).__qualname__} cannot travel to the processes of a run.",
        where="model",
        todo="give a name of the hub or a folder: model.save_pretrained(FOLDER), and the tokenizer",
    )


def _with_overrides(tree: dict[str, Any], files: dict[str, bytes], given: list[str]) -> Job:
    """Returns the job with the overrides in its tree.

    What a template sets for a provider that an override replaced, and the new one does not know,
    is left out, as on the command line.
    """
    draft = Job(tree=tree, files=files)
    with tempfile.TemporaryDirectory(prefix="g-core-job-") as folder:
        file = draft.write(folder)
        plan = named(lambda: load_plan(file, given), folder)
    return Job(tree=_known(plan), files=files)


def named(call: Callable[[], Plan], folder: str) -> Plan:
    """Calls and returns; an error names the call of Python in place of a temporary file."""
    try:
        return call()
    except GcoreError as error:
        error.where = _without(error.where, folder)
        error.why = _without(error.why, folder)
        error.todo = _without(error.todo, folder)
        error.args = (_without(error.what, folder),)
        error.what = error.args[0]
        raise


def _without(text: str, folder: str) -> str:
    return text.replace(str(Path(folder) / FILE), "gcore.train").replace(f"{folder}/", "")


def _known(plan: Plan) -> dict[str, Any]:
    """Returns what was written for a plan, the part that its resolved configuration has."""
    known = set(flat(plan.config))

    def kept(node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for name, value in node.items():  # not by dotted keys: a name may have a dot in it
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and value:
                if inner := kept(value, f"{key}."):
                    parts[name] = inner
            elif key in known or any(other.startswith(f"{key}.") for other in known):
                parts[name] = value
        return parts

    return kept(plan.written, "")
