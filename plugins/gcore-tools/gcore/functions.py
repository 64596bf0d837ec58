"""Writes a function of a notebook or a script into a file of its own.

Workers load a user's function from a file (``gcore_core.config.user_functions``). A notebook has no
file that they could import, and to import a script would run it again. So the source of the
function is written out, after all that it needs of its surroundings:

    a module             as an import; one that is not installed comes along, with what it imports
    an importable name   as an import from its module
    a plain value        as a constant: a number, a text, None, a list, dict ... of such, a pattern
    a function           as its source, which is followed in the same way, where no new process
                         could import it

Whatever else it needs is refused by name: a closure's variable, an object of another cell. So is a
function that its source would not give again: one whose file was edited since, that was wrapped by
a call, or whose decorator is another one by now. Its defaults travel as the values that they have.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
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
from types import CodeType, FunctionType, ModuleType
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
        if parts.beside:
            _require_as_defined(_source_of(plain, where), plain, where)
        _import_from(plain.__name__, plain, parts)
    else:
        _follow(plain, function, parts, where)
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
    if not all(map(str.isidentifier, module.__name__.split("."))):
        return False  # as of a file in a folder with a dash: no import statement can name it
    return getattr(module, name, None) is value


def _follow(function: FunctionType, wrapped: Any, parts: _Parts, where: str) -> None:
    """Adds a function's source, and before it what the source needs.

    wrapped: the function with its decorators.
    """
    source = _source_of(function, where)
    _require_as_defined(source, function, where)
    _require_decorators(source, function, wrapped, where)
    name = function.__name__
    parts.sources[name] = ""  # known from here on, so that functions may call each other
    for captured in function.__code__.co_freevars:
        if captured != "__class__":
            parts.lacking[captured] = f"a variable of the function around {name}"
    source = _with_defaults(source, function, parts, where)
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
    _follow(inner, value, parts, where)


# -- whether the source is what was defined --------------------------------------------------------


def _changed(function: FunctionType, why: str, where: str, todo: str) -> ConfigError:
    return ConfigError(
        f"the source of {function.__name__} does not give the function that this session has.",
        where=where,
        why=why,
        todo=todo,
    )


def _require_as_defined(source: str, function: FunctionType, where: str) -> None:
    """Raises ConfigError where a source is not what the function was made of.

    A file may have been edited since, or the function been given other code. Of modules that an
    import hook rewrites, such as pytest's, this is not known.
    """
    loader = getattr(sys.modules.get(function.__module__), "__loader__", None)
    is_rewritten = loader is not None and not type(loader).__module__.lstrip("_").startswith(
        ("importlib", "frozen_importlib")
    )
    if is_rewritten or function.__code__.co_freevars:
        return
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    made = compile(source, "<source>", "exec", flags, dont_inherit=True)
    meant = _what_code_does(function.__code__)
    is_other = _definition(source).name != function.__name__
    if is_other or all(_what_code_does(code) != meant for code in _codes_in(made)):
        file = function.__code__.co_filename
        raise _changed(
            function,
            f"{file} was edited after it was defined, or it was given other code",
            where,
            "run again the cell or the script that defines it",
        )


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of all functions and classes in one."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _codes_in(const)


#: Instructions of calls, which differ with what else a file imports.
_OF_CALLS = ("PUSH_NULL", "PRECALL", "CACHE", "NOP")
_LOADS = {"LOAD_METHOD": "LOAD_ATTR"}


def _what_code_does(code: CodeType) -> tuple[Any, ...]:
    """Returns what two codes of the same source have in common, wherever the source stands."""
    consts = [
        _what_code_does(const) if isinstance(const, CodeType) else (type(const), repr(const))
        for const in code.co_consts
    ]
    steps = [
        (_LOADS.get(step.opname, step.opname), step.argval if isinstance(step.argval, str) else "")
        for step in dis.get_instructions(code)
        if step.opname not in _OF_CALLS
    ]
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    return (*arguments, code.co_name, code.co_varnames, consts, steps)


def _definition(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Returns the function that a source defines, which may stand below ``if True:``."""
    tree = ast.parse(source)
    return next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def _require_decorators(source: str, function: FunctionType, wrapped: Any, where: str) -> None:
    """Raises ConfigError where the lines above a function do not give what is around it."""
    node = _definition(source)
    layers = []
    while wrapped is not function and hasattr(wrapped, "__wrapped__"):
        layers.append(wrapped)
        wrapped = wrapped.__wrapped__
    if len(layers) > len(node.decorator_list):
        raise _changed(
            function,
            "something was put around it by a call, which its source does not have",
            where,
            f"write it as a decorator, @..., above def {function.__name__}",
        )
    codes = {code for code in map(_code_of, layers) if code is not None}
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        value = _looked_up(target, function)
        if isinstance(value, FunctionType) and not _is_importable(value):
            codes -= set(_codes_in(value.__code__))
        elif value is not _UNDEFINED:
            codes.clear()  # of a module, which is not followed here
        if isinstance(decorator, ast.Call) and (changing := _values_in(decorator, function)):
            raise _changed(
                function,
                f"its decorator reads {', '.join(changing)}, which may have changed since",
                where,
                "write the value itself into the brackets of the decorator",
            )
    if codes:
        raise _changed(
            function,
            "its decorator was defined again after it",
            where,
            f"run again the cell that defines {function.__name__}",
        )
    used = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    if given := sorted(used & (vars(function).keys() - {"__wrapped__"})):
        raise _changed(
            function,
            f"it was given attributes that it reads: {', '.join(given)}",
            where,
            "keep the value in a variable of its own",
        )


def _code_of(value: Any) -> CodeType | None:
    return value.__code__ if isinstance(value, FunctionType) else None


def _looked_up(node: ast.expr, function: FunctionType) -> Any:
    """Returns what a name, or a name of a module, stands for in a function's surroundings."""
    if isinstance(node, ast.Name):
        return function.__globals__.get(node.id, getattr(builtins, node.id, _UNDEFINED))
    if isinstance(node, ast.Attribute):
        return getattr(_looked_up(node.value, function), node.attr, _UNDEFINED)
    return _UNDEFINED


def _values_in(call: ast.Call, function: FunctionType) -> list[str]:
    """Returns the names of plain values among the arguments of a decorator."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    names = [part.id for one in arguments for part in ast.walk(one) if isinstance(part, ast.Name)]
    return [name for name in names if literal(function.__globals__.get(name, Ellipsis)) is not None]


def _with_defaults(source: str, function: FunctionType, parts: _Parts, where: str) -> str:
    """Returns a source with the defaults that a function has, as values.

    An expression would be evaluated again, in which a name may mean another value by now. It stays
    where its value cannot be written, and is the same now. Raises ConfigError where it is not.
    """
    given = _definition(source).args
    plain = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    values = list(function.__defaults__ or ())
    keywords = dict(function.__kwdefaults__ or {})
    asked = [
        (argument.arg, node)
        for argument, node in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if node is not None
    ]
    if len(values) != len(given.defaults) or keywords.keys() != dict(asked).keys():
        raise _changed(
            function, "its defaults were set after it was defined", where, "write them into its def"
        )
    names = plain[len(plain) - len(values) :]
    pairs = [*zip(names, given.defaults, values, strict=True)]
    pairs += [(name, node, keywords[name]) for name, node in asked]
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    written = b"".join(lines)
    in_reverse = sorted(pairs, key=lambda pair: (pair[1].lineno, pair[1].col_offset), reverse=True)
    for name, node, value in in_reverse:
        text = _default_text(node, value)
        if text is not None:
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            written = written[:start] + text.encode() + written[end:]
            if isinstance(value, re.Pattern):
                parts.imports["re"] = "import re"
        elif not _is_value_of(node, value, function):
            raise _changed(
                function,
                f"the default of {name} is a value of type {type(value).__qualname__} that its "
                "expression does not give again",
                where,
                "let the default be None, and make the value in the function",
            )
    return written.decode()


def _default_text(node: ast.expr, value: Any) -> str | None:
    """Returns what to write for a default; None where its expression may stay, or must be tried."""
    text = literal(value)
    return None if text is None or text == ast.unparse(node) else text


def _is_value_of(node: ast.expr, value: Any, function: FunctionType) -> bool:
    """Returns whether an expression gives a value again."""
    if literal(value) is not None or isinstance(node, ast.Lambda):
        return True
    return _looked_up(node, function) is value


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
