"""Nothing that we ship runs code out of data: no pickle, no ``eval``, no shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = [
    path
    for folder in ("gcore_core", "plugins", "contrib", "recipes")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "tests" not in path.relative_to(ROOT).parts
]

#: "file: the line" -> why it may stay.
ALLOWED: dict[str, str] = {}

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BUILTINS = {"eval", "exec", "__import__"}
CALLS = {
    "torch.load": "it reads pickles",
    "torch.save": "it writes pickles",
    "os.system": "a shell",
    "os.popen": "a shell",
    "subprocess.getoutput": "a shell",
    "subprocess.getstatusoutput": "a shell",
    "asyncio.create_subprocess_shell": "a shell",
    "yaml.load": "it can make any object",
    "yaml.unsafe_load": "it can make any object",
}
PICKLING_COLLECTIVES = {"gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list"}
PICKLING_COLLECTIVES |= {"send_object_list", "recv_object_list"}
FLAGS = {"shell": True, "allow_pickle": True, "weights_only": False}


def forbidden(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, reason) of everything that is not allowed."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = {alias.name.partition(".")[0] for alias in names} & MODULES
                yield from ((node.lineno, f"imports {name}") for name in found)
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] in MODULES:
                    yield node.lineno, f"imports {module}"
                for alias in names:
                    if f"{module}.{alias.name}" in CALLS or alias.name in PICKLING_COLLECTIVES:
                        yield node.lineno, f"imports {alias.name}"
            case ast.Attribute(attr=attribute):
                if ast.unparse(node) in CALLS:
                    yield node.lineno, f"{ast.unparse(node)}: {CALLS[ast.unparse(node)]}"
                if attribute in PICKLING_COLLECTIVES:
                    yield node.lineno, f"{attribute}: it pickles"
            case ast.Call(func=function, keywords=keywords):
                if isinstance(function, ast.Name) and function.id in BUILTINS:
                    yield node.lineno, function.id
                for keyword in keywords:
                    value = keyword.value
                    if keyword.arg in FLAGS and isinstance(value, ast.Constant) and value.value is FLAGS[keyword.arg]:
                        yield node.lineno, f"{keyword.arg}={value.value}"


def findings() -> dict[str, str]:
    """Where ("file: the line") -> reason."""
    found = {}
    for path in SHIPPED:
        source = path.read_text()
        for line, reason in forbidden(ast.parse(source)):
            found[f"{path.relative_to(ROOT)}: {source.splitlines()[line - 1].strip()}"] = reason
    return found


def test_what_we_ship_runs_no_code_out_of_data() -> None:
    assert {where: reason for where, reason in findings().items() if where not in ALLOWED} == {}


def test_every_exemption_is_still_needed_and_has_a_reason() -> None:
    assert ALLOWED.keys() - findings().keys() == set()
    assert all(ALLOWED.values())


def test_the_search_finds_each_of_them() -> None:
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
        "dist.all_gather_object(out, value)",
    ]
    for line in lines:
        assert [at for at, _ in forbidden(ast.parse(line))] == [1], line


def test_the_search_leaves_look_alikes_alone() -> None:
    source = "model.eval()\nre.compile(text)\nnp.load(path, allow_pickle=False)\nsubprocess.run(words, shell=False)\n"
    assert list(forbidden(ast.parse(source))) == []
