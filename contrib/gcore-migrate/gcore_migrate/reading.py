"""Reads the settings of a configuration file: keys and values, in the order of the file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from gcore_core.contract.errors import ConfigError
from gcore_core.kits.commands import yaml12
from gcore_migrate import shell

_SCRIPTS = (".sh", ".bash", "")
#: A variable of the environment, in a form that is understood: $NAME, ${NAME}, ${NAME:-DEFAULT} or
#: ${NAME-DEFAULT}. The default holds no other variable and no other braces, so that of variables
#: one inside the other only the innermost is found.
_VARIABLE = re.compile(
    r"""
    \$\{ (?P<braced>[A-Za-z_]\w*) (?: :?- (?P<default>[^{}$]*) )? \}
    | \$ (?P<bare>[A-Za-z_]\w*)
    """,
    re.VERBOSE,
)
#: The beginning of a variable in another form, such as ${NAME%/*}; not of what a job says.
_OTHER_FORM = re.compile(r"\$\{(?!oc\.)([A-Za-z_]\w*)")
_PADDED = re.compile(r"[-+]?0[0-9]+")
_UNDERSCORED = re.compile(r"[-+]?[1-9][0-9]*(_[0-9]+)+")
#: Stand for the "${" and the "}" of a variable that is replaced already, so that it is not found
#: again. No text holds them.
_OPENS = "\0"
_CLOSES = "\1"


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
        tree = yaml.safe_load(_text(file))  # by YAML 1.1, as those programs read it
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
    """Returns what a word means, as Hydra reads it.

    That is as YAML 1.2 does, but that a number with zeros before it is a text, and that a whole
    number may have underscores.
    """
    if not isinstance(text, str):
        return [_value(part) for part in text] if isinstance(text, list) else text
    text = _of_environment(text)
    if _PADDED.fullmatch(text):
        return text
    if _UNDERSCORED.fullmatch(text):
        return int(text)
    try:
        return yaml12.load(text)
    except yaml.YAMLError:
        return text


def _of_environment(text: str) -> str:
    """Returns a text with variables as a job writes them: ``${oc.env:NAME}``.

    These are the variables that the script does not set, so that they are of the environment. A
    variable with a default becomes ``${oc.env:NAME,DEFAULT}``. A default may hold another variable.
    So the innermost are replaced first, again and again until none is left. For example, with < and
    > for ``_OPENS`` and ``_CLOSES``:

        ${HERE:-$THERE/data}/x
        ${HERE:-<oc.env:THERE>/data}/x
        <oc.env:HERE,<oc.env:THERE>/data>/x
        ${oc.env:HERE,${oc.env:THERE}/data}/x

    Of another form, such as ``${NAME%/*}``, only the name is understood: ``${oc.env:NAME}%/*}``.
    """
    replaced = _VARIABLE.sub(_asked_for, text)
    while replaced != text:
        text = replaced
        replaced = _VARIABLE.sub(_asked_for, text)
    text = _OTHER_FORM.sub(r"${oc.env:\1}", text)
    return text.replace(_OPENS, "${").replace(_CLOSES, "}")


def _asked_for(match: re.Match[str]) -> str:
    """Returns what a job writes for a match of ``_VARIABLE``, in ``_OPENS`` and ``_CLOSES``."""
    name = match["braced"] or match["bare"]
    default = match["default"]
    asked = f"oc.env:{name}" if default is None else f"oc.env:{name},{default}"
    return f"{_OPENS}{asked}{_CLOSES}"


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
