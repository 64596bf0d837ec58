"""Turns what a Python call gives as rewards into the section ``rewards`` of a job.

The name of a function's first parameter says how it is called:

    def f(record) -> float                          once for each record
    def f(records) -> list[float]                   once for many records
    def f(completions, **columns) -> list[float]    as TRL does, with ``prompts`` and the rows' fields
"""  # noqa: E501

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from gcore.functions import files_of
from gcore.rows import anchored
from gcore_core.contract.errors import ConfigError
from gcore_core.kits.commands import NAME

_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
#: What TRL passes besides, and nobody does here; a function that cannot do without it is refused.
_OF_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric")
#: What such a function takes for the policy's, so that no field of a row may have the name.
_OF_POLICY = ("prompts", "completions", *_OF_TRL)

#: Calls a function that was written for TRL. Its rows are dicts of lists there.
_OF_LISTS = '''

def {name}_of_records(records):
    """Calls {name} with lists of prompts, completions and columns, as TRL does."""
    from gcore_core.contract.errors import DataError

    names = dict.fromkeys(name for r in records for name in r.prompt.fields)
    for taken in {taken!r}:
        if taken in names:
            raise DataError(
                f"a row has a field {{taken!r}}, which {name} would take for the policy's.",
                todo="give the field of the rows another name",
            )
    prompts = [r.prompt.messages if r.prompt.text is None else r.prompt.text for r in records]
    completions = [
        [{{"role": "assistant", "content": r.text}}] if r.prompt.text is None else r.text
        for r in records
    ]
    columns = {{"prompts": prompts, "completions": completions}}
    for field in names:
        columns[field] = [r.prompt.fields.get(field) for r in records]
    return {name}(**{chosen})
'''


def rewards_of(
    reward: Any, where: str = "reward", columns: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns (section ``rewards`` of a job, files beside it: name -> content).

    reward: a function, the name of a provider such as "rewards/numeric", a section of one reward as
        a mapping with ``use``; a list of these; or a mapping of names to these.
    columns: the fields of the rows that it judges, where they are known.
    Raises ConfigError for anything else, and for a function that cannot travel.
    """
    section: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    texts: dict[str, str] = {}  # of functions, which are named when all other files are known
    for name, item in _named(reward, where):
        if name in section:
            raise ConfigError(
                f"two rewards are named {name!r}.",
                where=where,
                todo=f'name them: {{"{name}": ..., "other": ...}}',
            )
        section[name], text, beside = _one(item, where, columns)
        if not NAME.fullmatch(name):  # it names metrics, and a file
            raise ConfigError(
                f"{name!r} cannot name a reward.",
                where=where,
                todo="use letters, digits, '_' and '-', beginning with a letter",
            )
        files |= beside
        if text is not None:
            texts[name] = text
    for name, text in texts.items():
        path = free_name(name, files)
        section[name]["config"] = {"path": path, **section[name]["config"]}
        files[path] = text.encode()
    if not section:
        raise ConfigError("there is no reward.", where=where, todo="give a function")
    return section, files


def _named(reward: Any, where: str) -> Iterable[tuple[str, Any]]:
    if isinstance(reward, Mapping) and "use" not in reward and "function" not in reward:
        return [(str(name), item) for name, item in reward.items()]
    items = reward if isinstance(reward, list | tuple) else [reward]
    return [(_name_of(item, where), item) for item in items]


def _name_of(item: Any, where: str) -> str:
    if isinstance(item, Mapping):
        item = item.get("function") or item["use"]
    if isinstance(item, str):
        return item.rpartition("/")[2].replace("-", "_")
    if callable(item):
        return str(getattr(item, "__name__", type(item).__name__))
    raise ConfigError(
        f"a value of type {type(item).__qualname__} is no reward.",
        where=where,
        todo='give a function, or the name of a provider such as "rewards/numeric"',
    )


def free_name(stem: str, files: Iterable[str]) -> str:
    """Returns the name of a file that no import statement of another file can mean.

    files: those that are beside it.
    """
    taken = {file.partition("/")[0].removesuffix(".py") for file in files}
    while stem in taken or stem in sys.modules or importlib.util.find_spec(stem):
        stem += "_function"
    return f"{stem}.py"


def _one(
    item: Any, where: str, columns: Collection[str]
) -> tuple[dict[str, Any], str | None, dict[str, bytes]]:
    """Returns one reward's section, and the text of its file where it is a function, and the files
    beside that.
    """
    if isinstance(item, str):
        return {"use": item}, None, {}
    rest = dict(item) if isinstance(item, Mapping) else {"function": item}
    function = rest.pop("function", None)
    if function is None:
        return {**rest, "config": anchored(rest.get("config") or {})}, None, {}
    text, beside = files_of(function, where)
    config, more = _function(function, where, columns)
    return {"use": "core/function", **rest, "config": config}, text + more, beside


def _function(
    function: Callable[..., Any], where: str, columns: Collection[str]
) -> tuple[dict[str, Any], str]:
    """Returns the settings of ``core/function`` for a function, and what its file needs beside it.

    Raises ConfigError for a function that is called in none of the three ways.
    """
    plain = inspect.unwrap(function)
    parameters = inspect.signature(plain).parameters
    config: dict[str, Any] = {"name": plain.__name__}
    if "completions" in parameters:
        lacking = [name for name in _OF_TRL if _is_needed(parameters.get(name))]
        if lacking:
            raise ConfigError(
                f"{plain.__name__} needs what TRL alone has: {', '.join(lacking)}.",
                where=where,
                todo="do without it, or give it a default",
            )
        takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
        taken = tuple(name for name in _OF_POLICY if takes_all or name in parameters)
        if both := [name for name in taken if name in columns]:
            raise ConfigError(
                f"rows have a field {both[0]!r}, which {plain.__name__} would take for the "
                "policy's.",
                where=where,
                todo="give the field of the rows another name",
            )
        text = _OF_LISTS.format(name=plain.__name__, chosen=_columns(parameters), taken=taken)
        return {"name": f"{plain.__name__}_of_records", "batch": True}, text
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind in _KEYWORD]
    positional = [
        p for p in parameters.values() if p.kind in _KEYWORD[:1] or p.kind == p.POSITIONAL_ONLY
    ]
    if not positional or len(needed) > 1:
        raise ConfigError(
            f"{plain.__name__}{inspect.signature(plain)} is not called with what it takes.",
            where=where,
            why="a reward takes one record; or `records`; or `completions` and columns, as in TRL",
            todo=f"def {plain.__name__}(record): ...  with record.text, record.prompt.fields",
        )
    if positional[0].name == "records":
        config["batch"] = True
    return config, ""


def _is_needed(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.default is parameter.empty


def _columns(parameters: Mapping[str, inspect.Parameter]) -> str:
    """Returns the text of a mapping: those columns that the function takes, or all."""
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return "columns"
    needed = [p.name for p in parameters.values() if p.default is p.empty]
    optional = [p.name for p in parameters.values() if p.default is not p.empty]
    of_needed = ", ".join(f'"{name}": columns["{name}"]' for name in needed)
    if not optional:
        return f"{{{of_needed}}}"
    return f"{{{of_needed}, **{{n: columns[n] for n in {optional!r} if n in columns}}}}"
