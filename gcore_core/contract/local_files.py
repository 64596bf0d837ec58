"""Imports Python files of users, each with the files next to it.

A file finds what lies in its folder as it does when ``python FILE`` runs it:

    from helpers import score        helpers.py, or the package helpers, in the file's folder
    from .helpers import score       the same

What lies next to a file comes before what is installed, for the files of this folder alone.
``sys.path`` stays as it is, so no other code takes a user's ``utils`` for its own, and two folders
may each have a module ``helpers``. Python has one module of a name; so a folder is a package here,
below this module, with the folder's path in its name:

    /jobs/sums/rewards.py            gcore_core.contract.local_files._2fjobs_2fsums.rewards

Every process in which G-Core is installed can import it by that name: a pool that starts processes
again finds a user's function by it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, unquote

from gcore_core.contract.installing import install_command, is_offered

#: Makes this module a package, whose parts ``_Finder`` finds.
__path__: list[str] = []
_PREFIX = f"{__name__}."
#: Package of this project -> its distribution, where that has another name.
_HOMES = {"gcore": "gcore-tools"}


def import_file(path: Path) -> ModuleType:
    """Imports a file of a user once in this process.

    Raises FileNotFoundError where there is none, ImportError for one that is not named as Python
    files are, and what the file raises.
    """
    path = path.resolve()
    if path.suffix != ".py":
        raise ImportError(f"{path} is not a Python file")
    path.stat()
    return importlib.import_module(module_name(path))


def module_name(path: Path) -> str:
    """Returns the name by which any process imports a file; ``path`` has no links in it."""
    folder = f"{_PREFIX}{_encoded(path.parent)}"
    plain = f"{folder}.{path.stem}"
    spec = None if "." in path.stem else _found(path.stem, [str(path.parent)])
    if spec is not None and spec.origin == str(path):
        return plain
    # A dot in the name would be that of a package, and rewards/ comes before rewards.py.
    return f"{folder}.{quote(path.name, safe='').replace('.', '%2E')}"


def is_local(module: str) -> bool:
    """Whether a module is a file of a user that was imported here."""
    return module.startswith(_PREFIX)


def files_beside(file: Path) -> list[Path]:
    """Returns the files next to one of Python that it imports, and that these import in turn.

    Nothing is imported: files are parsed. An import by a name that is made as they run is not seen.
    """
    file = file.resolve() if file.is_symlink() else file
    folder = file.parent
    return _with_imports([file], folder, lambda name: _beside(name, str(folder)) is None)[1:]


def files_of_module(
    name: str,
    folder: Path,
    is_installed: Callable[[str], bool],
) -> list[Path]:
    """Returns the files of a module in a folder, and those there that it imports in turn.

    is_installed: whether a name, without dots, means what is installed, also where such a file is
        in the folder.
    """
    return _with_imports(list(_files(name.split("."), folder)), folder, is_installed)


def advice(file: Path, error: BaseException) -> str:
    """Returns what to do where a file of a user does not import; "": nothing is known."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        if top != error.name:
            return ""
        if _found(top, [str(file.resolve().parent)]):
            return f"{top} lies next to it: write `import {top}` or `from {top} import ...`"
        if is_offered(home := _HOMES.get(top) or top.replace("_", "-")):
            return f"it comes with {home}: {install_command(home)}"
        return f"put {top}.py next to {file.name}, or install it for {sys.executable}"
    if isinstance(error, ImportError) and "beyond top-level package" in str(error):
        return f"a file imports what lies in its folder and below: that is {file.resolve().parent}"
    return ""


# -- what lies next to a file ----------------------------------------------------------------------


def _found(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Returns what Python would import by a name, without dots, out of some folders."""
    return PathFinder.find_spec(name, list(folders))


def _beside(name: str, folder: str, file: str = "") -> ModuleSpec | None:
    """Returns what lies in a folder and is meant by a name there; None: it means something else.

    As for ``python FILE``: a folder without ``__init__.py`` comes after all that is installed. So
    does the file itself, which has no reason to import itself. What lies here and is installed, as
    a project in development is, is one module.
    """
    if name in sys.builtin_module_names or name.startswith("__"):
        return None
    spec = _found(name, [folder])
    if spec is None:
        return None
    installed = _installed(name)
    if installed is not None and spec.origin in (None, file, installed.origin):
        return None
    return spec


def _installed(name: str) -> ModuleSpec | None:
    """Returns what a name means to other code. Where the process was started is no place of it."""
    path = sys.path[1:] if sys.path[:1] in ([""], [os.getcwd()]) else sys.path
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path if finder is PathFinder else None)
        if spec is not None:
            return spec
    return None


def _with_imports(
    files: list[Path], folder: Path, is_elsewhere: Callable[[str], bool]
) -> list[Path]:
    """Adds to files those in a folder that they import, unless their first name is elsewhere."""
    for file in files:  # grows meanwhile
        if file.suffix == ".py" and file.is_file():
            imported = _imports(file, folder, is_elsewhere)
            files += dict.fromkeys(one for one in imported if one not in files)
    return files


def _imports(
    file: Path,
    folder: Path,
    is_elsewhere: Callable[[str], bool],
) -> Iterator[Path]:
    """Yields the files that a file's import statements mean, of those in a folder and below."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # its import says so
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name.split("."), folder, is_elsewhere)
        elif isinstance(node, ast.ImportFrom):
            words = node.module.split(".") if node.module else []
            for alias in node.names:
                if node.level == 0:
                    yield from _files_of([*words, alias.name], folder, is_elsewhere)
                elif node.level <= len(file.relative_to(folder).parts):
                    yield from _files([*words, alias.name], file.parents[node.level - 1])


def _files_of(
    words: list[str], folder: Path, is_elsewhere: Callable[[str], bool]
) -> Iterator[Path]:
    """Yields the files in a folder that an absolute import means, where it means any of them."""
    files = list(_files(words, folder))
    if files and not is_elsewhere(words[0]):
        yield from files


def _files(words: list[str], folder: Path) -> Iterator[Path]:
    """Yields the files of packages and modules on the way to ``a.b.c``, as far as there are any."""
    folders: Sequence[str] = [str(folder)]
    for word in words:
        spec = _found(word, folders)
        if spec is None:
            return
        if spec.origin is not None:
            yield Path(spec.origin)
        folders = spec.submodule_search_locations or []


# -- importing -------------------------------------------------------------------------------------


class _Finder(MetaPathFinder):
    """Finds folders of users and what lies in them, by the names of this module's parts."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX):
            return None
        folder, _, name = fullname.removeprefix(_PREFIX).partition(".")
        if not name and _decoded(folder).startswith("/"):
            package = ModuleSpec(fullname, None, is_package=True)
            package.submodule_search_locations = [_decoded(folder)]
            return package
        if "%" in name:
            spec = importlib.util.spec_from_file_location(
                fullname, os.path.join(_decoded(folder), unquote(name))
            )
        else:
            spec = PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Loads a file so that its import statements see what lies next to it."""

    def exec_module(self, module: ModuleType) -> None:
        folder = module.__name__.removeprefix(_PREFIX).partition(".")[0]
        own_import = partial(_import, folder, self.path)
        # CPython takes the built-in functions of a module's code, __import__ among them, from here.
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": own_import}
        super().exec_module(module)


def _import(
    folder: str,
    file: str,
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """Does what an import statement of a user's file says.

    folder: the name of its package, below this module.
    file: its path.
    """
    package = f"{_PREFIX}{folder}"
    if level == 0:
        top = name.partition(".")[0]
        known = sys.modules.get(f"{package}.{top}")
        is_known = known is not None and getattr(known, "__file__", None) != file
        if is_known or _beside(top, _decoded(folder), file):
            globals, level = {"__package__": package}, 1
    inner = str((globals or {}).get("__package__")).removeprefix(package)
    if level > 1 + inner.count("."):
        raise ImportError("attempted relative import beyond top-level package")
    try:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith(f"{package}."):
            plain = error.name.removeprefix(f"{package}.")
            raise ModuleNotFoundError(f"No module named {plain!r}", name=plain) from None
        raise


def _encoded(folder: Path) -> str:
    """Returns a folder's path as a name of Python that tells it."""
    return re.sub(
        rb"[^0-9A-Za-z]", lambda byte: b"_%02x" % byte[0][0], os.fsencode(folder)
    ).decode()


def _decoded(name: str) -> str:
    """Returns the folder's path that a name tells."""
    return os.fsdecode(
        re.sub(rb"_([0-9a-f]{2})", lambda code: bytes.fromhex(code[1].decode()), name.encode())
    )


sys.meta_path.insert(0, _Finder())
