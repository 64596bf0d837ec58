"""The plugin ``offline``: training on answers that rows have, without generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_algorithms.offline import config
from gcore_core import hookimpl
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.job_settings import POLICY, ROLLOUT
from gcore_core.contract.looking import Look
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.providers import (
    ControllerProvider,
    DatasetProvider,
    GeneratorProvider,
    ObjectiveProvider,
)
from gcore_core.contract.traits import traits_of

_TORCH = ("torch>=2.6",)
_CALLS = {
    "generator": frozenset({"generate"}),
    "trainer": frozenset({"prepare", "train", "save", "evaluate"}),
    "annotator": frozenset({"annotate"}),
}
_PARTS = frozenset({"generation", "objective"})
#: Step program -> what each of its rows has.
_ROWS_OF = {"sft": "an answer", "pairs": "two answers", "scores": "a scored answer"}
#: Objective -> the step program that it belongs to.
_PROGRAM_OF = {"sft": "sft", "dpo": "pairs", "bradley-terry": "pairs", "scalar": "scores"}
#: Step programs' readers: of an objective with values, and of others.
_READER_OF = {"bradley-terry": "texts", "scalar": "texts"}


@hookimpl
def gcore_controllers() -> Iterable[ControllerProvider]:
    for name, has in _ROWS_OF.items():
        yield ControllerProvider(
            name=name,
            summary=f"trains on rows with {has}; nothing is sampled, rewarded or pushed",
            factory=f"gcore_algorithms.offline.programs:{name.title()}Program",
            config=config.PairsConfig if name == "pairs" else config.OfflineConfig,
            calls=_CALLS,
            parts=_PARTS,
        )


@hookimpl
def gcore_datasets() -> Iterable[DatasetProvider]:
    yield DatasetProvider(
        name="chat",
        summary="JSON lines with answers: chats, prompts with completions, or plain texts",
        factory="gcore_algorithms.offline.dataset:ChatRows",
        config=config.RowsFileConfig,
    )
    yield DatasetProvider(
        name="pairs",
        summary="JSON lines with a chosen and a rejected answer, as texts or chats",
        factory="gcore_algorithms.offline.dataset:PairRows",
        config=config.RowsFileConfig,
    )
    yield DatasetProvider(
        name="scores",
        summary="JSON lines with an answer and its score",
        factory="gcore_algorithms.offline.dataset:ScoredRows",
        config=config.RowsFileConfig,
    )


@hookimpl
def gcore_generators() -> Iterable[GeneratorProvider]:
    yield GeneratorProvider(
        summary="reads answers of rows, as a policy would have sampled them",
        factory="gcore_algorithms.offline.reader:AnswerReader",
        config=config.AnswersConfig,
        needs=("transformers>=5.0",),
        columns=("label",),
    )
    yield GeneratorProvider(
        name="texts",
        summary="reads prompts with answers of rows, as a reward model sees them",
        factory="gcore_algorithms.offline.reader:TextReader",
        config=config.ReaderConfig,
        needs=("transformers>=5.0",),
        columns=("label",),
    )


@hookimpl
def gcore_objectives() -> Iterable[ObjectiveProvider]:
    yield ObjectiveProvider(
        name="sft",
        summary="negative log-prob of the trained tokens (supervised fine-tuning)",
        factory="gcore_algorithms.offline.objectives:Sft",
        config=config.SftConfig,
        needs=_TORCH,
    )
    yield ObjectiveProvider(
        name="dpo",
        summary="direct preference optimisation of pairs: sigmoid, hinge or IPO",
        factory="gcore_algorithms.offline.objectives:Dpo",
        config=config.DpoConfig,
        needs=_TORCH,
    )
    yield ObjectiveProvider(
        name="bradley-terry",
        summary="a reward model of pairs: the chosen answer's reward exceeds the other's",
        factory="gcore_algorithms.offline.objectives:BradleyTerry",
        config=config.BradleyTerryConfig,
        needs=_TORCH,
    )
    yield ObjectiveProvider(
        name="scalar",
        summary="a reward model of scored answers",
        factory="gcore_algorithms.offline.objectives:Scalar",
        config=config.ScalarConfig,
        needs=_TORCH,
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any], job: ResolvedJob) -> Iterable[str]:
    """Yields a problem where step program, reader, objective and trainer do not belong together."""
    program = _own(plan["controller"]["use"])
    objective = _own((plan.get("objective") or {}).get("use"))
    reader = _own(plan["roles"].get("rollout", {}).get("use"))
    if program is None:
        if reader is not None:
            yield (
                "roles.rollout.use: offline reads answers and samples none, and controller "
                f"{plan['controller']['use']} needs samples; take a controller of offline."
            )
        if objective is not None and objective != "sft":
            yield (
                f"objective.use: offline/{objective} needs a row's answers; set controller.use: "
                f"offline/{_PROGRAM_OF.get(objective, 'sft')}."
            )
        return
    if objective is not None and _PROGRAM_OF.get(objective, program) != program:
        yield (
            f"controller.use: offline/{objective} trains on rows with "
            f"{_ROWS_OF[_PROGRAM_OF[objective]]}; set it to offline/{_PROGRAM_OF[objective]}."
        )
    wanted = _READER_OF.get(objective or "", "default")
    if reader != wanted:
        use = "offline" if wanted == "default" else f"offline/{wanted}"
        yield f"roles.rollout.use: this run samples nothing; set it to {use}, which reads rows."
    if plan["placement"]["sleep_in_training"] == "always":
        yield "placement.sleep_in_training: a reader of rows cannot sleep; leave it out."
    trainer = job.provided[f"roles.{POLICY}"]
    if plan["evaluation"]["data"] and not traits_of(job.objects[f"roles.{POLICY}"]).evaluates:
        yield (
            f"evaluation.data: {trainer.reference}, which roles.{POLICY} uses, cannot compute a "
            "loss without an update; leave the evaluation out, or take another trainer."
        )


@hookimpl
def gcore_check_files(
    plan: Mapping[str, Any], here: bool, datasets: Mapping[str, Dataset]
) -> Iterable[str | Look]:
    """Yields problems with the models of this plugin's roles, and looks at them and at the rows."""
    from gcore_language.model_places import problems as model_problems
    from gcore_language.prompt_places import RowsOf, model_of, tokenizer_look

    yield from model_problems(plan, "offline", here, kind="files")
    reader = plan["roles"].get(ROLLOUT) or {}
    program = _own(plan["controller"]["use"])
    if _own(reader.get("use")) is None or program is None:
        return
    where, directory = model_of(plan, ROLLOUT)
    if directory is None:
        return
    yield tokenizer_look(where, directory, reader, sampled=False)
    from gcore_algorithms.offline.rows import nbytes_of_row

    for key, dataset in datasets.items():
        rows = RowsOf(plan, key, dataset)
        yield rows.look(
            "gcore_algorithms.offline.look:row_problems",
            directory,
            reader,
            answers=2 if program == "pairs" else 1,
            reader="texts" if _own(reader["use"]) == "texts" else "answers",
            config=dict(reader["config"]),
            long=rows.long(None, nbytes_of_row),
        )


def _own(use: str | None) -> str | None:
    """Returns the name of a provider of this plugin; None for those of others."""
    plugin, _, name = (use or "").partition("/")
    return (name or "default") if plugin == "offline" else None
