"""The provider ``diffusion`` of kind trainer, which trains on denoising transitions.

It runs the training program that the language trainers share. Log-probs are means over dimensions
(see ``kernel``). It reports these metrics besides those of every trainer:

    kl_to_reference   KL of a transition, exact, in nats a dimension; for the forward process the
                      mean squared difference of the two models' outputs
    path_kl           KL of a whole record in nats: summed over dimensions and recorded steps
    diversity         how far apart the images of one prompt are; see ``watch``
    coverage          share of the real images that are covered; only where real images are known
    replay_gap        largest difference between the sampler's log-probs and ours, before any
                      update; only in the first step of a process
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gcore_language.objective_state import learned, restore
from gcore_language.ranks import Terms
from gcore_language.training import LanguageTrainer, Placed
from torch import Tensor

from gcore_core.contract.algorithms import AdaptsToSteps, Objective
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, WeightMismatch
from gcore_core.contract.order import sample_seed
from gcore_core.contract.trainer import TrainRecord
from gcore_diffusion.conditions import from_array
from gcore_diffusion.config import DiffusionTrainerConfig
from gcore_diffusion.engine import DiffusionEngine
from gcore_diffusion.forward import FORWARD
from gcore_diffusion.generator import NOISES, check_noise
from gcore_diffusion.kernel import Kernel
from gcore_diffusion.rows import Rows, chunks, forward_process, transitions
from gcore_diffusion.watch import RealImages, coverage, diversity

_SUPPLIED = frozenset({"age", "old_logp", "ref_logp", FORWARD})
_REPLAYED_RECORDS = 8


class DiffusionTrainer(LanguageTrainer):
    """One data-parallel rank of a policy; see ``gcore_core.contract.trainer.Trainer``."""

    def __init__(self, config: DiffusionTrainerConfig, context: WorkerContext) -> None:
        objective: Objective = context.parts["objective"]
        _check_objective(objective, config, context)
        self._is_forward = FORWARD in objective.requires
        self._regularised = Regularised(objective, config)
        context = replace(context, parts={**context.parts, "objective": self._regularised})
        self._denoising = DiffusionEngine(config, context)
        self._diffusion = config
        self._real_images = RealImages.of_model(Path(str(context.model["path"])))
        self._replay_gap: float | None = None
        self._image_terms: Terms = {}
        super().__init__(config, context, self._denoising)  # type: ignore[arg-type]

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        """See ``Trainer.prepare``.

        The first call that has fresh records compares the sampler's log-probs with ours. Raises
        WeightMismatch when they differ by more than the dtype's band.
        """
        if records and not self._is_forward:
            self._regularised.dimensions = int(records[0].columns["latents"][0].size)
            self._denoising.kernel = self._kernel(records)
        scalar_rows = super().prepare(records, scalars)
        if self._replay_gap is None and not self._is_forward:
            self._replay_gap = self._replay(records)
        self._image_terms = self._watch(records)
        return scalar_rows

    def _kernel(self, records: Sequence[TrainRecord]) -> Kernel:
        """Returns the kernel by which the records were sampled.

        Raises ConfigError when they were not all sampled by the same one.
        """
        kinds = {(int(r.columns["noise"]), float(r.columns["scale"])) for r in records}
        if len(kinds) > 1:
            raise ConfigError(
                "records were sampled with different noise.",
                where=f"roles.{self._context.role}",
                todo="Give all generators one noise and scale.",
            )
        ((noise, scale),) = kinds
        kind: Any = NOISES[noise]
        kernel = Kernel(noise=kind, scale=scale, prediction=self._denoising.denoiser.prediction)
        check_noise(kernel, self._context)
        return kernel

    def pack(self, minibatches: Sequence[Sequence[Placed]]) -> list[list[Any]]:
        """See ``LanguageTrainer.pack``: ``Rows`` of at most ``batch_records`` records."""
        config = self._diffusion
        device = self._denoising.device

        # A stream for each record and version: so a record has the same noise on any rank and in
        # any micro-batch, no two have the same, and a resumed run draws what an uninterrupted one
        # draws. The second word is never 0, which is that of the generator's streams.
        def stream(record: TrainRecord) -> np.random.Generator:
            seed = sample_seed(self._context.seed, record.ordinal, 0, record.sample)
            return np.random.Generator(np.random.Philox(key=[seed, self.version + 1]))

        def rows(placed_records: Sequence[Placed]) -> Rows:
            if self._is_forward:
                return forward_process(placed_records, device, config.draws, stream)
            return transitions(placed_records, device, config.guidance)

        # a record without actions teaches nothing
        parts = [
            [placed for placed in part if self._is_forward or len(placed[1].columns["logp"])]
            for part in minibatches
        ]
        return [
            [rows(placed_records) for placed_records in chunks(part, config.batch_records)]
            for part in parts
        ]

    def _replay(self, records: Sequence[TrainRecord]) -> float | None:
        """Returns the largest difference between the sampler's log-probs and ours.

        It is taken over a few records of every rank that this step's weights sampled; None where no
        rank has one. Raises WeightMismatch when it is outside the band.
        """
        own = [(i, r) for i, r in enumerate(records) if r.fresh and len(r.columns["logp"])]
        replayed = own[:_REPLAYED_RECORDS]
        gap = -1.0  # below that of any record
        if replayed:
            rows = transitions(replayed, self._denoising.device, self._diffusion.guidance)
            (logp,) = self._denoising.logprobs([rows], "policy")
            if logp is not None:
                gap = float((logp - rows.columns["rollout_logp"]).abs().max())
        gap = self._denoising.ranks.max([gap])[0]
        if gap < 0:
            return None
        band = self._diffusion.traits().logprob_band
        if not gap <= band:  # NaN is outside as well
            raise WeightMismatch(
                (
                    f"replayed log-probs are off by {gap:.3g} nats a dimension before any update, "
                    f"the band is {band:g}."
                ),
                where=f"roles.{self._context.role}",
                why=(
                    "Sampler and trainer do not compute the same transition, so the ratio of the "
                    "two would not be 1."
                ),
                todo=(
                    "Make both from one model directory, with one dtype, guidance and prompt "
                    "length."
                ),
                gap=gap,
            )
        return gap

    def _watch(self, records: Sequence[TrainRecord]) -> Terms:
        """Returns diversity and coverage of each of this rank's groups, each with weight 1."""
        groups: dict[int, list[TrainRecord]] = {}
        for record in records:
            groups.setdefault(record.ordinal, []).append(record)
        terms: Terms = {}

        def add(name: str, value: float | None) -> None:
            if value is not None:
                terms.setdefault(name, []).append((value, 1.0))

        for group in groups.values():
            images = np.stack([record.media["image"] for record in group])
            add("diversity", diversity(images))
            if self._real_images is not None:
                label = from_array(group[0].media["condition"]).get("label")
                add(
                    "coverage",
                    coverage(images, self._real_images.of(None if label is None else int(label))),
                )
        return terms

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """See ``Trainer.train``. The module's docstring lists the metrics that it adds."""
        metrics = super().train(step, advantages, minibatches, epochs)
        self._denoising.move_reference()
        means = {
            name: total / weight
            for name, (total, weight) in self._denoising.ranks.add_up(self._image_terms).items()
        }
        if self._replay_gap is not None:
            means["replay_gap"] = self._replay_gap
        return metrics | means


class Regularised:
    """Any objective plus kl_coefficient x KL to the reference, mean over the trained actions.

    requires: the objective's own.
    dimensions: how many numbers a latent has; 0 without transitions, where there is no KL of a path
        in nats.
    """

    dimensions = 0

    def __init__(self, objective: Objective, config: DiffusionTrainerConfig) -> None:
        self.requires = objective.requires
        self._objective = objective
        self._coefficient = config.kl_coefficient

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """See ``Objective.loss``. The KL is read from the column ``kl``; without it nothing is
        added.
        """
        loss, weight, metrics = self._objective.loss(columns, current)
        if "kl" not in columns:
            return loss, weight, metrics
        mask = columns["mask"]
        count = mask.sum().clamp(min=1)
        total = (columns["kl"] * mask).sum()
        if self._coefficient:
            loss = loss + self._coefficient * total / count * weight
        metrics = {**metrics, "kl_to_reference": (total.detach(), count)}
        if self.dimensions:
            metrics["path_kl"] = total.detach() * self.dimensions, columns["record"].max() + 1
        return loss, weight, metrics

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        return self._objective.weight(columns)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Shows a step to an objective that adapts to steps; see ``AdaptsToSteps``."""
        if isinstance(self._objective, AdaptsToSteps):
            self._objective.observe(metrics)

    def state(self) -> dict[str, Any]:
        return learned(self._objective)

    def restore(self, state: Mapping[str, Any]) -> None:
        restore(self._objective, state)


def _check_objective(
    objective: Objective, config: DiffusionTrainerConfig, context: WorkerContext
) -> None:
    """Raises ConfigError when the objective requires what this trainer does not compute.

    It is called before anything is loaded.
    """
    where = f"roles.{context.role}.config"
    if unknown := sorted(frozenset(objective.requires) - _SUPPLIED):
        raise ConfigError(
            f"the objective requires {', '.join(unknown)}, which a denoising policy does not have.",
            where=f"roles.{context.role}.use",
            why=(
                f"This trainer computes {', '.join(sorted(_SUPPLIED))}; the entropy of its noise "
                "depends on no weight."
            ),
        )
    if "ref_logp" in objective.requires and not config.reference:
        raise ConfigError(
            "the objective requires ref_logp, and there is no reference.",
            where=f"{where}.reference",
        )
