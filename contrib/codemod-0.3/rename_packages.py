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
from pathlib import Path

SUFFIXES = {
    *(".py", ".pyi", ".ipynb", ".md", ".toml", ".yaml", ".yml", ".json", ".tmpl", ".ini", ".txt"),
    *(".cfg", ".sh"),
}
SKIPPED = {"node_modules", "build"}

#: Package of 0.2 -> package of 0.3.
PACKAGES = {
    "gcore_balance": "gcore_placement.balance",
    "gcore_context": "gcore_language.context",
    "gcore_critic": "gcore_algorithms.critic",
    "gcore_eval": "gcore_report.eval",
    "gcore_genrm": "gcore_rewards.genrm",
    "gcore_human": "gcore_rewards.human",
    "gcore_jobs": "gcore_tools.jobs",
    "gcore_offline": "gcore_algorithms.offline",
    "gcore_queueing": "gcore_placement.queueing",
    "gcore_ray": "gcore_nodes.ray",
    "gcore_refine": "gcore_algorithms.refine",
    "gcore_shrink": "gcore_tools.shrink",
    "gcore_sim": "gcore_placement.sim",
    "gcore_teacher": "gcore_algorithms.teacher",
    "gcore_trackers": "gcore_report.trackers",
    "gcore_venv": "gcore_tools.venv",
}
#: Module of gcore-core 0.2 that another distribution has -> the module there.
MODULES = {
    "gcore_core.testing": "gcore_testing",
    "gcore_core.kits.loopback": "gcore_report.loopback",
    "gcore_core.kits.machines": "gcore_nodes.machines",
    "gcore_core.kits.answers": "gcore_rewards.answers",
    "gcore_core.kits.number_words": "gcore_rewards.number_words",
    "gcore_core.kits.numbers": "gcore_rewards.numbers",
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

#: What plugins may import of step programs: all of it is in ``gcore_core.kits.programs``.
PROGRAMS = {
    *("Ahead", "Bounds", "ControllerContext", "Evaluates", "GroupReport", "InStep", "KeepRate"),
    *("LossEvaluation", "Membership", "Schedule", "StepBatch", "StepProgram", "Stopwatch"),
    *("SyncConfig", "Producer", "by_quarter", "deal", "keep_rate"),
}
#: Name of 0.2 in ``gcore_core.controllers`` -> its name in ``gcore_core.kits.programs``.
RENAMED = {"Taken": "StepBatch", "Told": "GroupReport", "Window": "Producer"}
#: Calls from Python, which were in ``gcore_core`` and are in ``gcore``.
CALLS = ("job", "load", "run", "train")
#: (module of 0.2, name) -> the module of 0.3 that has this name.
MOVED = {
    **{("gcore_core", name): "gcore" for name in CALLS},
    ("gcore_core.kits", "answers"): "gcore_rewards",
    ("gcore_core.kits", "loopback"): "gcore_report",
    ("gcore_core.kits", "machines"): "gcore_nodes",
    ("gcore_core.kits", "number_words"): "gcore_rewards",
    ("gcore_core.kits", "numbers"): "gcore_rewards",
    ("gcore_core.kits.launching", "HOLD_LEASE"): "gcore_nodes.messages",
    ("gcore_core.kits.launching", "HoldLease"): "gcore_nodes.messages",
    ("gcore_core.kits.launching", "LENGTH_BYTES"): "gcore_core.kits.wire",
    ("gcore_core.kits.launching", "MachineFacts"): "gcore_nodes.facts",
    ("gcore_core.kits.launching", "RECORD"): "gcore_core.kits.processes",
    ("gcore_core.kits.launching", "SIGTERM_PASSED_ON"): "gcore_nodes.agent",
    ("gcore_core.kits.launching", "StartedProcess"): "gcore_core.kits.processes",
    ("gcore_core.kits.launching", "certificate_of"): "gcore_core.kits.wire",
    ("gcore_core.kits.launching", "clear_up"): "gcore_core.kits.processes",
    ("gcore_core.kits.launching", "framed"): "gcore_core.kits.wire",
    ("gcore_core.kits.launching", "identify_process"): "gcore_core.kits.processes",
    ("gcore_core.kits.launching", "length_at"): "gcore_core.kits.wire",
    ("gcore_core.kits.launching", "machine_facts"): "gcore_nodes.facts",
    ("gcore_core.kits.launching", "machine_identity"): "gcore_nodes.facts",
    ("gcore_core.kits.launching", "make_identity"): "gcore_nodes.identity",
    ("gcore_core.kits.launching", "server_context"): "gcore_nodes.identity",
    ("gcore_core.kits.machines", "MachinesConfig"): "gcore_nodes.machines_config",
}

#: Fields that ``AgentSpec`` had, and that ``MachineAgentSpec`` has.
AGENT_FIELDS = {
    *("bulk", "directory", "identity", "is_remote", "lease_s", "leave_s", "public", "silence_s"),
    "start_s",
}

# Imports. A name may be split from the next by a backslash at the end of a line.
_GAP = r"(?:[ \t]|\\\r?\n)"
_ONE = rf"\w+(?:{_GAP}+as{_GAP}+\w+)?"
_FROM = re.compile(
    r"^(?P<before>[ \t]*(?:>>> )?)from[ \t]+(?P<module>gcore_core[\w.]*)[ \t]+"
    rf"(?P<word>import{_GAP}*)"
    rf"(?P<names>\((?:[^()#]|#[^\n]*\n)*\)|\b{_ONE}(?:{_GAP}*,{_GAP}*{_ONE})*)"
    r"(?P<comment>[ \t]*#[^\r\n]*)?",
    re.M,
)
_NAME = re.compile(rf"#[^\n]*|(?P<name>\w+)(?:{_GAP}+as{_GAP}+(?P<bound>\w+))?")
_IMPORT_AS = re.compile(
    r"\bimport[ \t]+(?P<module>gcore_core(?:\.controllers[\w.]*)?)[ \t]+as[ \t]+(?P<bound>\w+)"
)
_IMPORT = re.compile(
    r"^(?P<before>[ \t]*(?:>>> )?)import[ \t]+(?P<module>gcore_core(?:\.controllers[\w.]*)?)"
    r"(?=[ \t]*(?:[#;\r\n]|\Z))",
    re.M,
)
_BOUND_PROGRAMS = re.compile(r"\bprograms as (\w+)")

# Dotted names, as in factory strings and after a plain import.
_CONTROLLERS = re.compile(
    r"(?<![\w./-])gcore_core\.controllers(?:\.\w+)*(?P<dot>[.:])"
    rf"(?P<name>{'|'.join(sorted((PROGRAMS | set(RENAMED)) - {'keep_rate'}))})(?!\w)"
)
_CALLED = re.compile(r"(?<![\w./-])gcore_core\.(?P<name>(?:job|load|train)(?![\w.])|run(?=\())")
_USED_CORE = re.compile(r"(?<![\w./-])(?<!from )(?<!import )gcore_core\.")
_MODULE = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, MODULES))})(?!\w)")
_NAMES = "|".join(sorted(PACKAGES, key=len, reverse=True))
_PACKAGE = re.compile(rf"(?<![\w./-])({_NAMES})(?!\w| *=[^=])")  # no keyword, no variable

# Requirements and commands.
_DISTRIBUTION = re.compile(rf"(?<![\w-])({_NAMES.replace('_', '-')})(?:\[([\w,\s-]+)\])?(?![\w-])")
_CORE = re.compile(r"(?<![\w-])gcore-core\[([\w,\s-]+)\]")
_NEW = re.compile(r"(?<![\w-])(g-core|-m gcore_core) +plugins +new(?![\w-])")

#: What is looked for in a text that was rewritten, and what to do about it.
LEFT = (
    (
        r"(?<![\w/-])gcore_core\.controllers\b|\bfrom gcore_core import [^\n]*\bcontrollers\b",
        "gcore_core.controllers is not public any more; use gcore_core.kits.programs",
    ),
    (r"\bfrom gcore_core import [^\n]*\btesting\b", "import gcore_testing as testing"),
    (
        rf"\bfrom gcore_core import [^\n]*\b(?:{'|'.join(CALLS)})\b",
        "import the calls from gcore, of gcore-tools",
    ),
    (r"(?<!\w)gcore[-_]tree(?![\w-])", "gcore-tree is gone; remove it"),
    (
        r"(?<!\w)gcore[-_]museum(?![\w-])",
        "gcore-museum is gone; say `python -m tests.museum` in a checkout of G-Core",
    ),
    (
        rf"(?<!\w)AgentSpec\((?:[^()]|\([^()]*\))*?\b(?:{'|'.join(sorted(AGENT_FIELDS))})\s*=",
        "use gcore_nodes.agent.MachineAgentSpec, which has these fields",
    ),
)


def rewritten(text: str) -> str:
    """Returns the text with every name of 0.2 replaced, but for what ``left`` finds in it."""
    text = _FROM.sub(lambda match: _from(match, text), text)
    text = _IMPORT_AS.sub(lambda match: _import_as(match, text), text)
    for bound in _BOUND_PROGRAMS.findall(text):
        for old, new in RENAMED.items():
            text = re.sub(rf"(?<![\w.]){bound}\.{old}(?!\w)", f"{bound}.{new}", text)
    text = _rewrite_dotted_controllers(text)
    text = _rewrite_dotted_calls(text)
    text = _MODULE.sub(lambda match: MODULES[match[1]], text)
    text = _PACKAGE.sub(lambda match: PACKAGES[match[1]], text)
    text = _DISTRIBUTION.sub(_distribution, text)
    text = _CORE.sub(_core, text)
    return _NEW.sub(r"\1 new", text)


def left(text: str) -> list[tuple[int, str]]:
    """Returns what is left to do in a text that was rewritten: numbers of lines, and what to do."""
    found = [(match.start(), todo) for regex, todo in LEFT for match in re.finditer(regex, text)]
    for match in _FROM.finditer(text):
        for name, bound in _imported(match["names"]):
            module, new = _home(match["module"], name, bound, text)
            if (module, new) != (match["module"], name):
                is_in = f"{new} is in {module}" if module else f"{name} is {new}"
                found.append((match.start(), f"{is_in}; split this import"))
    for match in re.finditer(r"\bgcore_core[ \t]+as[ \t]+(\w+)", text):
        for name in sorted(_uses(match[1], text) & set(CALLS)):
            found.append((match.start(), f"{name} is in gcore, of gcore-tools; import gcore"))
    for match in _CALLED.finditer(text):
        found.append((match.start(), f"{match['name']} is in gcore, of gcore-tools; import gcore"))
    for match in _launching(text).finditer(text):
        module = MOVED["gcore_core.kits.launching", match["name"]]
        found.append((match.start("name"), f"{match['name']} is in {module}"))
    for match in _CORE.finditer(text):
        needed = [CORE_EXTRAS[extra] for extra in _extras(match[1]) if extra in CORE_EXTRAS]
        if needed:
            found.append((match.start(), f"require {' and '.join(needed)} in place of {match[0]}"))
    return sorted({(text.count("\n", 0, start) + 1, todo) for start, todo in found})


def _from(match: re.Match[str], text: str) -> str:
    """Returns ``from ... import`` with each name from where it is, as several imports if need be.

    One that would be several, and has comments between its names, stays as it is.
    """
    imports: dict[str, list[str]] = {}
    for name, bound in _imported(match["names"]):
        module, new = _home(match["module"], name, bound, text)
        spelled = new if new == bound else f"{new} as {bound}"
        imports.setdefault(module, []).append(spelled)
    before, names, comment = match["before"], match["names"], match["comment"] or ""
    if list(imports) == [match["module"]] or not imports:
        return match[0]
    if len(imports) == 1 and "" not in imports:
        [module] = imports
        names = _NAME.sub(lambda one: _renamed(one, match["module"], text), names)
        return f"{before}from {module} {match['word']}{names}{comment}"
    if "#" in names:
        return match[0]
    lines = []
    for module, spelled_names in imports.items():
        start = f"from {module} import" if module else "import"
        lines.append(f"{before}{start} {', '.join(spelled_names)}{comment}")
    return _newline(text).join(lines)


def _renamed(one: re.Match[str], module: str, text: str) -> str:
    """Returns a name of an import as it is called now; the rest of the file knows it by the old."""
    if one["name"] is None:
        return one[0]  # a comment
    bound = one["bound"] or one["name"]
    _, new = _home(module, one["name"], bound, text)
    return one[0] if new == one["name"] else f"{new} as {bound}"


def _imported(names: str) -> list[tuple[str, str]]:
    """Returns the names of an import, each with what it is called in the file."""
    matches = [match for match in _NAME.finditer(names) if match["name"] is not None]
    return [(match["name"], match["bound"] or match["name"]) for match in matches]


def _home(module: str, name: str, bound: str, text: str) -> tuple[str, str]:
    """Returns where a name is imported from in 0.3, and by which name; "" for a package itself."""
    if module == "gcore_core.controllers" or module.startswith("gcore_core.controllers."):
        if name in PROGRAMS or name in RENAMED:
            return "gcore_core.kits.programs", RENAMED.get(name, name)
        if _is_kit(bound, text):
            return "gcore_core.kits", "programs"
    if (module, name) == ("gcore_core", "testing"):
        return "", "gcore_testing"
    return MOVED.get((module, name), module), name


def _import_as(match: re.Match[str], text: str) -> str:
    """Returns ``import ... as`` of what has all that the file uses of it; otherwise the same."""
    bound = match["bound"]
    if match["module"] != "gcore_core":
        return f"import gcore_core.kits.programs as {bound}" if _is_kit(bound, text) else match[0]
    uses = _uses(bound, text)
    if not uses <= set(CALLS) or (not uses and bound != "gcore"):
        return match[0]
    return "import gcore" if bound == "gcore" else f"import gcore as {bound}"


def _uses(bound: str, text: str) -> set[str]:
    """Returns the attributes of a module that a file uses."""
    return set(re.findall(rf"(?<![\w.]){bound}\.(\w+)", text))


def _is_kit(bound: str, text: str) -> bool:
    """Says whether a file uses of a module what the kit for step programs has, and that alone."""
    uses = _uses(bound, text)
    return bool(uses) and uses <= PROGRAMS | set(RENAMED)


def _rewrite_dotted_controllers(text: str) -> str:
    """Returns the text with ``gcore_core.controllers.window.Window`` and the like replaced."""

    def name(match: re.Match[str]) -> str:
        new = RENAMED.get(match["name"], match["name"])
        return f"gcore_core.kits.programs{match['dot']}{new}"

    def plain_import(match: re.Match[str]) -> str:
        if match["module"] == "gcore_core":
            return match[0]
        new = f"{match['before']}import gcore_core.kits.programs"
        is_used = re.search(rf"{re.escape(match['module'])}\.\w", text)
        return f"{match[0]}{_newline(text)}{new}" if is_used else new

    text, count = _CONTROLLERS.subn(name, text)
    return _IMPORT.sub(plain_import, text) if count else text


def _rewrite_dotted_calls(text: str) -> str:
    """Returns the text with ``gcore_core.train`` and the like replaced, if it imports the core."""

    def plain_import(match: re.Match[str]) -> str:
        if match["module"] != "gcore_core":
            return match[0]
        new = f"{match['before']}import gcore"
        return f"{match[0]}{_newline(text)}{new}" if _USED_CORE.search(text) else new

    if not any(match["module"] == "gcore_core" for match in _IMPORT.finditer(text)):
        return text
    text, count = _CALLED.subn(r"gcore.\g<name>", text)
    return _IMPORT.sub(plain_import, text) if count else text


def _launching(text: str) -> re.Pattern[str]:
    """Returns what finds names that left ``gcore_core.kits.launching`` where they are of it."""
    names = [name for module, name in MOVED if module == "gcore_core.kits.launching"]
    bound = ["launching", *re.findall(r"\blaunching as (\w+)", text)]
    of_module = rf"(?<!\w)(?:{'|'.join(bound)})\.|\blaunching import [^\n]*?\b"
    return re.compile(rf"(?:{of_module})(?P<name>{'|'.join(names)})(?!\w)")


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _extras(words: str | None) -> list[str]:
    return [extra.strip() for extra in (words or "").split(",") if extra.strip()]


def _distribution(match: re.Match[str]) -> str:
    """Returns the requirement of 0.3 for one of 0.2, its version left out."""
    old = match[1]
    extras = [EXTRAS.get((old, extra), extra) for extra in _extras(match[2])]
    if old in OWN_EXTRA:
        extras.insert(0, OWN_EXTRA[old])
    new = PACKAGES[old.replace("-", "_")].partition(".")[0].replace("_", "-")
    return f"{new}[{','.join(extras)}]" if extras else new


def _core(match: re.Match[str]) -> str:
    """Returns the requirement for the core with one extra; that with several would be several."""
    extras = _extras(match[1])
    return CORE_EXTRAS.get(extras[0], match[0]) if len(extras) == 1 else match[0]


def _files(path: Path) -> list[Path]:
    """Returns a file itself, and of a folder the files below it that may be rewritten."""
    if path.is_file():
        return [path]
    files = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name[0] != "." and name not in SKIPPED]
        files += [Path(folder, name) for name in names if Path(name).suffix in SUFFIXES]
    return sorted(file for file in files if file.is_file())


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
