"""Makes questions that a judge will be asked about some rows, to look at them before a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from gcore_language.rows import rows_of_each_form

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.looking import Look
from gcore_core.contract.records import Prompt
from gcore_rewards.genrm.config import JudgeConfig, PairwiseConfig, PointwiseConfig, RubricConfig
from gcore_rewards.genrm.templates import MissingField, text_of

_CONFIGS: Mapping[str, type[JudgeConfig]] = {
    "default": PointwiseConfig,
    "rubric": RubricConfig,
    "pairwise": PairwiseConfig,
}
#: Stands for what is not known before a run: a completion, a criterion.
_ANY = "1"


def problems(plan: Mapping[str, Any], datasets: Mapping[str, Dataset]) -> Iterator[str | Look]:
    """Yields rows about which a judge cannot be asked, and looks at what it makes of others.

    plan: the resolved configuration.
    datasets: of the job, as ``gcore_check_files`` gets them.
    """
    for name, reward in plan.get("rewards", {}).items():
        plugin, _, provider = str(reward["use"]).partition("/")
        if plugin != "genrm":
            continue
        config = msgspec.convert(reward["config"], _CONFIGS[provider or "default"])
        questions = []
        for key, dataset in datasets.items():
            for row in _rows(dataset):
                try:
                    questions.append(_question(config, row, dataset[row["row"]].fields))
                except MissingField as error:
                    yield f"rewards.{name}.config: row {row['row']} of {key}: {error}."
        role = plan["roles"].get(reward.get("role") or "")
        if role and questions:
            yield from _look(plan, name, reward["role"], questions)


def _rows(dataset: Dataset) -> list[dict[str, Any]]:
    try:
        return rows_of_each_form(dataset)
    except GcoreError:
        return []  # told of the dataset


def _question(
    config: JudgeConfig, row: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a question as JSON. Raises MissingField where a field cannot be filled in."""
    prompt = Prompt(row=row["row"], text=row.get("text"), messages=row.get("messages"))
    values = dict.fromkeys(config.places(), _ANY) | {"prompt": text_of(prompt)}
    asked = config.make_form().fill(values, fields)
    return {"row": prompt.row, "text": asked.text, "messages": asked.messages}


def _look(
    plan: Mapping[str, Any], reward: str, role: str, questions: list[dict[str, Any]]
) -> Iterator[Look]:
    """Yields a look at questions, where the judge's generator has a chat template."""
    judge = plan["roles"][role]
    config = judge.get("config") or {}
    model = judge.get("model") or plan["roles"].get(judge.get("follows") or "", {}).get("model")
    if "chat_template_kwargs" not in config or not (model or {}).get("path"):
        return
    yield Look(
        where=f"rewards.{reward}",
        python=judge.get("python"),
        function="gcore_language.prompt_look:row_problems",
        arguments={
            "where": f"rewards.{reward}.config",
            "what": "its question about row",
            "role": f"roles.{role}",
            "path": str(model["path"]),
            "revision": model.get("revision"),
            "trust_remote_code": bool(config.get("trust_remote_code")),
            "template_kwargs": dict(config["chat_template_kwargs"]),
            "rows": questions,
        },
        files=(str(model["path"]),),
    )
