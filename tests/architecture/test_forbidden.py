"""Nothing that we ship runs code out of data: no pickle, no ``eval``, no shell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.test_layers import dotted

ROOT = Path(__file__).parents[2]
SHIPPED = [
    path
    for folder in ("gcore_core", "plugins", "contrib", "recipes", "benchmarks", ".ci")
    for path in sorted([*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.py.tmpl")])
    if not {"tests", "build"} & set(path.relative_to(ROOT).parts)
]

#: "file: the line" -> why it may stay.
ALLOWED: dict[str, str] = {
    (
        "gcore_core/contract/local_files.py: return builtins.__import__(name, globals, locals, "
        "fromlist or (), level)"
    ): "does what an import statement in a user's file says, as Python itself does",
    (
        "plugins/gcore-rewards/gcore_rewards/driver.py: exec(_compile(code, module.__file__), "
        "module.__dict__)"
    ): "the program inside of the confinement: to run code that a model wrote is its work",
    (
        "plugins/gcore-rewards/gcore_rewards/driver.py: return compile(source, file, "
        '"exec", dont_inherit=True)  # not this file\'s __future__'
    ): "the same; it does so before the code runs, which may change what compiles",
    (
        'plugins/gcore-tools/gcore/functions.py: made = compile(source, "<source>", "exec", flags, '
        "dont_inherit=True)"
    ): "it is compared with a function of the user's and never run",
    (
        'plugins/gcore-megatron/gcore_megatron/shim.py: return compile(tree, path, "exec", '
        "dont_inherit=True)"
    ): (
        "an import hook: the source is an installed module's, as the interpreter itself would "
        "compile it"
    ),
    'benchmarks/protocol_mutants.py: code = compile(source, f"<{name}>", "exec", __future__.annotations.compiler_flag)': (  # noqa: E501
        "plants a fault in a function of ours"
    ),
    (
        "benchmarks/protocol_mutants.py: exec(code, vars(sys.modules[owner.__module__]), found)  # "
        "our own text above"
    ): ("plants a fault in a function of ours"),
}

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BUILTINS = {"eval", "exec", "__import__", "compile"}
OF_BUILTINS = {f"{module}.{name}" for module in ("builtins", "__builtins__") for name in BUILTINS}
CALLS = {
    "torch.load": "it reads pickles",
    "torch.save": "it writes pickles",
    "torch.jit.load": "it runs a program",
    "torch.hub.load": "it runs a repository's code",
    "torch.package.PackageImporter": "it reads pickles",
    "pandas.read_pickle": "it reads pickles",
    "pd.read_pickle": "it reads pickles",
    "numpy.lib.format.read_array": "it may read pickles",
    "os.system": "a shell",
    "os.popen": "a shell",
    "subprocess.getoutput": "a shell",
    "subprocess.getstatusoutput": "a shell",
    "asyncio.create_subprocess_shell": "a shell",
    "yaml.load": "it can make any object",
    "yaml.unsafe_load": "it can make any object",
    "yaml.full_load": "it can make many objects",
    "yaml.load_all": "it can make any object",
    "yaml.Loader": "it can make any object",
    "yaml.UnsafeLoader": "it can make any object",
    "yaml.FullLoader": "it can make many objects",
    "logging.config.listen": "it evaluates what it is sent",
}
PICKLING_COLLECTIVES = {
    "gather_object",
    "all_gather_object",
    "broadcast_object_list",
    "scatter_object_list",
}
PICKLING_COLLECTIVES |= {"send_object_list", "recv_object_list"}
FLAGS = {"shell": True, "allow_pickle": True, "weights_only": False}


def forbidden(tree: ast.Module) -> Iterator[tuple[int, str]]:  # noqa: C901, PLR0912
    """(line, reason) of everything that is not allowed."""
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    alias_of = {
        alias.asname: alias.name for node in imported for alias in node.names if alias.asname
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = {alias.name.partition(".")[0] for alias in names} & MODULES
                yield from ((node.lineno, f"imports {name}") for name in found)
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] in MODULES:
                    yield node.lineno, f"imports {module}"
                for alias in names:
                    if (
                        f"{module}.{alias.name}" in CALLS.keys() | OF_BUILTINS
                        or alias.name in PICKLING_COLLECTIVES
                    ):
                        yield node.lineno, f"imports {alias.name}"
            case ast.Attribute(attr=attribute):
                words = dotted(node)
                head, _, rest = words.partition(".")
                words = f"{alias_of.get(head, head)}.{rest}"
                if words in CALLS:
                    yield node.lineno, f"{words}: {CALLS[words]}"
                if words in OF_BUILTINS:
                    yield node.lineno, words
                if attribute in PICKLING_COLLECTIVES:
                    yield node.lineno, f"{attribute}: it pickles"
            case ast.Call(func=function, args=arguments, keywords=keywords):
                if isinstance(function, ast.Name) and function.id in BUILTINS:
                    yield node.lineno, function.id
                if dotted(function) in ("np.load", "numpy.load") and len(arguments) > 2:
                    yield node.lineno, "np.load with allow_pickle by its place"
                for keyword in keywords:
                    value = keyword.value
                    if (
                        keyword.arg in FLAGS
                        and isinstance(value, ast.Constant)
                        and value.value is FLAGS[keyword.arg]
                    ):
                        yield node.lineno, f"{keyword.arg}={value.value}"


@cache
def findings() -> dict[str, str]:
    """Where ("file: the line") -> reason."""
    found = {}
    for path in SHIPPED:
        source = path.read_text()
        filled = re.sub(r"\$\{?\w+\}?", "name", source) if path.suffix == ".tmpl" else source
        for line, reason in forbidden(ast.parse(filled)):
            found[f"{path.relative_to(ROOT)}: {source.splitlines()[line - 1].strip()}"] = reason
    return found


def test_shipped_code_does_not_execute_data() -> None:
    assert {where: reason for where, reason in findings().items() if where not in ALLOWED} == {}


def test_every_exemption_is_still_needed_and_has_a_reason() -> None:
    assert ALLOWED.keys() - findings().keys() == set()
    assert all(ALLOWED.values())


def test_the_search_finds_each_forbidden_call() -> None:
    lines = [
        "import pickle",
        "from dill import loads",
        "from torch import load",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "compile(text, 'x', 'exec')",
        "builtins.eval(text)",
        "from builtins import exec as run",
        "np.load(path, None, True)",
        "torch.load(path, weights_only=True)",
        "torch.jit.load(path)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "from yaml import unsafe_load",
        "from marshal import loads",
        "import cloudpickle",
        "from subprocess import getoutput",
        "dist.all_gather_object(out, value)",
    ]
    for line in lines:
        assert [at for at, _ in forbidden(ast.parse(line))] == [1], line


def test_the_search_resolves_import_aliases() -> None:
    assert [at for at, _ in forbidden(ast.parse("import torch as t\nt.load(path)\n"))] == [2]
    assert [at for at, _ in forbidden(ast.parse("import os as system\nsystem.system(text)\n"))] == [
        2
    ]


def test_the_search_covers_every_distribution_and_all_other_code() -> None:
    homes = {path.relative_to(ROOT).parts[:2] for path in SHIPPED}
    plugins = {
        ("plugins", path.parent.name) for path in (ROOT / "plugins").glob("*/pyproject.toml")
    }
    assert plugins
    assert plugins - homes == set()
    assert {"gcore_core", "plugins", "benchmarks"} <= {home[0] for home in homes}


def test_the_search_accepts_harmless_calls_with_similar_names() -> None:
    source = (
        "model.eval()\nre.compile(text)\nnp.load(path, "
        "allow_pickle=False)\nsubprocess.run(words, shell=False)\n"
    )
    assert list(forbidden(ast.parse(source))) == []
