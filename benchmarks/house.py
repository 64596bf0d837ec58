"""Measures how the code reads, from the code itself: density, layers, types.

With bars, all 0:

import_circles                  modules of the core that import each other in a circle
contract_imports_of_ours        imports of the project by ``gcore_core.contract`` outside itself
contract_words_never_called     words of the contract that neither the core nor a plugin, contrib or
                                a template of ``g-core new`` uses, tests left out
                                (tests/architecture/contract_words.py)
endpoints_named_by_string       calls and services that name a declared endpoint by a string
mypy_errors_all_distributions   errors of ``mypy --strict`` over the core and every plugin
modules_plugins_import_outside_contract_and_kit
                                modules of the core that plugins import and that are not public
claims_without_bar_or_place     figures of the newest release that no page quotes; what scripts
                                print without a bar or a place is a detail (report.py)

names_to_know_for_a_new_engine  words of ``gcore_core.contract``, ``gcore_core.kits`` and
                                ``gcore_testing`` that what ``g-core new --kind generator`` writes
                                imports, implements or sets, aim 20 (house_words.py)

Of the kernel, which is the core without its test kit, and what is in its way:

distributions                   the core and what lies in plugins/, at most 19
kernel_code_lines               without docstrings, comments and blank lines
nodes_per_line                  AST nodes a line of code, at most 5.2: short is not dense
lines_over_90_columns_share     of these lines
all_code_lines                  the same of all distributions
modules_touched_by_IDEA         modules of the kernel that speak of an idea, at most 10
excluded_pairs                  pairs of features that check refuses (house_pairs.py); each is a
                                detail, refused: ONE with OTHER
walk_sync_step_*                functions, classes and modules that one prompt enters in a step
walk_killed_generator_*         the same of a run in which a generator is killed; *_beyond_*: what
                                a run without that does not enter (house_walks.py)
cost_*                          what a step costs in virtual time (step_costs.py)

``--parts`` measures some of it alone. ``--keep 0.2-core`` also writes what was measured into
benchmarks/releases/0.2-core.json, where it is compared with what a later version measures.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import figures
import release
from house_pairs import measure_pairs
from house_walks import Walk, walk_of_kill, walk_of_step
from house_words import names_to_know
from report import Claim, add_options, publish, report_of
from step_costs import measure_costs

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = "gcore_core.contract"
#: What a plugin may import of the core, besides ``hookimpl``; the docstring of kits says for what.
PUBLIC = (CONTRACT, "gcore_core.kits")
#: What plugins are tested with, which runs the real programs on virtual time.
TEST_KIT = "gcore_testing"
CORE = ROOT / "gcore_core"
#: A line of code that is longer is told, whatever the formatter allows.
WIDE = 90
#: Idea -> what speaks of it in a module of the kernel, of whatever case.
IDEAS = {
    "leaving": r"leaving|newcomer|lost_node|lostnode|expendable|stand_?in",
    "canaries": r"canar",
    "unfinished_samples": r"unfinished|give_?back|given_?back",
    "lent": r"\blent\b|\blend|lending|\bloan",
}
MOST_MODULES = 10
#: First word of a cost -> its unit.
UNITS = {
    "rollout": "virtual s a step",
    "step": "virtual s a step",
    "issued": "groups a step",
    "messages": "messages a step",
}


@dataclass(frozen=True)
class Text:
    """Counts over some files.

    code: lines that are neither empty, comment nor docstring.
    nodes: statements and expressions.
    wide: lines of code of more than ``WIDE`` columns.
    """

    code: int
    nodes: int
    wide: int


@dataclass(frozen=True)
class Import:
    """One import of ``target`` by ``module``.

    on_load: whether it happens when ``module`` is imported, and not for types alone.
    """

    module: str
    target: str
    on_load: bool


def packages() -> list[Path]:
    """Returns the package of the core and of every plugin."""
    inits = sorted(ROOT.glob("plugins/*/gcore_*/__init__.py"))
    return [ROOT / "gcore_core", *(file.parent for file in inits)]


def files_of(folders: Iterable[Path]) -> list[Path]:
    """Returns all Python files in these folders, sorted."""
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def module_name(file: Path, package: Path) -> str:
    """Returns a file's module, such as ``gcore_core.cli`` for gcore_core/cli/__init__.py."""
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# -- how dense the text is -------------------------------------------------------------------------


def read_text(files: Iterable[Path]) -> Text:
    """Returns the counts over all files."""
    code = nodes = wide = 0
    for file in files:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        prose = docstring_lines(tree) | comment_lines(source, tree)
        code_lines = [
            line
            for number, line in enumerate(source.splitlines(), 1)
            if line.strip() and number not in prose
        ]
        code += len(code_lines)
        wide += sum(len(line) > WIDE for line in code_lines)
        nodes += sum(isinstance(node, ast.stmt | ast.expr) for node in ast.walk(tree))
    return Text(code=code, nodes=nodes, wide=wide)


def docstring_lines(tree: ast.AST) -> set[int]:
    """Returns the lines of texts that stand alone: docstrings, and the help under a field."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if alone and isinstance(node.value.value, str):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def comment_lines(source: str, tree: ast.AST) -> set[int]:
    """Returns the lines that hold a comment alone.

    Tokens, which take longer than all else here, are made only where such a line may lie in a text.
    """
    lines = {
        number
        for number, line in enumerate(source.splitlines(), 1)
        if line.lstrip().startswith("#")
    }
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr))
    if any(
        not lines.isdisjoint(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for node in texts
    ):
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        return {token.start[0] for token in tokens if is_own_line_comment(token)}
    return lines


def is_own_line_comment(token: tokenize.TokenInfo) -> bool:
    """Returns whether a token is a comment that has a line of its own."""
    return token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")


# -- who imports whom ------------------------------------------------------------------------------


def imports_of(file: Path, package: Path, modules: frozenset[str]) -> Iterator[Import]:
    """Yields every import of a file; ``from package import module`` names the module."""
    module = module_name(file, package)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    later = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_types(node)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [name if name in modules else node.module for name in inner]
        else:
            continue
        for target in targets:
            yield Import(module, target, node not in later)


def is_for_types(node: ast.AST) -> bool:
    """Returns whether a statement is ``if TYPE_CHECKING``."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def circles(imports: Iterable[Import], modules: frozenset[str]) -> list[str]:
    """Returns the modules that are in a circle of imports, or that lead to one."""
    edges: dict[str, set[str]] = {}
    for item in imports:
        if item.on_load and item.target in modules and item.target != item.module:
            edges.setdefault(item.module, set()).add(item.target)
    # Whatever imports nothing that is left is in no circle; take it away until nothing changes.
    while True:
        free = [module for module, targets in edges.items() if not targets & edges.keys()]
        if not free:
            return sorted(edges)
        for module in free:
            del edges[module]


def is_within(module: str, folder: str) -> bool:
    """Returns whether a module is ``folder`` or lies in it."""
    return module == folder or module.startswith(folder + ".")


def is_public(module: str) -> bool:
    """Returns whether a plugin may import this module of the core."""
    return module == "gcore_core" or any(is_within(module, folder) for folder in PUBLIC)


# -- what is checked elsewhere ---------------------------------------------------------------------


def endpoints_by_string(files: Sequence[Path]) -> list[str]:
    """Returns where a call of a peer, or a service, names a declared endpoint by a string."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    names = {
        text
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called_name(node).endswith("Endpoint")
        for text in strings(node.args[:1])
    }
    if not names:
        raise RuntimeError("no endpoint is declared, so nothing was looked at")
    return [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and names & set(endpoint_words(node))
    ]


def endpoint_words(node: ast.Call) -> list[str]:
    """Returns the strings that stand where a peer's call, or a service, takes an endpoint."""
    if called_name(node) in ("add", "call", "insist", "relay", "stream"):
        return strings(node.args)
    return []


def called_name(node: ast.Call) -> str:
    """Returns ``call`` for ``peer.call(...)`` and ``Service`` for ``Service(...)``."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def strings(nodes: Iterable[ast.expr | None]) -> list[str]:
    """Returns those of some expressions that are strings."""
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def mypy_errors() -> int:
    """Returns the number of errors that mypy finds.

    Raises RuntimeError when mypy says neither that there are none nor how many.
    """
    process = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    last = (process.stdout.strip().splitlines() or [""])[-1]
    count_line = re.match(r"Found (\d+) error", last)
    if count_line:
        return int(count_line[1])
    if not last.startswith("Success"):
        raise RuntimeError(f"mypy: {process.stdout}{process.stderr}")
    return 0


def contract_words_never_called() -> list[str]:
    """Returns the words of the contract that nothing calls.

    The checker is that of the architecture tests.
    """
    file = ROOT / "tests/architecture/contract_words.py"
    spec = importlib.util.spec_from_file_location("contract_words", file)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{file} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return list(module.never_called())


# -- all together ----------------------------------------------------------------------------------


def kernel_files() -> list[Path]:
    """Returns the files of the core."""
    return files_of([CORE])


def kernel() -> list[Claim]:
    """Returns the claims about how large the kernel is, and how dense."""
    text = read_text(kernel_files())
    wide = text.wide / text.code
    others = read_text(files_of(packages()[1:]))
    return [
        Claim("distributions", len(packages()), "distributions", bar=19, op="<="),
        Claim("kernel_code_lines", text.code, "lines"),
        Claim("nodes_per_line", text.nodes / text.code, "AST nodes", bar=5.2, op="<="),
        Claim("lines_over_90_columns_share", wide, "of lines of code"),
        Claim("all_code_lines", text.code + others.code, "lines"),
    ]


def modules_touched(files: Iterable[Path], pattern: str) -> list[Path]:
    """Returns the files in which a regular expression is found, in code or text."""
    found = re.compile(pattern, re.IGNORECASE)
    return [file for file in files if found.search(file.read_text(encoding="utf-8"))]


def ideas() -> list[Claim]:
    """Returns the claims about how many modules each idea is spread over."""
    files = kernel_files()
    return [
        Claim(
            f"modules_touched_by_{idea}",
            len(modules_touched(files, pattern)),
            "modules",
            bar=MOST_MODULES,
            op="<=",
        )
        for idea, pattern in IDEAS.items()
    ]


def excluded() -> list[Claim]:
    """Returns the claims about features that exclude each other; each such pair is one of them."""
    pairs = measure_pairs()
    return [
        Claim("excluded_pairs", len(pairs.refused), "pairs"),
        Claim("excluded_pairs_looked_at", pairs.n_pairs, "pairs"),
        Claim("excluded_pairs_features", len(pairs.present), "features"),
        *(Claim(f"refused: {one} with {other}", 1, "pair") for one, other in pairs.refused),
    ]


def steps_of(name: str, walk: Walk) -> list[Claim]:
    """Returns the claims about what a walk enters."""
    return [
        Claim(f"{name}_functions", len(walk.functions), "functions"),
        Claim(f"{name}_classes", len(walk.classes), "classes"),
        Claim(f"{name}_modules", len(walk.modules), "modules"),
    ]


def walks() -> list[Claim]:
    """Returns the claims about what one step enters, and one kill."""
    killed = walk_of_kill(True)
    return [
        *steps_of("walk_sync_step", walk_of_step()),
        *steps_of("walk_killed_generator", killed),
        *steps_of("walk_killed_generator_beyond", killed.beyond(walk_of_kill(False))),
    ]


def costs() -> list[Claim]:
    """Returns the claims about what a step costs in virtual time."""
    return [
        Claim(f"cost_{name}", value, UNITS[name.partition("_")[0]])
        for name, value in measure_costs().items()
    ]


def words() -> list[Claim]:
    """Returns the claims about the words of the contract; each that is counted is one of them."""
    known = names_to_know("generator")
    hollow = contract_words_never_called()
    return [
        none_of("contract_words_never_called", len(hollow)),
        *(Claim(f"never called: {name}", 1, "word") for name in hollow),
        Claim("names_to_know_for_a_new_engine", len(known), "words"),
        *(Claim(f"to know: {name}", 1, "word") for name in sorted(known)),
    ]


def none_of(name: str, count: int) -> Claim:
    """Returns a claim whose bar is 0."""
    return Claim(name, count, "found", bar=0, op="<=")


def structure() -> list[Claim]:
    """Returns the claims about who imports whom."""
    core, *plugins = packages()
    modules = frozenset(module_name(file, core) for file in files_of([core]))
    inner = [item for file in files_of([core]) for item in imports_of(file, core, modules)]
    outward = {
        (item.module, item.target)
        for item in inner
        if is_within(item.module, CONTRACT)
        and is_within(item.target, "gcore_core")
        and not is_within(item.target, CONTRACT)
    }
    private = {
        item.target
        for package in plugins
        if package.name != TEST_KIT
        for file in files_of([package])
        for item in imports_of(file, package, modules)
        if is_within(item.target, "gcore_core") and not is_public(item.target)
    }
    for target in sorted(private):
        print(f"not public, and imported by a plugin: {target}", file=sys.stderr)
    return [
        none_of("import_circles", len(circles(inner, modules))),
        none_of("contract_imports_of_ours", len(outward)),
        none_of("modules_plugins_import_outside_contract_and_kit", len(private)),
    ]


def style() -> list[Claim]:
    """Returns the claims about what must not be found."""
    return [
        *structure(),
        none_of("endpoints_named_by_string", len(endpoints_by_string(files_of(packages())))),
        none_of("claims_without_bar_or_place", len(figures.without_place())),
    ]


def types() -> list[Claim]:
    """Returns the claim about types; it takes most of a minute."""
    return [none_of("mypy_errors_all_distributions", mypy_errors())]


PARTS: dict[str, Callable[[], list[Claim]]] = {
    "style": style,
    "types": types,
    "kernel": kernel,
    "ideas": ideas,
    "words": words,
    "pairs": excluded,
    "walks": walks,
    "costs": costs,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="How the code reads, from the code itself.")
    add_options(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--keep", metavar="NAME", help="write a file of this name in releases")
    args = parser.parse_args()
    claims = [claim for part in args.parts for claim in PARTS[part]()]
    versions = ["gcore-core", "mypy"]
    if args.keep:
        release.keep(args.keep, report_of("house", claims, versions))
    return publish("house", claims, args, versions)


if __name__ == "__main__":
    sys.exit(main())
