"""Kinds H and I: the loss, and the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gcore_testing.museum import Exhibit, Expected, Scene

from tests.museum.exhibits.weights import RESPLIT

REFERENCE = "reference at the first updates"
RATIOS = "first and second ratio"
TRAINER = "gcore_language.training:LanguageTrainer"


def _old_log_probs_anew(scene: Scene) -> None:
    """Old log-probs are those of the present weights, for every minibatch."""

    def make(loss: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, pass_: Any, batch: Any, logp: Any, entropies: Any) -> Any:
            if not pass_.first:
                scene.act()
                batch.columns["old_logp"] = logp.detach()
            return loss(self, pass_, batch, logp, entropies)

        return planted

    scene.wrap(f"{TRAINER}._loss", make)


def _objective(scene: Scene, change: Callable[[Any, Any, Any], Any]) -> None:
    """Changes the sum of losses of a micro-batch.

    change: given (loss_sum, weight_sum, columns), returns another loss_sum.
    """

    def make(loss: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, columns: Any, current: Any) -> Any:
            loss_sum, weight_sum, metrics = loss(self, columns, current)
            scene.act()
            return change(loss_sum, weight_sum, columns), weight_sum, metrics

        return planted

    scene.wrap("gcore_algorithms.objectives:PpoClip.loss", make)


def _mean_of_means(loss_sum: Any, weight_sum: Any, columns: Any) -> Any:
    """A micro-batch's mean, as if every micro-batch had 100 tokens."""
    return loss_sum / weight_sum * 100


def _micro_batch_whitened(scene: Scene) -> None:
    """Advantages are normalised in every micro-batch, over whatever it holds."""

    def make(loss: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, columns: Any, current: Any) -> Any:
            scene.act()
            advantage = columns["advantage"]
            centred = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
            return loss(self, {**columns, "advantage": centred}, current)

        return planted

    scene.wrap("gcore_algorithms.objectives:PpoClip.loss", make)


def _sign_flipped(loss_sum: Any, weight_sum: Any, columns: Any) -> Any:
    return -loss_sum


def _reference(scene: Scene, change: Callable[[Any], None]) -> None:
    """Changes the reference when the engine has been made."""

    def make(init: Callable[..., None]) -> Callable[..., None]:
        def planted(self: Any, *arguments: Any) -> None:
            init(self, *arguments)
            if self._reference is not None:
                scene.act()
                change(self)

        return planted

    scene.wrap("gcore_torch.engine:TorchEngine.__init__", make)


def _base_weights(engine: Any) -> None:
    """The reference lacks what was tuned before: here, a tenth of its output projection."""
    import torch

    with torch.no_grad():
        engine._reference.model.lm_head.weight.mul_(0.9)


def _shared_storage(engine: Any) -> None:
    engine._reference = engine._policy


EXHIBITS = (
    Exhibit(
        id="reference-of-other-weights",
        thread="trl#1340",
        kind="I",
        fault="The reference is the base model, not the tuned policy that the run begins with.",
        shown="a high KL at the beginning",
        plant=lambda scene: _reference(scene, _base_weights),
        overrides=("objective.config.kl.coefficient=0.1",),
        expected=Expected(detector=REFERENCE, error="TrainingError", names=("step 0", "reference")),
    ),
    Exhibit(
        id="reference-shares-storage",
        thread="NeMo-RL#561",
        kind="I",
        fault="The reference's parameters are the policy's, so it is trained with it.",
        shown="not told",
        plant=lambda scene: _reference(scene, _shared_storage),
        overrides=("objective.config.kl.coefficient=0.1",),
        expected=Expected(
            detector=REFERENCE, error="TrainingError", names=("shares the policy's weights",)
        ),
    ),
    Exhibit(
        id="mean-of-means",
        thread="open-instruct#1161",
        kind="H",
        fault="The mean over the tokens of a micro-batch is averaged over micro-batches.",
        shown="nothing",
        plant=lambda scene: _objective(scene, _mean_of_means),
        expected=Expected(
            detector=RESPLIT, error="TrainingError", names=("step 0", "minibatch is cut")
        ),
    ),
    Exhibit(
        id="whitened-in-micro-batches",
        thread="AReaL#1346",
        kind="H",
        fault="Advantages are normalised over what happens to share a micro-batch, pads included.",
        shown="nothing; a small numeric example",
        plant=_micro_batch_whitened,
        expected=Expected(
            detector=RESPLIT, error="TrainingError", names=("step 0", "minibatch is cut")
        ),
    ),
    Exhibit(
        id="sign-flipped",
        thread="Logic-RL#58",
        kind="H",
        fault="A term of the loss has the wrong sign.",
        shown="collapse in one fork; found by reading",
        plant=lambda scene: _objective(scene, _sign_flipped),
        expected=Expected(
            detector="direction of the gradient", error="TrainingError", names=("wrong sign",)
        ),
    ),
    Exhibit(
        id="old-log-probs-anew",
        thread="open-instruct#755",
        kind="H",
        fault="Old log-probs are computed anew for every minibatch, so nothing is ever clipped.",
        shown="instability; a colleague read the code",
        plant=_old_log_probs_anew,
        overrides=("objective.config.old_logprobs=recompute",),
        expected=Expected(
            detector=RATIOS, error="TrainingError", names=("step 0, update 1", "ratio")
        ),
    ),
)
