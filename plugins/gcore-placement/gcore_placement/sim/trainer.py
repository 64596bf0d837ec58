"""Emulates a trainer: opens the real records and spends the time that their lengths say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
from gcore_testing.safetensors_files import write_safetensors

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import NonFiniteLoss
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.trainer import TrainRecord
from gcore_placement.sim.clock import spend
from gcore_placement.sim.config import TrainerConfig
from gcore_placement.sim.policy import LETTERS, initial_table, table_of, tensors_of, weight_specs


class SimTrainer:
    """Trains the table of letters by plain REINFORCE, with the gradient written out.

    Ranks exchange nothing. Of a record it keeps how often each letter was chosen, which is all that
    the gradient needs.
    """

    def __init__(self, config: TrainerConfig, context: WorkerContext) -> None:
        self.version = 0
        self._config = config
        self._progress = context.progress
        self._table = initial_table()
        self._counts = np.zeros((0, len(LETTERS)))  # float64[R, 27]: trained actions of each record
        self._minibatch = np.zeros(0, np.int64)
        self._seconds = np.zeros(0)  # of one epoch over each record
        self._gaps = np.zeros(0)  # float64[R]: largest difference to the log-probs of the rollout

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        """See ``Trainer.prepare``. Spends ``prepare_share`` of one epoch's time; every scalar is
        0.
        """
        columns = [record.columns for record in records]
        for array in (
            array for record in records if self._config.reads for array in record.media.values()
        ):
            xxhash.xxh3_64_intdigest(array.data)
        lengths = [
            record_columns["prompt_ids"].size + record_columns["action_ids"].size
            for record_columns in columns
        ]
        self._seconds = np.array(
            [self._config.record_seconds(length) for length in lengths], np.float64
        )
        self._minibatch = np.array([record.minibatch for record in records], np.int64)
        counts = [
            np.bincount(
                record_columns["action_ids"][record_columns["action_mask"] != 0],
                minlength=len(LETTERS),
            )
            for record_columns in columns
        ]
        self._counts = np.array(counts, np.float64).reshape(len(records), len(LETTERS))
        logp = self._table.logp
        gaps = [
            np.abs(logp[record_columns["action_ids"]] - record_columns["logp"]).max(initial=0.0)
            for record_columns in columns
        ]
        self._gaps = np.array(gaps, np.float64)
        self._spend(self._config.prepare_share * float(self._seconds.sum()))
        return [dict.fromkeys(scalars, 0.0) for _ in records]

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """See ``Trainer.train``. Raises NonFiniteLoss when an advantage is not finite."""
        if not np.isfinite(advantages).all():
            raise NonFiniteLoss("the advantages are not finite", where=f"step {step}")
        logp = self._table.logp.astype(np.float64)
        losses = []
        norms = []
        for _ in range(epochs):
            for minibatch in range(minibatches):
                loss, gradient = self._loss(
                    advantages, np.flatnonzero(self._minibatch == minibatch)
                )
                losses.append(loss)
                norms.append(float(np.linalg.norm(gradient)))
                changed = (self._table.logits + self._config.learning_rate * gradient).astype(
                    np.float32
                )
                self._table = table_of(changed.tobytes())
        self.version = step + 1
        config = self._config
        seconds = epochs * (float(self._seconds.sum()) + minibatches * config.update_s)
        self._spend(seconds)
        return {
            "loss": float(np.mean(losses)),
            "grad_norm": float(np.mean(norms)),
            "learning_rate": config.learning_rate,
            "entropy": float(-(np.exp(logp) * logp).sum()),
            "kl": 0.0,
            "clip_share": 0.0,
            "logprob_gap_max": float(self._gaps.max(initial=0.0)),
            "logprob_gap_mean": float(self._gaps.mean()) if self._gaps.size else 0.0,
            "busy_s": seconds * config.time_scale,
        }

    def _loss(self, advantages: np.ndarray, indexes: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns the mean of -advantage * logp over trained actions, and the step that lowers it.

        The step is the negative gradient with respect to the logits, float64[27].
        """
        logp = self._table.logp.astype(np.float64)
        size = self._config.micro_batch or max(len(indexes), 1)
        loss = 0.0
        gradient = np.zeros(len(LETTERS))
        for start in range(0, len(indexes), size):
            micro_batch = indexes[start : start + size]
            weighted = advantages[micro_batch] @ self._counts[micro_batch]
            loss -= float(weighted @ logp)
            # d logp[a] / d logits = onehot(a) - softmax, summed over the actions by their weights.
            gradient += weighted - weighted.sum() * np.exp(logp)
        actions = max(float(self._counts[indexes].sum()), 1.0)
        return loss / actions, gradient / actions

    def skip(self, step: int) -> None:
        """Ends a step that has nothing to train on; see ``Trainer.skip``."""
        self.version = step + 1

    def weight_specs(self) -> list[TensorSpec]:
        return weight_specs()

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        yield from tensors_of(self._table)

    def save(self, directory: Path) -> None:
        """Writes the table and the version; what ``prepare`` was given is not saved."""
        np.save(directory / "logits.npy", self._table.logits, allow_pickle=False)
        (directory / "version.json").write_text(json.dumps(self.version))

    def load(self, directory: Path) -> None:
        self._table = table_of(np.load(directory / "logits.npy", allow_pickle=False).tobytes())
        self.version = int(json.loads((directory / "version.json").read_text()))

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_safetensors(directory / "model.safetensors", tensors_of(self._table))

    def close(self) -> None:
        pass

    def _spend(self, seconds: float) -> None:
        """Spends emulated seconds, scaled by ``time_scale``."""
        spend(seconds * self._config.time_scale, self._progress)
