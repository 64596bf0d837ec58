"""Writes a function of a notebook or a script into a file of its own.

Workers load a user's function from a file (``gcore_core.config.user_functions``). A notebook has no
file that they could import, and to import a script would run it again. So the source of the
function is written out, after all that it needs of its surroundings:

    a module             as an import; one that is not installed comes along, with what it imports
    an importable name   as an import from its module
    a plain value        as a constant: a number, a text, None, a list, dict ... of such, a pattern
    a function           as its source, which is followed in the same way, where no new process
                         could import it

Whatever else it needs is refused by name: a closure's variable, an object of another cell.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import subprocess
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.local_files import files_of_module

#: Annotations are then never evaluated, so that what only they name need not travel.
_FUTURE = "from __future__ import annotations"
_MAIN = "__main__"
_UNDEFINED = object()
#: Ends with 1 where its word is no module.
_FINDS = "import sys, importlib.util as u; sys.exit(u.find_spec(sys.argv[1]) is None)"
#: A module that looks for files beside it stays where it is.
_STAYS = (b"__file__", b"importlib.resources", b"pkgutil")


@dataclass
class _Parts:
    """Collects what a file holds, in order, each part once.

    imports: lines.
    constants: name -> line.
    sources: name of a function -> its text; those that others call come first.
    reached: top-level module, and whether in this directory -> whether a new process finds it.
    beside: name -> content of files of modules that come along.
    lacking: name -> why it cannot travel.
    meant: name -> what it stands for in every function of the file.
    """

    imports: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    reached: dict[tuple[str, bool], bool] = field(default_factory=dict)
    beside: dict[str, bytes] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)
    meant: dict[str, Any] = field(default_factory=dict)


def files_of(function: Callable[..., Any], where: str) -> tuple[str, dict[str, bytes]]:
    """Returns the text of a Python file that defines the function under its own name, and the files
    beside it that it needs: name -> content.

    where: what errors name, such as "reward".
    Raises ConfigError, naming each, for names that cannot travel, and for what is no function with
    a source.
    """
    plain = _plain_function(function, where)
    parts = _Parts(meant={plain.__name__: plain})
    if _is_importable(plain) and _is_reached(plain.__module__, parts):
        _import_from(plain.__name__, plain, parts)
    else:
        _follow(plain, parts, where)
    if parts.lacking:
        names = "\n".join(f"{name}: {reason}" for name, reason in parts.lacking.items())
        raise ConfigError(
            f"{plain.__name__} needs what does not travel with it: {', '.join(parts.lacking)}.",
            where=where,
            why=names,
            todo="write plain values, functions and imports of installed modules, or files beside",
            names=list(parts.lacking),
        )
    blocks = [_FUTURE, *_block(parts.imports), *_block(parts.constants), *parts.sources.values()]
    return "\n\n".join(blocks) + "\n", parts.beside


def _block(lines: dict[str, str]) -> list[str]:
    return ["\n".join(lines.values())] if lines else []


def _plain_function(function: Callable[..., Any], where: str) -> FunctionType:
    """Returns the function below its decorators. Raises ConfigError for what is none."""
    plain = inspect.unwrap(function)
    if isinstance(plain, FunctionType) and plain.__name__ != "<lambda>":
        return plain
    kind = (
        "a lambda"
        if isinstance(plain, FunctionType)
        else f"a value of type {type(function).__name__}"
    )
    raise ConfigError(
        f"{kind} has no source that can travel to another process.",
        where=where,
        todo="write a function with `def` and give that",
    )


def _is_importable(value: Any) -> bool:
    """Says whether another process gets the same by an import: not what a notebook defines."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__name__", "")
    if module is None or module.__name__ == _MAIN:
        return False
    return getattr(module, name, None) is value


def _follow(function: FunctionType, parts: _Parts, where: str) -> None:
    """Adds a function's source, and before it what the source needs."""
    source = _source_of(function, where)
    name = function.__name__
    parts.sources[name] = ""  # known from here on, so that functions may call each other
    for captured in function.__code__.co_freevars:
        if captured != "__class__":
            parts.lacking[captured] = f"a variable of the function around {name}"
    for needed in _names_in(source):
        if needed not in function.__code__.co_freevars:
            _add(needed, function, parts, where)
    del parts.sources[name]
    parts.sources[name] = source  # after what it needed


def _add(name: str, function: FunctionType, parts: _Parts, where: str) -> None:
    """Adds what a name of a function's source stands for."""
    is_global = name in function.__globals__
    value = function.__globals__[name] if is_global else getattr(builtins, name, _UNDEFINED)
    if name in parts.meant:
        if not _is_same(parts.meant[name], value):
            parts.lacking[name] = "functions of several modules mean different things by it"
        return
    parts.meant[name] = value
    if not is_global:
        if value is _UNDEFINED:
            parts.lacking[name] = "nothing of this name is defined"
    elif isinstance(value, ModuleType):
        _import_module(name, value, parts)
    elif _is_importable(value) and _is_reached(value.__module__, parts):
        _import_from(name, value, parts)
    elif isinstance(_inner(value), FunctionType):
        _add_function(name, value, parts, where)
    elif (text := literal(value)) is not None:
        parts.constants[name] = f"{name} = {text}"
        if isinstance(value, re.Pattern):
            parts.imports["re"] = "import re"
    else:
        parts.lacking[name] = f"a value of this session, of type {type(value).__qualname__}"


def _is_same(one: Any, other: Any) -> bool:
    """Says whether two values are one, or plain ones that are written alike."""
    if _inner(one) is _inner(other):
        return True
    text = literal(one)
    return text is not None and text == literal(other)


def _inner(value: Any) -> Any:
    """Returns what is below decorators."""
    return inspect.unwrap(value) if callable(value) else value


def _import_module(name: str, module: ModuleType, parts: _Parts) -> None:
    if not _is_reached(module.__name__, parts):
        place = getattr(module, "__file__", None)
        parts.lacking[name] = f"a new process does not find the module {module.__name__} ({place})"
        return
    same = module.__name__ == name
    parts.imports[name] = f"import {module.__name__}" + ("" if same else f" as {name}")


def _import_from(name: str, value: Any, parts: _Parts) -> None:
    same = value.__name__ == name
    line = f"from {value.__module__} import {value.__name__}"
    parts.imports[name] = line if same else f"{line} as {name}"


def _is_reached(module: str, parts: _Parts) -> bool:
    """Says whether a new process can import a module: it is installed, or its files come along.

    One that stays where it is, and is found in this directory alone, is found from there only.
    """
    top = module.partition(".")[0]
    if _is_installed(top, parts):
        return True
    files = _own_files(module, parts)
    parts.beside |= files
    return bool(files) or _is_found(top, parts, here=True)


def _is_installed(top: str, parts: _Parts) -> bool:
    return top in sys.stdlib_module_names or _is_found(top, parts, here=False)


def _is_found(top: str, parts: _Parts, *, here: bool) -> bool:
    """Says whether a new process finds a top-level module. To find out costs a start of Python.

    here: whether it also looks in this directory.
    """
    if (top, here) not in parts.reached:
        words = [sys.executable, *([] if here else ["-P"]), "-c", _FINDS, top]
        parts.reached[top, here] = subprocess.run(words, check=False).returncode == 0
    return parts.reached[top, here]


def _own_files(module: str, parts: _Parts) -> dict[str, bytes]:
    """Returns the files of a module, and of those that it imports from its folder.

    They are none where one of them is no Python, or looks for further files beside it.
    """
    place = getattr(sys.modules.get(module), "__file__", None) or ""
    file = Path(place).resolve()
    is_package = file.stem == "__init__"
    if file.suffix != ".py" or module.count(".") + is_package >= len(file.parents):
        return {}
    folder = file.parents[module.count(".") + is_package]
    paths = files_of_module(module, folder, partial(_is_installed, parts=parts))
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    stays = any(word in content for content in files.values() for word in _STAYS)
    are_python = all(name.endswith(".py") for name in files)
    return files if are_python and not stays else {}


def _add_function(name: str, value: Any, parts: _Parts, where: str) -> None:
    inner = inspect.unwrap(value)
    if inner.__name__ != name:  # such as a lambda, or another name for a function
        parts.lacking[name] = f"a function whose own name is {inner.__name__}"
        return
    _follow(inner, parts, where)


def literal(value: Any) -> str | None:
    """Returns Python text that gives an equal value, or None where there is none."""
    if isinstance(value, re.Pattern):
        inner = literal(value.pattern)
        return f"re.compile({inner}, {int(value.flags)})"
    text = repr(value)
    try:
        same = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    is_same = type(same) is type(value) and same == value
    return text if is_same else None


def _source_of(function: FunctionType, where: str) -> str:
    try:
        return _at_margin(inspect.getsource(function).rstrip())
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"the source of {function.__name__} is not known here.",
            where=where,
            why="it was typed at a prompt of plain Python, or made by exec",
            todo="write it into a file or a notebook",
        ) from error


def _at_margin(source: str) -> str:
    """Returns an indented source as it stands at the margin, or below ``if True:``.

    The latter where the move would change a text in quotes, whose lines may begin anywhere.
    """
    if not source[:1].isspace():
        return source
    moved = textwrap.dedent(source)
    kept = f"if True:\n{source}"
    (block,) = ast.parse(kept).body
    assert isinstance(block, ast.If)
    try:
        is_same = [*map(ast.dump, ast.parse(moved).body)] == [*map(ast.dump, block.body)]
    except SyntaxError:  # a line in quotes has less of a margin than the function
        is_same = False
    return moved if is_same else kept


def _names_in(source: str) -> list[str]:
    """Returns the names that a function's source takes from its surroundings, in order.

    These are the names of its body that no part of it binds, and those of its decorators and
    defaults. What only annotations name is none of them.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    table = symtable.symtable(ast.unparse(tree), "function", "exec")
    return list(dict.fromkeys(_free_names(table)))


def _free_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yields the names that a scope, and the scopes within it, take from their surroundings.

    In the module, which holds the function alone, these are names that nothing assigns: those of
    decorators and defaults. In a function they are its globals, and names of ``builtins``.
    """
    is_module = table.get_type() == "module"
    for symbol in table.get_symbols():
        is_outer = not symbol.is_assigned() if is_module else symbol.is_global()
        if is_outer and symbol.is_referenced():
            yield symbol.get_name()
    for child in table.get_children():
        yield from _free_names(child)
