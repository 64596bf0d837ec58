"""Kinds J to L: asynchrony and versions, resuming and the optimizer, seeds, ends and rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gcore_testing.museum import Exhibit, Expected, Scene

from gcore_core.contract.records import FINISHED, TRUNCATED

#: Samples of one prompt that are equal although that is all but impossible.
TWINS = "equal samples"
ORDINALS = "ordinals of steps"
#: Answers whose reward a person has written down.
KNOWN = "known rewards"
_SAVED = ("run.steps=2", "checkpoint.every=1")
_GOES_ON = ("run.steps=4",)


def _begins_at(scene: Scene, shift: Callable[[int], int]) -> None:
    """A run that goes on takes another place in the data than it had."""

    def make(init: Callable[..., None]) -> Callable[..., None]:
        def planted(self: Any, **arguments: Any) -> None:
            place = arguments.get("base", 0)
            if place:
                scene.act()
            init(self, **arguments | {"base": shift(place)})

        return planted

    scene.wrap("gcore_core.controllers.generation.in_step:InStep.__init__", make)


def _other_rows(scene: Scene) -> None:
    """The dataset of the resumed run has its rows in another order."""

    def make(item: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, row: int) -> Any:
            import msgspec

            scene.act()
            return msgspec.structs.replace(item(self, len(self) - 1 - row), row=row)

        return planted

    scene.wrap("gcore_core.builtin.json_lines:JsonLines.__getitem__", make)


def _finishing(scene: Scene, change: Callable[[Any, Any], Any]) -> None:
    """Changes the records that a generator finishes: ``change(generator, finished)``."""

    def make(finish: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, *arguments: Any) -> Any:
            finished = finish(self, *arguments)
            changed = change(self, finished)
            if changed is not finished:
                scene.act()
            return changed

        return planted

    scene.wrap("gcore_torch.generator:TorchGenerator._finish", make)


def _labelled_ahead(generator: Any, finished: Any) -> Any:
    if not generator.version:
        return finished
    return dataclasses.replace(finished, versions=(generator.version - 1,) * 2)


def _end_reason_lost(generator: Any, finished: Any) -> Any:
    if finished.status != TRUNCATED:
        return finished
    return dataclasses.replace(finished, status=FINISHED, reason="")


def _one_seed(scene: Scene) -> None:
    """All samples draw the same random numbers."""

    def make(uniforms: Callable[..., Any]) -> Callable[..., Any]:
        def planted(seeds: Any, positions: Any) -> Any:
            import numpy as np

            scene.act()
            return uniforms(np.zeros_like(seeds), positions)

        return planted

    scene.wrap("gcore_torch.generator:uniforms", make)


def _errors_are_zeros(scene: Scene) -> None:
    """A reward that fails gives 0 in place of a failure."""

    def make(score: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, record: Any) -> Any:
            from gcore_core.contract.scorer import Score

            if record.sample != 1:
                return score(self, record)
            scene.act()
            return Score(value=0.0)

        return planted

    scene.wrap("gcore_core.builtin.function_reward:FunctionScorer._score_one", make)


def _masters_not_refreshed(scene: Scene) -> None:
    """The optimizer's own copies are those of before the load; its next step writes them back."""
    masters: dict[str, Any] = {}

    def load(original: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, directory: Any) -> Any:
            masters.update({n: t.detach().clone() for n, t in self._tensors.items()})
            return original(self, directory)

        return planted

    def update(original: Callable[..., float]) -> Callable[..., float]:
        def planted(self: Any, rate: float, clip: float) -> float:
            import torch

            if masters:
                scene.act()
                with torch.no_grad():
                    for name, master in masters.items():
                        self._tensors[name].copy_(master)
                masters.clear()
            return original(self, rate, clip)

        return planted

    scene.wrap("gcore_torch.engine:TorchEngine.load", load)
    scene.wrap("gcore_torch.engine:TorchEngine.update", update)


EXHIBITS = (
    Exhibit(
        id="masters-not-refreshed",
        thread="SkyRL#2149",
        kind="K",
        fault="Loading leaves the optimizer's own copies of the weights old; its next step writes"
        " them back.",
        shown="nothing",
        plant=_masters_not_refreshed,
        overrides=_SAVED,
        resumed=_GOES_ON,
        expected=Expected(
            detector="bound of an update",
            error="TrainingError",
            names=("step 2", "AdamW", "optimizer keeps copies"),
        ),
    ),
    Exhibit(
        id="version-counts-calls",
        thread="UniRL#324",
        kind="J",
        fault="The stamp of a version counts calls, and is one behind the weights.",
        shown="nothing",
        plant=lambda scene: _finishing(scene, _labelled_ahead),
        expected=Expected(
            detector="version of a record",
            error="WeightMismatch",
            names=("step 1", "rollout.0", "version 1", "behind the weights"),
        ),
    ),
    Exhibit(
        id="one-seed-for-all",
        thread="ms-swift#7858",
        kind="L",
        fault="All samples of a prompt draw the same random numbers, so they are equal.",
        shown="nothing",
        plant=_one_seed,
        expected=Expected(
            detector=TWINS, error="RecordMismatch", names=("step 0", "random numbers")
        ),
    ),
    Exhibit(
        id="end-reason-lost",
        thread="OpenRLHF#1327",
        kind="L",
        fault="Answers that were cut off are told as ended by themselves.",
        shown="a low share of truncated answers",
        plant=lambda scene: _finishing(scene, _end_reason_lost),
        expected=Expected(
            detector="tokens that end answers", error="RecordMismatch", names=("cut off", "record")
        ),
    ),
    Exhibit(
        id="errors-are-zeros",
        thread="ToRL#27",
        kind="L",
        fault="A verifier that fails gives reward 0, as for a wrong answer.",
        shown="three layers hid it; 61.7% of runs",
        plant=_errors_are_zeros,
        overrides=("rewards.digits.known=known.jsonl",),
        expected=Expected(
            detector=KNOWN, error="RecordMismatch", names=("rewards.digits", "known", "error")
        ),
    ),
    Exhibit(
        id="place-not-restored",
        thread="open-instruct#1523",
        kind="K",
        fault="The place in the data is saved and not restored: prompts are trained on again.",
        shown="nothing",
        plant=lambda scene: _begins_at(scene, lambda place: 0),
        overrides=_SAVED,
        resumed=_GOES_ON,
        expected=Expected(
            detector=ORDINALS, error="RecordMismatch", names=("step 2", "trained on before")
        ),
    ),
    Exhibit(
        id="rows-skipped",
        thread="NeMo-RL#2519",
        kind="K",
        fault="After a resume the first rows are skipped.",
        shown="nothing",
        plant=lambda scene: _begins_at(scene, lambda place: 2 * place),
        overrides=_SAVED,
        resumed=_GOES_ON,
        expected=Expected(
            detector=ORDINALS, error="RecordMismatch", names=("step 2", "never trained on")
        ),
    ),
    Exhibit(
        id="other-rows",
        thread="NeMo-RL#2519",
        kind="K",
        fault="The run goes on with other rows under the same path.",
        shown="nothing",
        plant=_other_rows,
        overrides=_SAVED,
        resumed=_GOES_ON,
        expected=Expected(detector="rows at a resume", error="DataError", names=("row 0",)),
    ),
    Exhibit(
        id="resumed-with-other-shards",
        thread="verl#1129",
        kind="K",
        fault="The run goes on with another number of controllers; every ordinal still comes once.",
        shown="asked whether it is a fault; it is not",
        plant=lambda scene: _begins_at(scene, lambda place: place),
        overrides=_SAVED,
        resumed=(*_GOES_ON, "controller.shards=4"),
        expected=Expected(detector="nothing"),
        control=True,
    ),
)
