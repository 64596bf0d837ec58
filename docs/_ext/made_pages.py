"""Makes tables of reference pages from the code when the site is built, and pages of READMEs.

A page names a table by a block.
The block's first sentence is for a person who reads the plain file. The site leaves it out.
A line "- `name` words" of the block adds these words to the row of that name.

    ```{made} keys run
    The site has the table of keys here: `tox run -e pages` builds it.
    - `run.patience_s` see [patience](#patience)
    ```

The page of a distribution is its README. It is written beside the other pages and never committed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import os
import re
import sys
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_testing.plugin_commands.descriptions import field_help

from gcore_core import cli
from gcore_core.config.schema import core_keys
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.job_settings import MISSING, JobSettings

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```\{made\} ([\w ]+)\n(.*?)^```$", re.M | re.S)
NOTE = re.compile(r"^- `([^`]+)` (.+)$", re.M)


def expand(text: str) -> str:
    """Returns a page with each of its blocks replaced by what the block names.

    Raises ValueError where a note is of a name that has no row.
    """

    def made(block: re.Match[str]) -> str:
        part, *words = block[1].split()
        notes = dict(NOTE.findall(block[2]))
        lines = "\n".join(PARTS[part](words, notes))
        if notes:
            raise ValueError(f"{{made}} {block[1]}: no row of the name {', '.join(notes)}")
        return lines

    return BLOCK.sub(made, text)


def table(
    head: tuple[str, ...], rows: Iterable[tuple[str, ...]], notes: dict[str, str]
) -> Iterator[str]:
    """Yields the lines of a table, whose first cells are code.

    notes: what is added to the row of a name; what was added is taken out.
    """
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for name, *cells in rows:
        if name in notes:
            cells[-1] = f"{cells[-1].removesuffix('.')}; {notes.pop(name)}"
        shown = [f"`{name}`", *(cell.replace("|", "\\|") for cell in cells)]
        yield f"| {' | '.join(shown)} |"


# -- keys ------------------------------------------------------------------------------------------


def keys(sections: list[str], notes: dict[str, str]) -> Iterator[str]:
    """Yields the table of the core's keys in these sections of a job."""
    return table(
        ("key", "default", "meaning"),
        (
            (key.replace("*", "<name>"), f"`{shown_default(default)}`", help_of(key))
            for section in sections
            for key, default in core_keys().items()
            if key.partition(".")[0] == section
        ),
        notes,
    )


def shown_default(default: Any) -> str:
    words = {"None": "null", MISSING: "must be given", "True": "true", "False": "false"}
    return words.get(str(default), str(default))


def help_of(key: str) -> str:
    """Returns the text under the field that declares a key of the core.

    Raises ValueError where there is none.
    """
    cls: type = JobSettings
    *sections, name = key.split(".")
    for section in sections:
        if section != "*":
            cls = settings_class(typing.get_type_hints(cls)[section])
    text = field_help(cls).get(name, "")
    if not text:
        raise ValueError(f"{key}: write what it means under {cls.__name__}.{name}")
    return text.replace("``", "`").removesuffix(".")


def settings_class(hint: Any) -> type:
    """Returns the class of settings that a type hint holds, such as Role for dict[str, Role]."""
    (cls,) = (one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one))
    return typing.cast(type, cls)


# -- commands --------------------------------------------------------------------------------------


@functools.cache
def all_commands() -> dict[str, tuple[str, str]]:
    """Returns each command's summary and ``--help``: the core's, then those of plugins."""
    return {**verbs(), **plugin_commands()}


def commands(words: list[str], notes: dict[str, str]) -> Iterator[str]:
    """Yields the table of all commands."""
    rows = ((name, summary) for name, (summary, _) in all_commands().items())
    return table(("command", "does"), rows, notes)


def options(words: list[str], notes: dict[str, str]) -> Iterator[str]:
    """Yields what ``--help`` prints of each command."""
    for name, (_, help_text) in all_commands().items():
        if help_text:
            yield from (f"### {name}", "", "```text", help_text, "```", "")


def verbs() -> dict[str, tuple[str, str]]:
    """Returns the core's commands: name -> what it does, and its help."""
    return {
        f"g-core {verb}": (summary, help_by(cli.main, [verb, "--help"]))
        for verb, summary in cli.VERBS.items()
    }


def plugin_commands() -> dict[str, tuple[str, str]]:
    """Returns the commands of all plugins of the repository: name -> what it does, and its help.

    A command that needs a package that is not installed here has no help.
    """
    found = {}
    for plugin, folder, module in plugin_modules():
        for spec in module.gcore_commands():
            name = f"g-core {plugin} {spec.name}".removesuffix(" default")
            owner = f"[{folder.name}](../../{folder.relative_to(ROOT)}/README.md)"
            try:
                help_text = help_by(import_attribute(spec.factory), ["--help"])
            except GcoreError:
                help_text = ""
            found[name] = (f"{spec.summary} ({owner})", help_text)
    return found


def plugin_modules() -> Iterator[tuple[str, Path, Any]]:
    """Yields name, folder and module of each plugin of the repository that has commands."""
    projects = [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("contrib/*/pyproject.toml")]
    for project in sorted(projects, key=lambda project: project.parent.name):
        described = tomllib.loads(project.read_text("utf-8"))["project"]
        for plugin, name in described.get("entry-points", {}).get("gcore", {}).items():
            file = project.parent.joinpath(*name.split("."))
            source = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            if "def gcore_commands" in source.read_text("utf-8"):
                yield plugin, project.parent, importlib.import_module(name)


def help_by(command: Callable[[list[str]], Any], words: list[str]) -> str:
    """Returns what a command prints and ends with."""
    printed = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            command(words)
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return printed.getvalue().strip()


# -- messages, tables of plugins -------------------------------------------------------------------


def errors(words: list[str], notes: dict[str, str]) -> Iterator[str]:
    """Yields every message that the test of messages holds, word for word."""
    file = ROOT / "tests/unit/error_messages.json"
    for section, cases in json.loads(file.read_text("utf-8")).items():
        yield from (f"## {section}", "")
        for name, told in cases.items():
            yield from (f"### {name[0].upper()}{name[1:]}", "")
            yield from (f"`{told['class']}`, exit code {told['exit_code']}", "")
            yield from ("```text", *told["message"], "```", "")


def migration(words: list[str], notes: dict[str, str]) -> Iterator[str]:
    """Yields what becomes of each key of another trainer, verl or trl."""
    (trainer,) = words
    rules = importlib.import_module(f"gcore_migrate.{trainer}").RULES
    rows = importlib.import_module("gcore_migrate.commands").rows_of(rules)
    return table((trainer, "here"), map(tuple, rows), notes)


def museum(words: list[str], notes: dict[str, str]) -> Iterator[str]:
    """Yields the exhibits of the museum, kind by kind."""
    exhibits = importlib.import_module("tests.museum.exhibits").ALL
    for kind, title in importlib.import_module("gcore_testing.museum").KINDS.items():
        yield from (f"## {kind}: {title}", "")
        for exhibit in (one for one in exhibits if one.kind == kind):
            names = ", ".join(f"`{text}`" for text in exhibit.expected.names)
            yield from (f"### {exhibit.id}", "", exhibit.fault, "")
            yield f"- reported: {exhibit.thread}"
            yield f"- shown then: {exhibit.shown}"
            if exhibit.control:
                yield "- expected: nothing, since it is a negative control"
            else:
                yield f"- found by: {exhibit.expected.detector}"
                yield f"- error: `{exhibit.expected.error}`, which names {names}"
            yield ""


PARTS: dict[str, Callable[[list[str], dict[str, str]], Iterator[str]]] = {
    "keys": keys,
    "commands": commands,
    "options": options,
    "errors": errors,
    "migration": migration,
    "museum": museum,
}


# -- pages of READMEs ------------------------------------------------------------------------------


def readme_pages() -> dict[str, str]:
    """Returns the page of each distribution: its name -> the text that includes its README."""
    readmes = [*ROOT.glob("plugins/*/README.md"), *ROOT.glob("contrib/*/README.md")]
    return {
        readme.parent.name: f"```{{include}} ../../{readme.relative_to(ROOT)}\n"
        ":relative-docs: .\n:relative-images:\n```\n"
        for readme in sorted(readmes)
    }


# -- Sphinx ----------------------------------------------------------------------------------------


def write_readme_pages(app: Sphinx) -> None:
    """Called by Sphinx before it looks for pages."""
    folder = Path(app.srcdir) / "plugins"
    pages = readme_pages()
    for file in folder.glob("gcore-*.md"):
        if file.stem not in pages:
            file.unlink()
    for name, text in pages.items():
        file = folder / f"{name}.md"
        if not file.exists() or file.read_text("utf-8") != text:
            file.write_text(text, encoding="utf-8")


def expand_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Called by Sphinx with the text of each page, which it may change."""
    source[0] = expand(source[0])


def always_outdated(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Called by Sphinx for pages that are read again although their files have not changed."""
    return [
        name for name in env.found_docs if BLOCK.search(Path(env.doc2path(name)).read_text("utf-8"))
    ]


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx when conf.py names this extension."""
    folders = [ROOT, *sorted(ROOT.glob("plugins/*")), *sorted(ROOT.glob("contrib/*"))]
    sys.path.extend(map(str, folders))  # of the repository, not installed
    app.connect("builder-inited", write_readme_pages)
    app.connect("source-read", expand_source)
    app.connect("env-get-outdated", always_outdated)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
