"""Reads the settings of a configuration file: keys and values, in the order of the file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from gcore_core.contract.errors import ConfigError
from gcore_migrate import shell

_SCRIPTS = (".sh", ".bash", "")
#: A variable of the environment that the script does not set, and its default where it has one.
_UNKNOWN = re.compile(r"\$\{([A-Za-z_]\w*)(?::?-([^{}$]*))?\}|\$([A-Za-z_]\w*)")
#: The beginning of one in a form that is not understood.
_ODD = re.compile(r"\$\{(?!oc\.)([A-Za-z_]\w*)")
_OPENS, _CLOSES = "\0", "\1"  # stand for the braces of what is done


def read_verl(file: Path) -> dict[str, Any]:
    """Returns the settings of a verl configuration by their dotted keys.

    file: YAML as verl's own, or a shell script that calls it with overrides.
    """
    if file.suffix in (".yaml", ".yml"):
        return dict(_flat(_tree(file)))
    if file.suffix in _SCRIPTS:
        found = shell.assignments(shell.words_of(_text(file)))
        return _some({key: _value(text) for key, text in found.items()}, file, "key=value words")
    raise _unknown(file, "a YAML file or a shell script")


def read_trl(file: Path) -> tuple[str, dict[str, Any]]:
    """Returns the kind of a TRL configuration, and its settings by name.

    file: YAML of TRL's command line, a shell script with its options, or a Python script that makes
        a configuration such as ``GRPOConfig(...)`` of plain values.

    The kind is ``grpo``, ``rloo``, ``sft`` or ``dpo``; "" where the file does not say it.
    """
    if file.suffix in (".yaml", ".yml"):
        tree = _tree(file)
        return "", _some({str(key): value for key, value in tree.items()}, file, "keys")
    if file.suffix == ".py":
        return _of_python(file)
    if file.suffix in _SCRIPTS:
        words = shell.words_of(_text(file))
        found = {key: _value(value) for key, value in shell.options(words).items()}
        return _kind_of(words), _some(found, file, "--key words")
    raise _unknown(file, "a YAML file, a shell script or a Python script")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("it cannot be read", where=str(file), why=str(error)) from error


def _tree(file: Path) -> Mapping[Any, Any]:
    try:
        tree = yaml.safe_load(_text(file))
    except yaml.YAMLError as error:
        raise ConfigError("it is no YAML", where=str(file), why=str(error)) from error
    if not isinstance(tree, Mapping):
        raise ConfigError("it has no keys", where=str(file))
    return tree


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _value(text: Any) -> Any:
    """Returns what a word means: read as YAML, as Hydra reads it."""
    if not isinstance(text, str):
        return [_value(part) for part in text] if isinstance(text, list) else text
    text = _of_environment(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 takes 1e-6 for a text
        except ValueError:
            return value
    return value


def _of_environment(text: str) -> str:
    """Returns a text in which unknown variables are asked for as a job does: ``${oc.env:NAME}``."""

    def asked(match: re.Match[str]) -> str:
        default = "" if match[2] is None else f",{match[2]}"
        return f"{_OPENS}oc.env:{match[1] or match[3]}{default}{_CLOSES}"

    before = None
    while before != text:  # a default may hold another variable
        before = text
        text = _UNKNOWN.sub(asked, text)
    text = _ODD.sub(r"${oc.env:\1}", text)
    return text.replace(_OPENS, "${").replace(_CLOSES, "}")


def _some(found: dict[str, Any], file: Path, what: str) -> dict[str, Any]:
    if not found:
        raise ConfigError(f"no {what} are in it", where=str(file))
    return found


def _unknown(file: Path, what: str) -> ConfigError:
    return ConfigError(
        f"a file that ends in {file.suffix!r} is not read", where=str(file), todo=what
    )


# -- Python ----------------------------------------------------------------------------------------

_CONFIGS = {"GRPOConfig": "grpo", "RLOOConfig": "rloo", "SFTConfig": "sft", "DPOConfig": "dpo"}


def _of_python(file: Path) -> tuple[str, dict[str, Any]]:
    """Reads the literal arguments of the first configuration that a script makes; runs nothing."""
    try:
        tree = ast.parse(_text(file))
    except SyntaxError as error:
        raise ConfigError("it is no Python", where=str(file), why=str(error)) from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        kind = _CONFIGS.get(_name(call.func))
        if kind:
            found = dict(_literals(call))
            found |= _of_trainer(calls)
            return kind, _some(found, file, "literal arguments")
    raise ConfigError(
        f"it makes none of {', '.join(_CONFIGS)}",
        where=str(file),
        todo="write the settings into a YAML file, as for TRL's command line",
    )


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _literals(call: ast.Call) -> Iterator[tuple[str, Any]]:
    for keyword in call.keywords:
        if keyword.arg is None:
            continue
        try:
            yield keyword.arg, ast.literal_eval(keyword.value)
        except ValueError:
            yield keyword.arg, ast.unparse(keyword.value)


def _of_trainer(calls: list[ast.Call]) -> dict[str, Any]:
    """Returns the model's name where the trainer is given one: ``GRPOTrainer(model="...")``."""
    for call in calls:
        if _name(call.func).endswith("Trainer"):
            given = dict(_literals(call))
            if isinstance(given.get("model"), str):
                return {"model_name_or_path": given["model"]}
    return {}


def _kind_of(words: list[str]) -> str:
    """Returns the kind that a command names: ``trl grpo``, or a script such as ``grpo_vlm.py``."""
    for word in words:
        stem = Path(word).stem if word.endswith(".py") else word
        for kind in _CONFIGS.values():
            if stem == kind or stem.startswith(f"{kind}_"):
                return kind
    return ""
