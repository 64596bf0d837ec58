"""Finds words of the contract that nothing calls.

A word is a kind of provider, a method or attribute of a protocol, or a field of what the two sides
pass to each other. It is called when its name is used outside ``contract/``: as an
attribute, as a keyword of a call that makes or copies an object, or, for a kind, as a text. A field
that its own class's methods read is called, too. Names are compared, not types, so a word that
shares its name with something else is taken to be called.

A public class, function or constant of the contract is a word, too. It is called when the core, a
plugin, contrib or a template of ``g-core new`` names it, be it in the contract itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTRACT = ROOT / "gcore_core/contract"

#: What backends call or read, not the core: objectives, advantages per action, what one backend
#: tells another in a push, what an engine notes of a sample that goes on through pushes, what an
#: environment asks and knows of its generator, and what the core gives to what joins machines. Who
#: does it stands in plugins/.
CALLED_BY_BACKENDS = {
    "ActionAdvantage",
    "ActionScalars",
    "AdapterFacts",
    "JobFiles",
    "NodeStore",
    "Objective",
    "SampleRequest",
    "SampledBy",
    "TakesTokens",
}

#: Words that nothing calls yet, on purpose; their docstring says "provisional".
PROVISIONAL = set[str]()


@dataclass(frozen=True)
class Word:
    """``Generator.step``, or a kind without an owner."""

    owner: str
    name: str
    module: str
    doc: str = ""

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


def words() -> list[Word]:
    """Every word of the contract."""
    found = [Word("", kind, "providers") for kind in _kinds()]
    for path in sorted(CONTRACT.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and _passes(node):
                found += _members(node, path.stem)
    return found


def top_words() -> set[str]:
    """Every public class, function and constant of the contract."""
    found: set[str] = set()
    for path in CONTRACT.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found.update(map(ast.unparse, node.targets))
            elif isinstance(node, ast.AnnAssign):
                found.add(ast.unparse(node.target))
    return {name for name in found if not name.startswith("_")}


def never_called() -> list[str]:
    """Words that nothing calls, without the provisional ones."""
    by_core = _names(tuple(_core()))
    by_backends = _names(tuple(_plugins()))
    return sorted(top_words() - _named()) + sorted(
        str(word)
        for word in words()
        if str(word) not in PROVISIONAL
        and word.name not in by_core
        and not (word.owner in CALLED_BY_BACKENDS and word.name in by_backends)
        and not (_is_read_by_plugins(word) and word.name in by_backends)
    )


def _kinds() -> list[str]:
    tree = ast.parse((CONTRACT / "providers.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "KINDS":
            assert isinstance(node.value, ast.Dict)
            return [str(ast.literal_eval(key)) for key in node.value.keys if key is not None]
    raise AssertionError("providers.py has no KINDS")


def _passes(node: ast.ClassDef) -> bool:
    """Whether a class is a protocol, or data that the two sides pass to each other."""
    bases = " ".join(ast.unparse(base) for base in node.bases)
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return not node.name.startswith("_") and (
        "Protocol" in bases or "Struct" in bases or "dataclass" in decorators
    )


def _members(owner: ast.ClassDef, module: str) -> Iterator[Word]:
    read = {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    for node in owner.body:
        doc = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
            doc = ast.get_docstring(node) or ""
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            if name in read:
                continue
        else:
            continue
        if not name.startswith("_"):
            yield Word(owner.name, name, module, doc or ast.get_docstring(owner) or "")


def _is_read_by_plugins(word: Word) -> bool:
    """Words that the core hands on whole and a plugin reads: settings, journals, measurements,
    what a machine has.

    Of step_check, what gcore-sentinel asks of workers: the core answers, and itself asks nothing.
    """
    read = (
        "engine_profiles",
        "job_settings",
        "measurements",
        "memory",
        "providers",
        "rows",
        "run_files",
        "step_check",
        "traits",
    )
    return word.module in read or word.owner == "NodeFacts"


def _core() -> list[Path]:
    core = ROOT / "gcore_core"
    outside = [path for path in core.rglob("*.py") if path.relative_to(core).parts[0] != "contract"]
    return [*outside, CONTRACT / "run_files.py"]  # by whose functions tools read a run


def _plugins() -> list[Path]:
    return [*(ROOT / "plugins").glob("*/gcore*/**/*.py")]


def _contrib() -> list[Path]:
    return [*(ROOT / "contrib").glob("*/gcore_*/**/*.py")]


@cache
def _named() -> set[str]:
    """Every name that code reads or imports, every text, and every word of the templates."""
    found: set[str] = set()
    for path in [*(ROOT / "gcore_core").rglob("*.py"), *_plugins(), *_contrib()]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.alias):
                found.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    for path in (ROOT / "plugins").glob("*/gcore_*/**/*.tmpl"):
        found.update(re.findall(r"\w+", path.read_text()))
    return found


@cache
def _names(paths: tuple[Path, ...]) -> set[str]:
    """Every attribute, keyword and text of the modules."""
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and _makes(node):
                found.update(word.arg for word in node.keywords if word.arg is not None)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def _makes(call: ast.Call) -> bool:
    """Whether a call makes an object of a class, or copies one with changes."""
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
    return name[:1].isupper() or name in ("replace", "partial")


if __name__ == "__main__":
    print("\n".join(never_called()) or "every word of the contract is called")
