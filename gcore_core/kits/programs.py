"""Step programs, and the parts that they are made of.

A step program is a class with an async ``run()``, made from its config and a ``ControllerContext``.
It derives from ``StepProgram`` and says what a ``step`` is. A name is loaded when it is first used,
since a check reads settings alone and must be quick.

StepProgram: what all programs share: ``run``, ``take``, ``train`` and ``end``.
ControllerContext: facts of the job, peers, agreements, algorithms.
SyncConfig: the settings of all parts; a program's own settings derive from it.
Stopwatch: the seconds of a step's stages.
Producer: groups from their leases to their verdicts; a step takes them.
StepBatch: what a step takes.
Schedule: which groups are begun, and which a step takes; a program makes it.
InStep: the schedule of a step that draws what it trains on.
Ahead: the schedule of a program that draws the next steps while it trains.
Bounds, Membership, GroupReport: what ``Ahead`` is made with, what it takes, and what it is told.
Evaluates, LossEvaluation: an evaluation of another kind than held-out prompts.
KeepRate, by_quarter: how many groups to issue where some will be dropped.
deal: cuts leases into parts that replicas work off.
keep_rate: the module of ``KeepRate``, for those who compile its functions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore_core.controllers import keep_rate as keep_rate
    from gcore_core.controllers.config import SyncConfig as SyncConfig
    from gcore_core.controllers.context import ControllerContext as ControllerContext
    from gcore_core.controllers.evaluation import Evaluates as Evaluates
    from gcore_core.controllers.evaluation import LossEvaluation as LossEvaluation
    from gcore_core.controllers.generation.ahead import Ahead as Ahead
    from gcore_core.controllers.generation.in_step import InStep as InStep
    from gcore_core.controllers.generation.producer import Producer as Producer
    from gcore_core.controllers.generation.producer import StepBatch as StepBatch
    from gcore_core.controllers.generation.schedule import Bounds as Bounds
    from gcore_core.controllers.generation.schedule import GroupReport as GroupReport
    from gcore_core.controllers.generation.schedule import Membership as Membership
    from gcore_core.controllers.generation.schedule import Schedule as Schedule
    from gcore_core.controllers.generation.split_requests import deal as deal
    from gcore_core.controllers.keep_rate import KeepRate as KeepRate
    from gcore_core.controllers.keep_rate import by_quarter as by_quarter
    from gcore_core.controllers.step_program import StepProgram as StepProgram
    from gcore_core.controllers.tracing import Stopwatch as Stopwatch

#: name -> the module of ``gcore_core.controllers`` that has it
_HOMES = {
    "Ahead": "generation.ahead",
    "Bounds": "generation.schedule",
    "ControllerContext": "context",
    "Evaluates": "evaluation",
    "GroupReport": "generation.schedule",
    "InStep": "generation.in_step",
    "KeepRate": "keep_rate",
    "LossEvaluation": "evaluation",
    "Membership": "generation.schedule",
    "Schedule": "generation.schedule",
    "StepBatch": "generation.producer",
    "StepProgram": "step_program",
    "Stopwatch": "tracing",
    "SyncConfig": "config",
    "Producer": "generation.producer",
    "by_quarter": "keep_rate",
    "deal": "generation.split_requests",
}

__all__ = [*_HOMES, "keep_rate"]


def __getattr__(name: str) -> Any:
    if name == "keep_rate":
        return importlib.import_module("gcore_core.controllers.keep_rate")
    if name in _HOMES:
        return getattr(importlib.import_module(f"gcore_core.controllers.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
