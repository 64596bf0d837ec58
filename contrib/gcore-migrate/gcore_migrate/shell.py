"""Reads the settings that a shell script gives to a trainer, without running the script.

Understood are plain assignments, ``$name`` and ``${name}``, ``${name:-default}``, integer
arithmetic in ``$((...))``, lines that go on after a backslash, and lists of words in ``name=(...)``
that a command takes as ``"${name[@]}"``. Anything else is left as it stands: a value that holds an
unknown variable keeps it, and the job then says where.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping

_ASSIGNMENT = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_ARRAY = re.compile(r"^([A-Za-z_]\w*)=\((.*?)\)\s*$", re.DOTALL | re.MULTILINE)
#: The innermost one where a default holds another variable.
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}$]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([^$]*?)\)\)")
_NEGATIVE = re.compile(r"-\.?[0-9]")
_KEPT = "\0"  # stands for a dollar that is not looked at again; no script holds one
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,  # of a shell, whose numbers are whole
}


def words_of(script: str) -> list[str]:
    """Returns the words of all of the script's commands, variables replaced, in order."""
    script = re.sub(r"\\\n", " ", script)
    script = re.sub(r"(?m)(^|\s)#.*$", r"\1", script)
    variables: dict[str, str] = {"HOME": os.path.expanduser("~")}
    arrays = dict(_ARRAY.findall(script))
    words: list[str] = []
    for line in _ARRAY.sub("", script).splitlines():
        assignment = _ASSIGNMENT.match(line.strip())
        if assignment:
            name, value = assignment.groups()
            parts = _split(_replaced(value, variables))
            if len(parts) <= 1:
                variables[name] = parts[0] if parts else ""
                continue
        words += _split(_replaced(_with_arrays(line, arrays), variables))
    return words


def _with_arrays(line: str, arrays: Mapping[str, str]) -> str:
    def body(match: re.Match[str]) -> str:
        return " ".join(arrays.get(match[1], "").split("\n"))

    return re.sub(r"\"?\$\{(\w+)\[@\]\}\"?", body, line)


def _replaced(text: str, variables: Mapping[str, str]) -> str:
    """Returns the text with the variables that are known, and with sums done.

    A variable's own value is taken as it is: what was unknown when it was set stays so, and
    ``PATH=$PATH:/more`` holds itself.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in variables:
            return variables[name].replace("$", _KEPT)
        return match[0] if match[2] is None else match[2]

    before = None
    while before != text:  # a default may hold another variable, and a sum one more sum
        before = text
        text = _ARITHMETIC.sub(lambda match: _sum(match, variables), _VARIABLE.sub(value, text))
    return text.replace(_KEPT, "$")


def _sum(match: re.Match[str], variables: Mapping[str, str]) -> str:
    try:
        return str(_number(ast.parse(match[1].strip(), mode="eval").body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return match[0]


def _number(node: ast.expr, variables: Mapping[str, str]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):  # in arithmetic a variable needs no dollar
        return int(variables.get(node.id, ""))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _number(node.left, variables)
        return _OPERATORS[type(node.op)](left, _number(node.right, variables))
    raise ValueError("no whole number")


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=False)
    except ValueError:  # a quote that is not closed: of a statement that is not understood
        return []


def assignments(words: Iterable[str]) -> dict[str, str]:
    """Returns ``key=value`` of words such as Hydra takes, without their ``+``; the last counts."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("+")
        if equals and "." in key and re.fullmatch(r"[\w.]+", key):
            found.pop(key, None)
            found[key] = value
    return found


def options(words: Iterable[str]) -> dict[str, object]:
    """Returns ``--key value`` of words; one without a value is true, one with several a list."""
    found: dict[str, object] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            found[key] = value if equals else True
            key = "" if equals else key
        elif key and (not word.startswith("-") or _NEGATIVE.match(word)):
            before = found[key]
            if before is True:
                found[key] = word
            elif isinstance(before, list):
                before.append(word)
            else:
                found[key] = [before, word]
    return found
