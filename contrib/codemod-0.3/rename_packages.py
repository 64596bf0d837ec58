"""Rewrites code for G-Core 0.2 to that for 0.3: imports, factory strings, requirements, commands.

    python rename_packages.py PATH ...

It changes text files in place: Python, YAML, TOML, JSON, Markdown, notebooks, shell scripts and
templates. Below a folder it skips folders whose names begin with ".", and `node_modules` and
`build`; a file that is named itself is rewritten whatever its suffix is.

It prints the names of the files that it has changed, then FILE:LINE: what to do, for what is left
to do by hand. Run a formatter that sorts imports afterwards. Names of plugins stay, so jobs stay as
they are. A requirement keeps its version: say yourself that it is one of 0.3.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout that this file lies in

from gcore_core.contract.missing_modules import MOVED  # noqa: E402

SUFFIXES = {
    *(".py", ".pyi", ".ipynb", ".md", ".toml", ".yaml", ".yml", ".json", ".tmpl", ".ini", ".txt"),
    *(".cfg", ".sh"),
}
SKIPPED = {"node_modules", "build"}

# -- what moved ------------------------------------------------------------------------------------

#: Module of 0.2 -> the module of 0.3 that has what it had.
MODULES = {old: new for old, new in MOVED.items() if new}
#: What plugins may import of step programs: all of it is in ``gcore_core.kits.programs``.
PROGRAMS = {
    *("Ahead", "Bounds", "ControllerContext", "Evaluates", "GroupReport", "InStep", "KeepRate"),
    *("LossEvaluation", "Membership", "Schedule", "StepBatch", "StepProgram", "Stopwatch"),
    *("SyncConfig", "Producer", "by_quarter", "deal", "keep_rate"),
}
#: Name of 0.2 in ``gcore_core.controllers`` -> its name in ``gcore_core.kits.programs``.
RENAMED = {"Taken": "StepBatch", "Told": "GroupReport", "Window": "Producer"}
#: Method of a step program's parts in 0.2 -> its name.
METHODS = {r"\bplacement\.rest\(": "placement.sleep("}
#: Calls from Python, which were in ``gcore_core`` and are in ``gcore``.
CALLS = {"job", "load", "run", "train"}
#: Name that left ``gcore_core.kits.launching`` -> the module that has it.
LAUNCHING = {
    "HOLD_LEASE": "gcore_nodes.messages",
    "HoldLease": "gcore_nodes.messages",
    "LENGTH_BYTES": "gcore_core.kits.wire",
    "MachineFacts": "gcore_nodes.facts",
    "RECORD": "gcore_core.kits.processes",
    "SIGTERM_PASSED_ON": "gcore_nodes.agent",
    "StartedProcess": "gcore_core.kits.processes",
    "certificate_of": "gcore_core.kits.wire",
    "clear_up": "gcore_core.kits.processes",
    "framed": "gcore_core.kits.wire",
    "identify_process": "gcore_core.kits.processes",
    "length_at": "gcore_core.kits.wire",
    "machine_facts": "gcore_nodes.facts",
    "machine_identity": "gcore_nodes.facts",
    "make_identity": "gcore_nodes.identity",
    "server_context": "gcore_nodes.identity",
    "spawn_over_input": "gcore_nodes.spawn_over_input",
}
#: Module of 0.2 -> names that another module has now, with that module.
NAMES = {
    "gcore_core": dict.fromkeys(CALLS, "gcore"),
    "gcore_core.kits": {
        old.rpartition(".")[2]: new.rpartition(".")[0]
        for old, new in MODULES.items()
        if old.startswith("gcore_core.kits.")
    },
    "gcore_core.contract.json_values": {"repeated_key": "gcore_core.contract.rows"},
    "gcore_core.kits.launching": LAUNCHING,
    "gcore_core.kits.machines": {"MachinesConfig": "gcore_nodes.machines_config"},
}

#: Distribution of 0.2 whose libraries are an extra in 0.3 -> that extra.
OWN_EXTRA = {"gcore-eval": "eval", "gcore-human": "human", "gcore-jobs": "jobs", "gcore-sim": "sim"}
#: (distribution of 0.2, its extra) -> the extra in 0.3, where it has another name.
EXTRAS = {("gcore-ray", "engine"): "ray"}
#: Extra of gcore-core 0.2 -> the requirement of 0.3.
CORE_EXTRAS = {
    "completion": "gcore-tools[completion]",
    "loopback": "gcore-report",
    "testing": "gcore-testing",
    "tls": "gcore-nodes",
}

#: Fields that ``AgentSpec`` had, and that ``MachineAgentSpec`` has.
AGENT_FIELDS = {
    *("bulk", "directory", "identity", "is_remote", "lease_s", "leave_s", "public", "silence_s"),
    "start_s",
}
#: What is looked for in a text that was rewritten, and what to do about it.
LEFT = {
    r"\bgcore_core\.controllers\b|\bfrom gcore_core import .*\bcontrollers\b": (
        "gcore_core.controllers is not public any more; use gcore_core.kits.programs"
    ),
    r"\bfrom gcore_core import .*\btesting\b": "import gcore_testing as testing",
    r"\bgcore_core\.(?:job|load|train|run(?=\())(?!\w)": (
        "calls from Python are in gcore, of gcore-tools; import gcore"
    ),
    rf"\blaunching\.(?:{'|'.join(LAUNCHING)})\b": (
        "it left gcore_core.kits.launching; docs/how-to/move-to-0.3.md says for where"
    ),
    rf"\bAgentSpec\((?:[^()]|\([^()]*\))*?\b(?:{'|'.join(sorted(AGENT_FIELDS))})\s*=": (
        "use gcore_nodes.agent.MachineAgentSpec, which has these fields"
    ),
    rf"\bgcore-core\[[^]]*\b(?:{'|'.join(CORE_EXTRAS)})\b[^]]*\]": (
        "require " + ", ".join(f"{new} for {extra}" for extra, new in CORE_EXTRAS.items())
    ),
    r"\bgcore[-_]refine\b(?!-)": "gcore-refine is gone; write an environment in its place",
    r"\bgcore[-_]tree\b(?!-)": "gcore-tree is gone; remove it",
    r"\bgcore[-_]museum\b(?!-)": (
        "gcore-museum is gone; say `python -m tests.museum` in a checkout of G-Core"
    ),
}

# -- rewriting -------------------------------------------------------------------------------------

_FROM = re.compile(
    r"^(?P<before>[ \t]*(?:>>> )?)from (?P<module>gcore_core[\w.]*) import "
    r"(?P<names>\([^()]*\)|\w[\w ,]*\w|\w)",
    re.M,
)
_IMPORT_AS = re.compile(r"\bimport gcore_core as (\w+)")
_PACKAGES = "|".join(sorted((old for old in MODULES if "." not in old), key=len, reverse=True))
#: No part of a longer name or of a path; no keyword, no variable.
_MODULE = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, MODULES))})(?!\w| *=[^=])")
_DISTRIBUTION = re.compile(
    rf"(?<![\w-])({_PACKAGES.replace('_', '-')})(?:\[([\w, -]*)\])?(?![\w-])"
)
_CORE = re.compile(r"(?<![\w-])gcore-core\[(\w+)\]")
_NEW = re.compile(r"(?<![\w-])(g-core|-m gcore_core) +plugins +new(?![\w-])")


def rewritten(text: str) -> str:
    """Returns the text with every name of 0.2 replaced, but for what ``left`` finds in it."""
    text = _FROM.sub(_from, text)
    text = _IMPORT_AS.sub(lambda match: _import_as(match, text), text)
    text = _MODULE.sub(lambda match: MODULES[match[1]], text)
    text = _DISTRIBUTION.sub(_distribution, text)
    text = _CORE.sub(lambda match: CORE_EXTRAS.get(match[1], match[0]), text)
    for old, new in METHODS.items():
        text = re.sub(old, new, text)
    return _NEW.sub(r"\1 new", text)


def left(text: str) -> list[tuple[int, str]]:
    """Returns what is left to do in a text that was rewritten: numbers of lines, and what to do."""
    found = [(m.start(), todo) for regex, todo in LEFT.items() for m in re.finditer(regex, text)]
    for match in _FROM.finditer(text):
        for module, words in _homes(match).items():
            if module != match["module"] and "#" in match["names"]:
                found.append((match.start(), f"{words[0]} is in {module}; split this import"))
    for match in _IMPORT_AS.finditer(text):
        for name in sorted(_uses(match[1], text) & CALLS):
            found.append((match.start(), f"{name} is in gcore, of gcore-tools; import gcore"))
    return sorted({(text.count("\n", 0, start) + 1, todo) for start, todo in found})


def _from(match: re.Match[str]) -> str:
    """Returns ``from ... import`` with each name from where it is, as several imports if need be.

    One that has comments between its names stays as it is.
    """
    homes = _homes(match)
    if list(homes) == [match["module"]] or "#" in match["names"]:
        return match[0]
    lines = [f"from {module} import {', '.join(words)}" for module, words in homes.items()]
    return "\n".join(match["before"] + line for line in lines)


def _homes(match: re.Match[str]) -> dict[str, list[str]]:
    """Returns the modules of 0.3 that have an import's names, each with the words to import."""
    homes: dict[str, list[str]] = {}
    for name, bound in re.findall(r"(\w+)(?: as (\w+))?", re.sub("#.*", "", match["names"])):
        module = match["module"]
        new = name
        if module.startswith("gcore_core.controllers") and name in PROGRAMS | RENAMED.keys():
            module = "gcore_core.kits.programs"
            new = RENAMED.get(name, name)
        module = NAMES.get(module, {}).get(name, module)
        bound = bound or name
        homes.setdefault(module, []).append(new if new == bound else f"{new} as {bound}")
    return homes


def _import_as(match: re.Match[str], text: str) -> str:
    """Returns ``import gcore_core as ...`` as one of ``gcore``, where the file needs that alone."""
    bound = match[1]
    uses = _uses(bound, text)
    if not uses or not uses <= CALLS:
        return match[0]
    return "import gcore" if bound == "gcore" else f"import gcore as {bound}"


def _uses(bound: str, text: str) -> set[str]:
    """Returns the attributes of a module that a file uses."""
    return set(re.findall(rf"(?<![\w.]){bound}\.(\w+)", text))


def _distribution(match: re.Match[str]) -> str:
    """Returns the requirement of 0.3 for one of 0.2, its version left out."""
    old = match[1]
    extras = [EXTRAS.get((old, extra), extra) for extra in re.findall(r"[\w-]+", match[2] or "")]
    if old in OWN_EXTRA:
        extras.insert(0, OWN_EXTRA[old])
    new = MODULES[old.replace("-", "_")].partition(".")[0].replace("_", "-")
    return f"{new}[{','.join(extras)}]" if extras else new


# -- files -----------------------------------------------------------------------------------------


def _files(path: Path) -> Iterator[Path]:
    """Yields a file itself, and of a folder the files below it that may be rewritten."""
    if path.is_file():
        yield path
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in SKIPPED)
        for file in (Path(folder, name) for name in sorted(names)):
            if file.suffix in SUFFIXES and file.is_file():
                yield file


def _rewrite(file: Path) -> list[str]:
    """Rewrites a file, prints its name if it has changed, and returns what is left to do in it."""
    try:
        text = file.read_bytes().decode("utf-8")  # as bytes, so that ends of lines stay
        new = rewritten(text)
        if new != text:
            file.write_bytes(new.encode("utf-8"))
            print(file)
    except UnicodeDecodeError:
        return [f"{file}: skipped, since it is not UTF-8"]
    except OSError as error:
        return [f"{file}: skipped, since the system says: {error.strerror}"]
    return [f"{file}:{line}: {todo}" for line, todo in left(new)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", type=Path, help="a file or a folder")
    paths = parser.parse_args().paths
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        print(f"There is no {', '.join(missing)}.", file=sys.stderr)
        return 2
    if not paths:
        print("Give the files or folders that are to be rewritten.", file=sys.stderr)
        return 2
    files = dict.fromkeys(file for path in paths for file in _files(path))
    todo = [line for file in files for line in _rewrite(file)]
    for line in todo:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
