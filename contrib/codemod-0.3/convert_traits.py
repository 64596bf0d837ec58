"""Rewrites config classes and descriptions of G-Core 0.2 to ``traits()`` of 0.3.

    python convert_traits.py PATH ...

Give it all files of a plugin at once: a description lies in one and its config class in another. It
changes Python files in place, and prints the names of those that it has changed, then FILE:LINE:
what to do, for what is left to do by hand. Run a formatter afterwards.

    capabilities, asks, overlaps  a field of Traits that the description's config class returns,
                                  where they are written out and the class has them everywhere
    methods such as requires()    a field; one of several statements stays as a private method
    required_by(config) and such  traits_of(config).requires
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout that this file lies in

from gcore_core.contract.traits import FORMER_METHODS, FORMER_WORDS  # noqa: E402

ABILITIES = "gcore_core.contract.abilities"
TRAITS = "gcore_core.contract.traits"
FLAGS = ("asks", "overlaps")
#: Function of 0.2 that asked a config -> the field that says it now.
ASKED = {
    **{name: trait for name, trait in FORMER_METHODS.items() if name == trait},
    "required_by": "requires",
    "rewards_read_by": "reads_rewards",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """Holds one file, what is to be changed in it, and what is left to do by hand.

    edits: (first byte, last byte, what is written there).
    imports: lines that the file needs.
    """

    path: Path
    source: bytes
    tree: ast.Module
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)

    def at(self, line: int, column: int) -> int:
        """Returns the place of a line and a column in the source."""
        lines = self.source.splitlines(keepends=True)
        return sum(len(text) for text in lines[: line - 1]) + column

    def begin(self, node: ast.expr | ast.stmt) -> int:
        return self.at(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self.at(node.end_lineno or 0, node.end_col_offset or 0)

    def text(self, node: ast.expr) -> str:
        return self.source[self.begin(node) : self.end(node)].decode()

    def leave(self, node: ast.AST, todo: str) -> None:
        self.left.append(f"{self.path}:{getattr(node, 'lineno', 1)}: {todo}")

    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    def written(self) -> str:
        """Returns the changed source."""
        source = self.source
        for first, last, text in sorted(self.edits, reverse=True):
            source = source[:first] + text.encode() + source[last:]
        missing = [line for line in sorted(self.imports) if line.encode() not in source]
        if not missing:
            return source.decode()
        lines = source.decode().splitlines(keepends=True)
        tops = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
        after = (tops[-1].end_lineno or 0) if tops else 0
        return "".join([*lines[:after], *(f"{line}\n" for line in missing), *lines[after:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    modules = [opened(file) for path in parser.parse_args().paths for file in files(path)]
    convert(modules)
    for module in modules:
        text = module.written()
        if text.encode() != module.source:
            module.path.write_text(text, encoding="utf-8")
            print(module.path)
    for module in modules:
        print("\n".join(module.left), end="\n" if module.left else "")
    return 0


def files(path: Path) -> Iterator[Path]:
    """Yields a file, or the Python files below a folder."""
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*.py")):
        if not any(part.startswith(".") for part in file.relative_to(path).parts):
            yield file


def opened(path: Path) -> Module:
    source = path.read_bytes()
    return Module(path, source, ast.parse(source))


def convert(modules: list[Module]) -> None:
    """Fills in what is to be changed."""
    claims = claimed_by_class(modules)
    nodes = {name: node for module in modules for name, node in module.classes().items()}
    names = set(nodes)
    having = {
        name
        for name, node in nodes.items()
        if name in claims or any(is_former(method) for method in functions(node))
    }
    while more := {name for name in names - having if having & bases_of(nodes[name])}:
        having |= more
    for module in modules:
        for name, node in module.classes().items():
            convert_class(module, node, claims.get(name, {}), names, having)
        convert_asking(module)
        leave_contracts(module)


# -- descriptions ----------------------------------------------------------------------------------


def claimed_by_class(modules: list[Module]) -> dict[str, dict[str, str]]:
    """Returns config class -> its fields, as they are written, and takes them from descriptions."""
    known = {name for module in modules for name in module.classes()}
    taken: dict[str, dict[str, str]] = {}
    for name, uses in described(modules).items():
        is_same = all(claims == uses[0][2] for _, _, claims in uses)
        for module, node, claims in uses:
            if claims and is_same and name in known:
                taken[name] = claims
                drop_keywords(module, node)
            elif claims:
                why = "has several descriptions" if name in known else "is in no file given"
                module.leave(
                    node, f"{name} {why}: return {call_of(claims)} from a class of its own"
                )
    return taken


def described(modules: list[Module]) -> dict[str, list[tuple[Module, ast.Call, dict[str, str]]]]:
    """Returns config class -> the descriptions that name it, and what each claims."""
    uses: dict[str, list[tuple[Module, ast.Call, dict[str, str]]]] = {}
    for module in modules:
        calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
        for node in calls:
            is_description = last_word(node.func).endswith("Provider")
            claims = claims_of(module, node) if is_description else None
            if claims is None:
                continue
            config = next((k.value for k in node.keywords if k.arg == "config"), None)
            if isinstance(config, ast.Name | ast.Attribute):
                uses.setdefault(last_word(config), []).append((module, node, claims))
            elif claims:
                module.leave(node, f"give it a config class with traits(): {call_of(claims)}")
    return uses


def call_of(claims: dict[str, str]) -> str:
    return f"Traits({', '.join(f'{name}={value}' for name, value in claims.items())})"


def claims_of(module: Module, node: ast.Call) -> dict[str, str] | None:
    """Returns the fields that a description claims; None where they are not written out."""
    claims: dict[str, str] = {}
    for keyword in node.keywords:
        if keyword.arg in FLAGS and isinstance(keyword.value, ast.Constant):
            claims |= {keyword.arg: "True"} if keyword.value.value else {}
        elif keyword.arg in (*FLAGS, "trains_on_stale"):
            module.leave(keyword.value, f"see docs/how-to/move-to-0.3.md: {keyword.arg}")
            if keyword.arg in FLAGS:
                return None
        elif keyword.arg == "capabilities":
            words = literal_words(keyword.value)
            if words is None:
                module.leave(keyword.value, "write these capabilities as fields of Traits")
                return None
            for word in sorted(words):
                if word in FORMER_WORDS:
                    claims[FORMER_WORDS[word]] = "True"
                else:
                    module.leave(keyword.value, f"{word!r} has no field; nothing reads it")
    return claims


def literal_words(node: ast.expr) -> set[str] | None:
    """Returns the words of sets that are written out, or joined by "|"; None for another value."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = literal_words(node.left), literal_words(node.right)
        return None if left is None or right is None else left | right
    if isinstance(node, ast.Call) and last_word(node.func) in ("frozenset", "set"):
        return literal_words(node.args[0]) if node.args else set()
    if isinstance(node, ast.Set | ast.Tuple | ast.List):
        words = [item.value for item in node.elts if isinstance(item, ast.Constant)]
        return {str(word) for word in words} if len(words) == len(node.elts) else None
    return None


def drop_keywords(module: Module, node: ast.Call) -> None:
    """Takes what traits say now out of a description."""
    for keyword in node.keywords:
        if keyword.arg not in ("capabilities", *FLAGS):
            continue
        first, last = module.begin(keyword.value), module.end(keyword.value)
        first -= len(keyword.arg) + 1
        while module.source[last : last + 1].isspace() or module.source[last : last + 1] == b",":
            is_comma = module.source[last : last + 1] == b","
            last += 1
            if is_comma:
                break
        if module.source[last : last + 1] == b"\n":
            first = module.source.rfind(b"\n", 0, first)
        module.edits.append((first, last, ""))


# -- contract tests --------------------------------------------------------------------------------


def leave_contracts(module: Module) -> None:
    """Says what to write for the capabilities that contract tests name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                targets = statement.targets if isinstance(statement, ast.Assign) else ()
                if "capabilities" in map(last_word, targets):
                    module.leave(statement, "write traits = Traits(...), with the words as fields")
        elif isinstance(node, ast.Call) and last_word(node.func) == "claims":
            for word in literal_words(ast.Tuple(node.args)) or ():
                if word in FORMER_WORDS:
                    module.leave(node, f"write @claims({FORMER_WORDS[word]!r})")


# -- config classes --------------------------------------------------------------------------------


def convert_class(
    module: Module,
    node: ast.ClassDef,
    claims: dict[str, str],
    names: set[str],
    having: set[str],
) -> None:
    """Gives a config class ``traits`` in place of the methods that the core called."""
    former = [method for method in functions(node) if is_former(method)]
    if not former and not claims:
        return
    if any(method.name == "traits" for method in functions(node)):
        module.leave(node, f"{node.name} has traits(); add what its methods return")
        return
    values = dict(claims)
    for method in former:
        trait = FORMER_METHODS[method.name]
        if not trait:
            todo = "check it in gcore_check of the plugin"
            if method.name == "keeps_weights":
                todo = "say it where memory of the description says what a worker needs asleep"
            module.leave(method, f"{method.name}: {todo}")
            continue
        value = returned(method)
        if value is None:
            module.edits.append(renamed(module, method))
            text = f"self._{method.name}()"
        else:
            text = module.text(value)
            module.edits.append(whole(module, method))
        values[trait] = text
    bases = sorted(bases_of(node))
    inherits = any(base in having or base not in names for base in bases)
    call = ", ".join(f"{name}={value}" for name, value in values.items())
    if inherits:
        module.imports.add("from dataclasses import replace")
        call = f"replace(super().traits(), {call})"
        if not any(base in having for base in bases):
            module.leave(node, f"see whether {', '.join(bases)} has traits()")
    else:
        call = f"Traits({call})"
    module.imports.add(f"from {TRAITS} import Traits")
    indent = " " * (node.col_offset + 4)
    body = f"\n\n{indent}def traits(self) -> Traits:\n{indent}    return {call}\n"
    module.edits.append((module.end(node), module.end(node), body))


def functions(node: ast.ClassDef) -> list[Function]:
    return [item for item in node.body if isinstance(item, Function)]


def bases_of(node: ast.ClassDef) -> set[str]:
    return {last_word(base) for base in node.bases}


def is_former(method: Function) -> bool:
    """Whether a method is one that the core of 0.2 called: it takes nothing but ``self``."""
    plain = not method.decorator_list and len(method.args.args) == 1
    return method.name in FORMER_METHODS and plain


def returned(method: Function) -> ast.expr | None:
    """Returns what a method of one statement returns; None for a longer one."""
    body = [item for item in method.body if not is_docstring(item)]
    alone = body[0] if len(body) == 1 else None
    return alone.value if isinstance(alone, ast.Return) else None


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def renamed(module: Module, method: Function) -> tuple[int, int, str]:
    """Makes a method private."""
    first = module.begin(method) + len("def ")
    return first, first + len(method.name), f"_{method.name}"


def whole(module: Module, method: Function) -> tuple[int, int, str]:
    """Takes a method away, with the empty lines before it."""
    first = module.begin(method)
    while module.source[first - 1 : first].isspace():
        first -= 1
    return first, module.end(method), ""


# -- who asks --------------------------------------------------------------------------------------


def convert_asking(module: Module) -> None:
    """Rewrites calls of the functions by which configs were asked."""
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module == ABILITIES:
            names |= {alias.name for alias in node.names}
            module.edits.append(
                (module.begin(node), module.end(node), f"from {TRAITS} import traits_of")
            )
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in names:
            asked = node.func.id
            if asked not in ASKED or len(node.args) != 1:
                module.leave(node, f"ask traits_of(config) in place of {asked}()")
                continue
            module.edits.append((module.begin(node.func), module.end(node.func), "traits_of"))
            module.edits.append((module.end(node), module.end(node), f".{ASKED[asked]}"))
        elif isinstance(node.func, ast.Attribute) and node.func.attr in FORMER_METHODS:
            trait = FORMER_METHODS[node.func.attr]
            if trait and not node.args and not node.keywords:
                module.leave(node, f"if this asks a config, write traits().{trait}")


def last_word(node: ast.expr) -> str:
    """Returns the name, or the last name of a dotted one; "" for another expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    sys.exit(main())
