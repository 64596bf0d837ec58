"""Runs inside the confinement: executes the code, then the tests with the code's names.

When both have come to their end it prints a word that is none of the code's names. So code that
merely ends the process early has not passed. Code that looks for the word in this process can find
it: docs/explanation/security.md says so.

Without code it looks at the tests instead, and prints what it finds behind the word; see ``_look``.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, ModuleType
from typing import Any

#: The name of the module that is the code. Tests may import from it.
_SOLUTION = "solution"
#: Tests run as scripts do.
_MAIN = "__main__"

#: Makes the dictionary of a test's names from those before it.
_MakeNames = Callable[[dict[str, Any]], dict[str, Any]]


def main() -> None:
    task = json.load(sys.stdin)
    # Standard output is kept under another number, and the code gets /dev/null in its place.
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    word = task["word"].encode()
    if task["code"] is None:
        for finding in _look(task["tests"]):
            os.write(out, word + json.dumps(finding).encode() + b"\n")
        return
    # What runs after the code is taken before it: the code may put its own in the place.
    space = vars(builtins)
    kept = dict(space)
    run, passed, end_threads = exec, os.write, _end_threads
    errors = _errors_of_threads()
    tests = _compiled(task["tests"])
    names = _solution_of(task["code"])
    space.update(kept)
    _run_tests(tests, task["calls"], names, run)
    end_threads(errors)
    passed(out, word)


def _errors_of_threads() -> list[BaseException]:
    """Returns a list that gets what is raised in threads from here on, which nobody else sees."""
    errors: list[BaseException] = []

    def note(told: threading.ExceptHookArgs) -> None:
        errors.append(told.exc_value or told.exc_type())

    threading.excepthook = note
    return errors


def _end_threads(errors: list[BaseException]) -> None:
    """Waits for all threads but daemons, as Python does at its end. Raises what one has raised."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    if errors:
        raise errors[0]


def _solution_of(code: str) -> dict[str, Any]:
    """Runs the code as a module and returns the names that it defines."""
    module = ModuleType(_SOLUTION)
    module.__file__ = os.path.abspath(f"{_SOLUTION}.py")
    with open(module.__file__, "w", encoding="utf-8", errors="replace") as file:
        file.write(code)  # for code that looks at its own source
    sys.modules[_SOLUTION] = module
    exec(_compile(code, module.__file__), module.__dict__)
    return module.__dict__


def _compiled(tests: list[str]) -> list[CodeType]:
    return [_compile(test, f"tests{number}.py") for number, test in enumerate(tests)]


def _compile(source: str, file: str) -> CodeType:
    return compile(source, file, "exec", dont_inherit=True)  # not this file's __future__


def _run_tests(
    tests: list[CodeType],
    calls: list[list[str]],
    names: dict[str, Any],
    run: Callable[[CodeType, dict[str, Any]], None],
    make_names: _MakeNames = dict,
) -> None:
    """Runs the tests one after the other, each with the names of those before it.

    calls: of each, the names of its functions and classes that are called after it.
    names: of the code.
    run: ``exec``, as it was before the code.
    Raises what a test raises.
    """
    for code, called in zip(tests, calls, strict=True):
        names = _names_for(code, names, make_names)
        _run_test(code, called, names, run)


def _names_for(code: CodeType, names: dict[str, Any], make_names: _MakeNames) -> dict[str, Any]:
    """Returns the names that a test begins with: those of the code, and of the tests before it."""
    names = make_names({k: value for k, value in names.items() if not _is_of_module(k)})
    names.update(__name__=_MAIN, __file__=code.co_filename)
    return names


def _run_test(
    code: CodeType,
    called: list[str],
    names: dict[str, Any],
    run: Callable[[CodeType, dict[str, Any]], None],
) -> None:
    """Runs a test, and what it defines to be called. Raises what it raises."""
    if "unittest" in code.co_names:
        _leave_unittest_to_this()
    try:
        run(code, names)
    except SystemExit as end:
        if end.code or not _is_of(names, end):
            raise
    for name in called:
        _call(names[name])


def _is_of(names: dict[str, Any], error: BaseException) -> bool:
    """Whether a line of the test itself raised an error, and none of the code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals is names


def _is_of_module(name: str) -> bool:
    """Whether a module has a name of itself: such as ``__name__``, or its ``__builtins__``."""
    return name.startswith("__") and name.endswith("__")


def _leave_unittest_to_this() -> None:
    """Has ``unittest.main()`` do nothing: it would end the process, and run no class of the tests.

    Their classes are among the calls.
    """
    import unittest

    unittest.main = lambda *_, **__: None  # type: ignore[assignment]


def _call(test: Any) -> None:
    """Calls a function of the tests, or runs a class of unittest. Raises where it fails."""
    if not isinstance(test, type):
        test()
        return
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(test).run(result)
    if not (result.wasSuccessful() and result.testsRun > len(result.skipped)):
        raise AssertionError(f"{test.__name__} fails")


# -- looking at the tests of a row -----------------------------------------------------------------


def _look(tests: list[str]) -> Iterator[dict[str, Any]]:
    """Yields what a row's tests are: {"calls"}, then {"fault"}.

    calls: of each test, the names of its functions and classes that nothing calls.
    fault: why any program would pass, or none; "" where they are tests.

    Tests may end the process, or be ended, before the second.
    """
    try:
        trees = [ast.parse(test) for test in tests]
        _require_statements(trees)
        compiled = _compiled(tests)
        calls = _uncalled(trees)
    except (SyntaxError, ValueError) as error:
        yield {"fault": f"they are no Python: {error}"}
        return
    except _Unrunnable as error:
        yield {"fault": str(error)}
        return
    yield {"calls": calls}
    sys.modules[_SOLUTION] = ModuleType(_SOLUTION)
    for_nothing = _failures(compiled, calls, dict)
    if not any(for_nothing):
        yield {"fault": f"a program without a line passes them{_seem_to_be(trees)}"}
        return
    for_hollow = []
    for truth in (True, False):
        hollow = _hollow(truth)
        sys.modules[_SOLUTION] = _HollowModule(hollow)
        for_hollow.append(_failures(compiled, calls, partial(_HollowNames, hollow)))
    missing = [
        error
        for failures in for_hollow
        for error in failures
        if isinstance(error, ModuleNotFoundError)
    ]
    if missing:
        yield {"fault": f"no program can pass them: {missing[0]}"}
        return
    fails = [any(failures) for failures in zip(*for_hollow, strict=True)]
    if not any(fails):
        yield {"fault": "they pass whatever the program's functions return"}
        return
    for number, tree in enumerate(trees):
        needs_program = for_nothing[number] is not None
        if not fails[number] and not calls[number] and _prepares(tree, needs_program):
            continue
        if not (fails[number] and needs_program):
            why = (
                "it passes whatever the program's functions return"
                if needs_program
                else "a program without a line passes it"
            )
            yield {"fault": f"test {number + 1} of {len(trees)} is none: {why}"}
            return
    yield {"fault": ""}


def _prepares(tree: ast.Module, needs_program: bool) -> bool:
    """Returns whether a text that nothing fails is no test but what others need.

    Such are imports, definitions, values with a name, and calls such as ``stack.push(1)``. A call
    of a function of Python, as in ``print(double(2) == 4)``, looks at the program and says nothing.
    """
    for number, node in enumerate(tree.body):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if needs_program and isinstance(called, ast.Name) and hasattr(builtins, called.id):
                return False
        elif not isinstance(node, _DEFINITIONS) and not (number == 0 and _is_text(node)):
            return False
    return not (len(tree.body) == 1 and _is_text(tree.body[0]))


_DEFINITIONS = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Pass),
)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _require_statements(trees: list[ast.Module]) -> None:
    """Raises _Unrunnable for a line that looks like a test and never raises, wherever it stands."""
    for number, tree in enumerate(trees):
        for node in _outside_of_guards(tree):
            if isinstance(node, ast.Assert) and _is_always_true(node.test):
                what = "an assert of two things, (...), holds always: leave the brackets out"
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare):
                what = "a value and no statement: write assert before it"
            else:
                continue
            line = ast.unparse(node)
            raise _Unrunnable(f"test {number + 1} has `{line[:60]}`, {what}")


def _outside_of_guards(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields nodes; of a ``with`` or ``try``, which may wait for an error, its asserts alone."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(tree, ast.With | ast.AsyncWith | ast.Try) and isinstance(child, ast.Expr):
            continue
        yield from _outside_of_guards(child)


def _is_always_true(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple | ast.List | ast.Set):
        return bool(value.elts)
    return isinstance(value, ast.GeneratorExp | ast.Lambda)


class _Unrunnable(Exception):
    """A test that nobody calls, and that cannot be called without knowing more."""


def _failures(
    tests: list[CodeType], calls: list[list[str]], make_names: _MakeNames
) -> list[BaseException | None]:
    """Returns what each test raises for a program that has only what ``make_names`` adds."""
    failures: list[BaseException | None] = []
    names: dict[str, Any] = {}
    for code, called in zip(tests, calls, strict=True):
        names = _names_for(code, names, make_names)
        errors = _errors_of_threads()
        try:
            _run_test(code, called, names, exec)
            _end_threads(errors)
        except BaseException as error:  # SystemExit, too, is no end
            failures.append(error)
        else:
            failures.append(None)
    return failures


def _uncalled(trees: list[ast.Module]) -> list[list[str]]:
    """Returns, for each test, the names of what it defines as a test and does not call.

    These are functions ``test...``, and classes of unittest. The latter are always among them: to
    run them in a test raises nothing where they fail.

    Raises _Unrunnable for one that a call without arguments does not run.
    """
    used = {name for tree in trees for name in _names_used(tree)}
    return [list(dict.fromkeys(_uncalled_of(tree, used))) for tree in trees]


def _names_used(tree: ast.Module) -> Iterator[str]:
    """Yields the names that a text uses. A name that is all of a line, or in itself, is no use."""
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Name):
            continue
        own = getattr(node, "name", None)
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and part.id != own:
                yield part.id


def _uncalled_of(tree: ast.Module, used: set[str]) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("test") and node.name not in used:
                _require_plain(node)
                yield node.name
            elif node.name.startswith("check") and node.name not in used:
                raise _Unrunnable(f"nobody calls {node.name}")
        elif isinstance(node, ast.ClassDef) and _has_tests(node):
            if any("Test" in ast.unparse(base) for base in node.bases):
                yield node.name
            elif node.name not in used:
                raise _Unrunnable(f"nobody calls what class {node.name} has; it is no TestCase")


def _has_tests(node: ast.ClassDef) -> bool:
    return any(getattr(part, "name", "").startswith("test") for part in node.body)


def _require_plain(node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Raises _Unrunnable for a function that a call without arguments does not run."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    needed = [argument.arg for argument in positional[: len(positional) - len(given.defaults)]]
    keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    needed += [argument.arg for argument, default in keywords if default is None]
    # Another decorator than those of pytest, which nobody reads here, may give the arguments.
    is_given = any("pytest" not in ast.unparse(one) for one in node.decorator_list)
    if needed and not is_given:
        raise _Unrunnable(f"nobody calls {node.name}, which takes {', '.join(needed)}")
    if isinstance(node, ast.AsyncFunctionDef):
        raise _Unrunnable(f"nobody awaits {node.name}; asyncio.run({node.name}()) does")
    if any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node)):
        raise _Unrunnable(f"{node.name} yields, so that a call of it runs nothing")


def _seem_to_be(trees: list[ast.Module]) -> str:
    """Says what is wrong with tests that nothing fails, where that can be seen."""
    statements = [node for tree in trees for node in tree.body]
    if all(isinstance(node, ast.Expr) and not _calls(node) for node in statements):
        return ": they are values, not statements"
    used = {name for tree in trees for name in _names_used(tree)}
    functions = [
        node.name
        for node in statements
        if isinstance(node, ast.FunctionDef) and node.name not in used
    ]
    if functions:
        return f": nobody calls {', '.join(functions[:3])}"
    return ""


def _calls(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


# -- programs that do nothing ----------------------------------------------------------------------


def _hollow(truth: bool) -> Any:
    """Makes a thing that can be called, has every attribute, and equals nothing but itself.

    truth: whether it counts as true. No test that looks at a value holds for both kinds.
    """

    class Hollow:
        def __bool__(self) -> bool:
            return truth

        def __call__(self, *_: Any, **__: Any) -> Any:
            return Hollow()

        def __getattr__(self, name: str) -> Any:
            if _is_of_module(name):
                raise AttributeError(name)
            return Hollow()

    return Hollow()


class _HollowModule(ModuleType):
    """The module of a program that has every name."""

    def __init__(self, hollow: Any) -> None:
        super().__init__(_SOLUTION)
        self._hollow = hollow

    def __getattr__(self, name: str) -> Any:
        if _is_of_module(name):
            raise AttributeError(name)
        return self._hollow


class _HollowNames(dict[str, Any]):
    """Names of a test, with something hollow for every other name."""

    def __init__(self, hollow: Any, names: dict[str, Any]) -> None:
        super().__init__(names)
        self._hollow = hollow

    def __missing__(self, name: str) -> Any:
        if _is_of_module(name) or hasattr(builtins, name):
            raise KeyError(name)
        return self._hollow


main()
