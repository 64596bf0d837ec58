"""Says before a run which rows a language model could not answer.

Light: neither torch nor transformers. Plugins ask in ``gcore_check_files``. What can be seen of a
row's turns is said at once; what its tokenizer and its chat template make of it, a look says
(``gcore_language.prompt_look``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.job_settings import ROLLOUT
from gcore_core.contract.looking import Look
from gcore_core.contract.records import Prompt
from gcore_language.end_ids import FILES
from gcore_language.model_places import directory_here, position_limit
from gcore_language.rows import longest_rows, nbytes_of_prompt, rows_of_each_form
from gcore_language.turns import problem_of

#: At most so many rows of a dataset are told.
MOST_TOLD = 5
#: So many of the longest rows are looked at.
_LONGEST = 300
#: So many of the longest rows have their tokens counted in any case.
_COUNTED = 20
#: What a template may add to a prompt, in tokens.
_TEMPLATE_TOKENS = 256


def problems(
    plan: Mapping[str, Any], plugin: str, datasets: Mapping[str, Dataset]
) -> Iterator[str | Look]:
    """Yields problems with what a plugin's generators are asked, and looks at it.

    plan: the resolved configuration.
    plugin: name of the plugin; its generators sample by ``gcore_language.prompts``.
    datasets: of the job, as ``gcore_check_files`` gets them.
    """
    for name, role in plan["roles"].items():
        config = role.get("config") or {}
        # else it is a trainer
        if role["use"].partition("/")[0] == plugin and "chat_template_kwargs" in config:
            yield from _of_generator(plan, name, role, datasets if name == ROLLOUT else {})


def _of_generator(
    plan: Mapping[str, Any], name: str, role: Mapping[str, Any], datasets: Mapping[str, Dataset]
) -> Iterator[str | Look]:
    where, directory = model_of(plan, name)
    if directory is not None:
        yield tokenizer_look(where, directory, role, sampled=True)
        config = role["config"]
        if config.get("stop") or config["chat_template_kwargs"]:
            yield Look(
                where=f"roles.{name}.config",
                python=role.get("python"),
                function="gcore_language.prompt_look:setting_problems",
                arguments={
                    **_opened(directory, role),
                    "where": f"roles.{name}.config",
                    "stop": list(config.get("stop") or ()),
                },
                files=(str(directory),),
            )
    for key, dataset in datasets.items():
        of_rows = RowsOf(plan, key, dataset)
        yield from of_rows.malformed(sampled=True)
        if directory is None or not of_rows.forms:
            continue
        limit = _limit(directory, role["config"])
        long = of_rows.long(limit)
        yield of_rows.look(
            "gcore_language.prompt_look:row_problems",
            directory,
            role,
            role=f"roles.{name}",
            what="row",
            limit=limit,
            long=long,
            all_long=len(long) < _LONGEST,
            answer_tokens=role["config"].get("max_new_tokens"),
            count=len(dataset),
            drops=(plan["controller"].get("config") or {}).get("too_long") != "error",
        )


def reading_problems(
    plan: Mapping[str, Any],
    reward: str,
    path: str,
    config: Mapping[str, Any],
    datasets: Mapping[str, Dataset],
) -> Iterator[Look]:
    """Yields looks at what a reward model reads of the rows, with an answer to each.

    reward: its config path.
    path: its model, a directory or a name on the hub.
    """
    directory = directory_here(path)
    if directory is None:
        return
    reader = {"config": config}
    yield tokenizer_look(f"{reward}.config.path", directory, reader, sampled=False)
    for key, dataset in datasets.items():
        of_rows = RowsOf(plan, key, dataset)
        list(of_rows.malformed(sampled=False))  # what samples the rows tells them
        if of_rows.forms:
            written = "gcore_language.prompt_look:written_problems"
            yield of_rows.look(written, directory, reader, role=reward)


class RowsOf:
    """Rows of one dataset that stand for all.

    where: config path of what names the data.
    forms: a row of each form, without those that ``malformed`` has told.
    """

    def __init__(self, plan: Mapping[str, Any], key: str, dataset: Dataset) -> None:
        section: Any = plan
        for part in key.split("."):
            section = section[part]
        has_path = "path" in (section.get("config") or {})
        self.where = f"{key}.config.path" if has_path else f"{key}.config"
        self.forms: list[dict[str, Any]] = []
        self._key = key
        self._dataset = dataset
        self._broken = ""
        try:
            self.forms = rows_of_each_form(dataset)
        except GcoreError as error:
            self._broken = error.sentence()

    def look(
        self, function: str, directory: Path, reader: Mapping[str, Any], /, **arguments: Any
    ) -> Look:
        """Returns a look at the rows through the tokenizer of a model.

        reader: what reads them, a role or a reward of the plan.
        arguments: what the function gets besides the rows and how the tokenizer is opened.
        """
        of_all = {**_opened(directory, reader), "where": self.where, "rows": self.forms}
        return _look(self._key, function, directory, reader, {**of_all, **arguments})

    def malformed(self, *, sampled: bool) -> Iterator[str]:
        """Yields a problem for rows whose turns no template could write, and for one that is none.

        sampled: whether a model is to write the turn behind those of a row.
        """
        if self._broken:
            yield f"{self.where}: {self._broken}."
        told = []
        whole = []
        for row in self.forms:
            turns = row.get("messages")
            problem = "" if turns is None else problem_of(turns, sampled=sampled)
            if problem:
                told.append(f"{self.where}: row {row['row']}: {problem}.")
            else:
                whole.append(row)
        yield from first_of(told, self.where)
        self.forms = whole

    def long(
        self, limit: int | None, nbytes_of: Callable[[Prompt], int] = nbytes_of_prompt
    ) -> list[dict[str, Any]]:
        """Returns the longest rows: all that may have more tokens than a limit, and a few others.

        limit: None: no row is too long.
        nbytes_of: how many bytes of text of a row count.
        """
        over = sys.maxsize if limit is None else max(0, limit - _TEMPLATE_TOKENS)
        try:
            return longest_rows(self._dataset, over, _LONGEST, _COUNTED, nbytes_of)
        except GcoreError:
            return []  # of a row that is told, or that was not read for its form


def first_of(problems: Sequence[str], where: str) -> Iterator[str]:
    """Yields the first problems, and how many others there are."""
    yield from problems[:MOST_TOLD]
    if len(problems) > MOST_TOLD:
        yield f"{where}: {len(problems) - MOST_TOLD} other forms of rows cannot be used either."


def tokenizer_look(
    where: str, directory: Path, reader: Mapping[str, Any], *, sampled: bool
) -> Look:
    """Returns a look at a model's tokenizer.

    where: config path that names the model.
    reader: as ``RowsOf.look`` has it.
    sampled: whether answers are sampled with it.
    """
    function = "gcore_language.prompt_look:tokenizer_problems"
    arguments = {**_opened(directory, reader), "sampled": sampled}
    return _look(where, function, directory, reader, arguments)


def _look(
    where: str,
    function: str,
    directory: Path,
    reader: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Look:
    return Look(
        where=where,
        python=reader.get("python"),
        function=function,
        arguments=arguments,
        files=(str(directory),),
    )


def _opened(directory: Path, reader: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of looks that say how a tokenizer is opened."""
    config = reader["config"]
    return {
        "directory": str(directory),
        "trust_remote_code": bool(config.get("trust_remote_code")),
        "template_kwargs": dict(config.get("chat_template_kwargs") or {}),
    }


def model_of(plan: Mapping[str, Any], role: str) -> tuple[str, Path | None]:
    """Returns the setting that names a role's model, and its directory; None: it is not here.

    A generator without a model of its own has that of the role which it follows.
    """
    model = plan["roles"][role].get("model") or {}
    followed = plan["roles"][role].get("follows")
    if not model and followed:
        role = followed
        model = plan["roles"][role].get("model") or {}
    path = str(model.get("path") or "")
    where = f"roles.{role}.model.{'make' if 'make' in model else 'path'}"
    return where, directory_here(path, model.get("revision")) if path else None


def _limit(directory: Path, config: Mapping[str, Any]) -> int | None:
    """Returns how many tokens of prompt and answer a generator takes; None where that is open."""
    own = config.get("context_length")
    try:
        settings = json.loads((directory / FILES[0]).read_text(encoding="utf-8"))
        settings = settings.get("text_config", settings)
        models = position_limit(settings)
    except (OSError, ValueError, AttributeError, RecursionError):
        models = None  # a look at the model says why
    limits = [limit for limit in (own, models) if isinstance(limit, int) and limit > 0]
    return min(limits, default=None)
