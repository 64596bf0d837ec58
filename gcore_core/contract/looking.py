"""Defines how ``gcore_check_files`` has something looked at that needs an engine's libraries.

The process that reads the configuration imports no engine. So a plugin yields a ``Look``, whose
function is called in a helper process of the interpreter that the role's workers will have. That is
done by ``gcore_answer_looks``, which gcore-tools has; without it nobody looks.
All looks of an interpreter share one process, so its libraries are imported once. Where nothing was
found wrong, that answer is kept in the user's cache, with its notes and facts, and the function is
not called again until something that it depends on changes.

    yield Look(
        where="roles.policy.model",
        python=role["python"],
        function="my_module.looks:template_problems",
        arguments={"where": "roles.policy.model", "path": path, "rows": rows},
        files=(f"{path}/config.json",),
    )
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Note(str):
    """What a look says that keeps no job from running: ``g-core check`` prints it, and a run shows
    it when it starts. A function yields it among its problems.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Fact:
    """A number that a look has counted, for what backends say of their memory
    (``WorkerShape.facts``). A function yields it among its problems.

    name: such as "prompt_tokens". Of several with one name the largest counts.
    """

    name: str
    value: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What looks found, in their order, each with its plugin's name.

    notes: what keeps no job from running, each once.
    facts: name -> the largest number that a look has counted.
    """

    problems: Sequence[str] = ()
    notes: Sequence[str] = ()
    facts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Look:
    """Names a function that finds problems in a helper process, and what its answer depends on.

    where: config path that its problems begin with, such as "roles.policy.model". One that does not
        begin with it gets it in front.
    function: ``"module:function"``, called as ``function(arguments) -> Iterable[str | Fact]``. It
        yields problems as ``gcore_check_files`` does, notes (``Note``) and facts (``Fact``). It may
        raise: a ``GcoreError`` becomes a problem in its own words. It must not download, and what
        it prints is not shown.
    python: the interpreter that calls it, as a job names one: a path or ``venv:NAME``; None or "":
        the one that reads the job.
    arguments: what the function is called with, plain JSON values; numbers may be NaN.
    files: paths of files that the function reads. A directory stands for the files right in it; a
        path may also name nothing yet. Python files that are imported need not be named.
    """

    where: str
    function: str
    python: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """Returns the reasons why this look is not valid; none when it is."""
        problems = []
        if not self.where:
            problems.append("where: names no config path")
        if not all(self.function.rpartition(":")[::2]):
            problems.append(f"function: {self.function!r} is not module:function")
        try:
            json.dumps(dict(self.arguments))
        except (TypeError, ValueError) as error:
            problems.append(f"arguments: no plain JSON: {error}")
        return problems
