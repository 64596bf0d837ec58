"""The plugin named ``fake`` has torch-free backends, for tests of everything around them.

Add it to a job with ``local: [<this file>]`` and choose ``use: fake``. The policy is a table of V
logits, which is the same distribution at every position. It learns by plain REINFORCE, so the
reward of a run of fakes must rise. All fakes pass the contracts in ``gcore_testing``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.algorithms import AdaptsToSteps, GroupScalars, Work
from gcore_core.contract.columns import Columns, column_of_versions
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError, NonFiniteLoss, WeightMismatch
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.observer import ObserverContext
from gcore_core.contract.records import (
    ABORTED,
    FINISHED,
    REWARD_FAILED,
    TRUNCATED,
    Prompt,
    RunFacts,
    StepReport,
    TensorSpec,
    WeightPlan,
    WorkerFailure,
)
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_core.contract.trainer import StartLogprobs, TrainRecord
from gcore_core.contract.traits import Traits
from gcore_testing.safetensors_files import write_safetensors

VOCABULARY = "abcdefgh."  # the last character ends an answer
END = len(VOCABULARY) - 1


@dataclass(frozen=True, kw_only=True)
class FakeGeneratorConfig:
    max_new_tokens: int = 8
    temperature: float = 1.0
    late_end: int = 1
    """The end mark ends an answer only behind its first letters: so many at most, and how many of
    them is each sample's own. So answers are of all lengths, where 1 makes most of them short."""


@dataclass(frozen=True, kw_only=True)
class FakeTrainerConfig:
    learning_rate: float = 5.0
    micro_batch: int = 0
    """Records whose gradient is computed at once; 0 is all."""
    replica: int = 1
    """Workers that hold one replica together: each does the work of all."""
    toward: str = ""
    """A per-action column of log-probs, which another role gives, that the policy is drawn to."""

    def traits(self) -> Traits:
        return Traits(replica_slots=self.replica)


@dataclass(frozen=True, kw_only=True)
class AbleGeneratorConfig(FakeGeneratorConfig):
    """Claims all that ``FakeGenerator`` can do; a generator of a test claims what it needs."""

    def traits(self) -> Traits:
        return Traits(
            abort=True,
            determinism=True,
            fingerprints=True,
            midway_weights=True,
            receives_weights=True,
            scores_logprobs=True,
            sleeps=True,
            tokens=True,
        )


@dataclass(frozen=True, kw_only=True)
class AbleTrainerConfig(FakeTrainerConfig):
    """Claims all that ``FakeTrainer`` can do; a trainer of a test claims what it needs."""

    def traits(self) -> Traits:
        return replace(
            super().traits(),
            adapts_objective=True,
            annotates=True,
            compares_logprobs=True,
            evaluates=True,
            saves_in_background=True,
            scores_logprobs=True,
            sleeps=True,
        )


@dataclass(frozen=True, kw_only=True)
class FakeAnnotatorConfig:
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class FakeDataConfig:
    rows: int = 64


@dataclass(frozen=True, kw_only=True)
class FakeAdvantageConfig:
    group_size: int = 4


def initial_logits(seed: int) -> np.ndarray:
    """Draws a table of logits, float32[V], close to the uniform distribution."""
    return np.random.default_rng(seed).normal(0.0, 0.1, len(VOCABULARY)).astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the log-probs of the letters, float32[V]; no logit is too large for it."""
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float32)


def logp_of(logp: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns the log-prob of each token, float32[A].

    Any will do for what is no letter: an environment gave it, so it is not trained on.
    """
    return logp.take(ids, mode="clip")


def weight_specs() -> list[TensorSpec]:
    """Describes the table of logits as two tensors, so that a push can have several buckets."""
    return [TensorSpec("letters", "F32", (END,), 4 * END), TensorSpec("end", "F32", (1,), 4)]


def tensors_of(logits: np.ndarray) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Yields float32[V] logits as the flat uint8 tensors of a push, each with its description."""
    for spec, part in zip(weight_specs(), (logits[:END], logits[END:]), strict=True):
        yield spec, part.view(np.uint8)


class FakeTokenizer:
    """Reads the bytes of a text, and writes letters."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(VOCABULARY[letter] for letter in ids)


class FakeGenerator:
    """Draws letters until the end mark.

    The letters of a sample depend only on its seed and the weights.
    """

    def __init__(self, config: FakeGeneratorConfig, context: WorkerContext) -> None:
        self.version = 0
        self._config = config
        self._progress = context.progress
        self._logits = initial_logits(0)
        self._running: dict[tuple[int, int], tuple[SampleRequest, list[int]]] = {}
        # Key of a running sample -> version and log-prob of each letter that was drawn so far.
        self._begun: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self._incoming: dict[str, np.ndarray] = {}
        self._asleep = b""  # the logits while it sleeps
        self.tokenizer = FakeTokenizer()
        self.end_ids = frozenset({END})
        self.max_actions = config.max_new_tokens
        self.context_length = 0
        self.temperature = config.temperature
        self.top_p = 1.0
        self.top_k = 0

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            self._running[request.ordinal, request.sample] = request, []

    def step(self) -> list[Finished]:
        if not self._logits.size:
            raise ContractError(
                "a sleeping generator was asked to go on", where="fake", todo="wake it first"
            )
        ended = []
        if self._running:
            self._progress()
        for key, (request, letters) in list(self._running.items()):
            letters.append(self._draw(request, len(letters)))
            logp = self._table(request.greedy)[letters[-1]]
            self._begun.setdefault(key, []).append((self.version, logp))
            if status := self._status(request, letters):
                del self._running[key]
                ended.append(self._finished(request, letters, status))
        return ended

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        aborted = [self._running.pop(key) for key in keys if key in self._running]
        return [self._finished(request, letters, ABORTED) for request, letters in aborted]

    def _status(self, request: SampleRequest, letters: list[int]) -> str:
        """Returns how an answer with these letters ends; "" where it goes on."""
        if letters[-1] == END and len(letters) > self._first_end(request):
            return FINISHED
        text = self.tokenizer.decode(letters) if request.stop else ""
        if any(stop in text for stop in request.stop):
            return FINISHED
        if len(letters) >= min(self.max_actions, request.most or self.max_actions):
            return TRUNCATED
        return ""

    def _first_end(self, request: SampleRequest) -> int:
        """Returns behind how many letters of a sample the end mark ends it."""
        name = f"{request.ordinal}/{request.sample}"
        return xxhash.xxh3_64_intdigest(name.encode()) % self._config.late_end

    def _draw(self, request: SampleRequest, position: int) -> int:
        """Draws a letter: a hash of seed and position is the uniform number of an inverse CDF."""
        if request.greedy:
            return int(self._logits.argmax())
        uniform = xxhash.xxh3_64_intdigest(f"{request.seed}/{position}".encode()) / 2**64
        return int(np.searchsorted(np.exp(self._table(greedy=False)).cumsum()[:-1], uniform))

    def _table(self, greedy: bool) -> np.ndarray:
        """Returns the log-prob of each letter, at the temperature that such a sample has."""
        return log_softmax(self._logits / self._temperature(greedy))

    def _temperature(self, greedy: bool) -> np.float32:
        return np.float32(1 if greedy else self._config.temperature)

    def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
        drawn = self._begun.pop((request.ordinal, request.sample), [])
        first = drawn[0][0] if drawn else self.version
        actions = np.array(letters, np.int32)
        text = self.tokenizer.decode(letters)
        prompt = request.ids
        if prompt is None:
            prompt = np.array(self.tokenizer.encode(request.prompt.text or ""), np.int32)
        columns: dict[str, np.ndarray] = {
            "prompt_ids": prompt,
            "action_ids": actions,
            "logp": np.array([logp for _, logp in drawn], np.float32),
            "action_mask": np.ones(len(letters), np.uint8),
            "temperature": np.asarray(self._temperature(request.greedy)),
            "text": np.frombuffer(text.encode(), np.uint8),
        }
        versions = np.array([version for version, _ in drawn], np.int32)
        return Finished(
            request=request,
            status=status,
            versions=(first, self.version),
            columns=columns | column_of_versions(versions),
        )

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        return [
            logp_of(log_softmax(self._logits / record["temperature"]), record["action_ids"])
            for record in records
        ]

    @property
    def memory_bytes(self) -> int:
        return self._logits.nbytes

    def sleep(self) -> None:
        if self._logits.size:
            self._asleep = self._logits.tobytes()
            self._logits = np.zeros(0, np.float32)

    def wake(self) -> None:
        if not self._logits.size:
            self._logits = np.frombuffer(self._asleep, np.float32)

    def begin_weights(self, plan: WeightPlan) -> None:
        if plan.version < self.version:
            what = f"version {plan.version} is older than {self.version}"
            raise WeightMismatch(what, where=f"tensor {plan.tensors[0].name!r}")
        if other := set(plan.tensors) ^ set(weight_specs()):
            raise WeightMismatch(
                "the push is of another model", where=f"tensor {min(s.name for s in other)!r}"
            )
        self._incoming.clear()

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        self._incoming.update({spec.name: array.view(np.float32).copy() for spec, array in tensors})

    def commit_weights(self, plan: WeightPlan) -> None:
        self._logits = np.concatenate([self._incoming[spec.name] for spec in plan.tensors])
        self.version = plan.version

    def fingerprint(self) -> dict[str, int]:
        return {
            spec.name: xxhash.xxh3_64_intdigest(part.data)
            for spec, part in tensors_of(self._logits)
        }

    def close(self) -> None:
        pass


class FakeTrainer:
    """Trains the table of logits by REINFORCE, with the gradient written out.

    Its ranks do not communicate, so use one replica.
    """

    def __init__(self, config: FakeTrainerConfig, context: WorkerContext) -> None:
        self.version = 0
        self._config = config
        self._columns = context.columns
        self._logits = initial_logits(0)
        self._records: list[TrainRecord] = []
        self._begun: tuple[Path, dict[str, Any]] | None = None
        self._start: list[StartLogprobs] = []
        self._objective = context.parts.get("objective")
        self._asleep = b""  # the logits while it sleeps

    @property
    def memory_bytes(self) -> int:
        """Bytes of the table that it holds."""
        return int(self._logits.nbytes)

    def sleep(self) -> None:
        if not self._asleep:
            self._asleep = self._logits.tobytes()
            self._logits = np.zeros(0, np.float32)

    def wake(self) -> None:
        if self._asleep:
            self._logits = np.frombuffer(self._asleep, np.float32).copy()
            self._asleep = b""

    def _check_awake(self) -> None:
        if self._asleep:
            raise ContractError("this trainer sleeps.", where="trainer", todo="Wake it first.")

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        copies = [
            {name: np.array(column) for name, column in record.columns.items()}
            for record in records
        ]
        self._records = [
            replace(record, columns=columns)
            for record, columns in zip(records, copies, strict=True)
        ]
        return [dict.fromkeys(scalars, 0.0) for _ in records]

    def evaluate(
        self, records: Sequence[TrainRecord], advantages: np.ndarray
    ) -> dict[str, tuple[float, float]]:
        logp = log_softmax(self._logits)
        loss = weight = 0.0
        for record, advantage in zip(records, advantages.tolist(), strict=True):
            trained = record.columns["action_ids"][record.columns["action_mask"] != 0]
            loss -= advantage * float(logp[trained].sum())
            weight += len(trained)
        return {"loss": (loss, weight)}

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        self._check_awake()
        if not np.isfinite(advantages).all():
            raise NonFiniteLoss("the advantages are not finite", where=f"step {step}")
        logp = log_softmax(self._logits)
        self._start = [
            StartLogprobs(logp=logp_of(logp, record.columns["action_ids"]))
            for record in self._records
        ]
        fresh = [record.columns for record in self._records if record.fresh]
        gaps = [
            np.abs(logp_of(logp, columns["action_ids"]) - columns["logp"])[
                columns["action_mask"] != 0
            ].max(initial=0.0)
            for columns in fresh
        ]
        norms = []
        losses = []
        for _ in range(epochs):
            for minibatch in range(minibatches):
                loss, gradient = self._loss(advantages, minibatch)
                losses.append(loss)
                norms.append(float(np.linalg.norm(gradient)))
                self._logits = (self._logits + self._config.learning_rate * gradient).astype(
                    np.float32
                )
        self.version = step + 1
        entropy = float(-(np.exp(logp) * logp).sum())
        metrics = {
            "loss": float(np.mean(losses)),
            "grad_norm": float(np.mean(norms)),
            "learning_rate": self._config.learning_rate,
            "entropy": entropy,
            "kl": 0.0,
            "clip_share": 0.0,
            "logprob_gap_max": float(max(gaps, default=0.0)),
            "logprob_gap_mean": float(np.mean(gaps)) if gaps else 0.0,
        }
        if isinstance(self._objective, AdaptsToSteps):
            self._objective.observe(metrics)
        return metrics

    def start_logprobs(self) -> list[StartLogprobs]:
        return self._start

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        return [logp_of(log_softmax(self._logits), record["action_ids"]) for record in records]

    def _loss(self, advantages: np.ndarray, minibatch: int) -> tuple[float, np.ndarray]:
        """Returns the loss of one minibatch, and minus its gradient, which lowers the loss.

        The loss is the mean of -advantage * logp over the trained actions.
        """
        indexes = [i for i, record in enumerate(self._records) if record.minibatch == minibatch]
        size = self._config.micro_batch or max(len(indexes), 1)
        loss = 0.0
        gradient = np.zeros(len(VOCABULARY))
        actions = 0
        for start in range(0, len(indexes), size):
            part = self._micro_batch(indexes[start : start + size], advantages)
            loss += part[0]
            gradient = gradient + part[1]
            actions += part[2]
        return loss / max(actions, 1), gradient / max(actions, 1)

    def _micro_batch(
        self, indexes: Sequence[int], advantages: np.ndarray
    ) -> tuple[float, np.ndarray, int]:
        """Returns sums over the trained actions of some records.

        They are the loss, minus its gradient, and the number of actions. For one record with n
        letters, the gradient of sum(logp) by the logits is counts - n * softmax(logits).
        """
        logp = log_softmax(self._logits).astype(np.float64)
        loss = 0.0
        gradient = np.zeros(len(VOCABULARY))
        actions = 0
        for i in indexes:
            columns = self._records[i].columns
            letters = columns["action_ids"][columns["action_mask"] != 0]
            counts = np.bincount(letters, minlength=len(VOCABULARY))
            loss -= float(advantages[i]) * float(logp[letters].sum())
            gradient += advantages[i] * (counts - len(letters) * np.exp(logp))
            actions += len(letters)
            if self._config.toward:
                sums = self._drawn(self._records[i], logp)
                loss += sums[0]
                gradient = gradient + sums[1]
        return loss, gradient, actions

    def _drawn(self, record: TrainRecord, logp: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns the sum over trained actions of (logp - column)^2 / 2, and minus its gradient."""
        trained = record.columns["action_mask"] != 0
        letters = record.columns["action_ids"][trained]
        apart = logp[letters] - record.columns[self._config.toward][trained].astype(np.float64)
        weights = np.bincount(letters, weights=apart, minlength=len(VOCABULARY))
        return float(apart @ apart) / 2, apart.sum() * np.exp(logp) - weights

    def annotate(self, records: Sequence[TrainRecord]) -> list[Mapping[str, np.ndarray]]:
        """Returns the log-probs of the actions, in every column of the role."""
        table = log_softmax(self._logits)
        logps = [logp_of(table, record.columns["action_ids"]) for record in records]
        return [dict.fromkeys(self._columns, logp) for logp in logps]

    def skip(self, step: int) -> None:
        """Ends a step that has nothing to train on; see ``Trainer.skip``."""
        self.version = step + 1

    def weight_specs(self) -> list[TensorSpec]:
        return weight_specs()

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        yield from tensors_of(self._logits)

    def save(self, directory: Path) -> None:
        self.begin_save(directory)
        self.finish_save()

    def begin_save(self, directory: Path) -> None:
        # No copy is needed: an update makes a new table and leaves this one as it is.
        state = {"logits": self._logits, "version": self.version}
        if isinstance(self._objective, AdaptsToSteps):
            state["objective"] = json.dumps(self._objective.state())
        self._begun = (directory / "state.npz", state)

    def finish_save(self) -> None:
        if self._begun is not None:
            file, state = self._begun
            np.savez(file, **state)
        self._begun = None

    def load(self, directory: Path) -> None:
        state = np.load(directory / "state.npz", allow_pickle=False)
        self._logits = state["logits"]
        self.version = int(state["version"])
        if isinstance(self._objective, AdaptsToSteps) and "objective" in state:
            self._objective.restore(json.loads(str(state["objective"])))

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "logits.json").write_text(json.dumps(self._logits.tolist()))
        write_safetensors(directory / "model.safetensors", tensors_of(self._logits))

    def close(self) -> None:
        pass


class FakeAnnotator:
    """Gives the log-probs of the letters under a table of its own.

    The table is drawn by the seed. Every column of the role has the same values.
    """

    def __init__(self, config: FakeAnnotatorConfig, context: WorkerContext) -> None:
        self.version = 0
        self._columns = context.columns
        self._logits = initial_logits(config.seed)

    def annotate(self, records: Sequence[TrainRecord]) -> list[Mapping[str, np.ndarray]]:
        table = log_softmax(self._logits)
        logps = [logp_of(table, record.columns["action_ids"]) for record in records]
        return [dict.fromkeys(self._columns, logp) for logp in logps]

    def close(self) -> None:
        pass


class FakeScorer:
    """Scores an answer by the share of ``a`` among its letters.

    An empty answer cannot be scored.
    """

    def __init__(self, config: None, context: WorkerContext) -> None:
        pass

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        return [
            Score(value=record.text.count("a") / len(record.text))
            if record.text
            else Score(value=None, status=REWARD_FAILED, reason="the answer is empty")
            for record in records
        ]


class FakeObserver:
    """Writes what it is told, one JSON object a line, into ``observed.<name>.jsonl`` of the run."""

    def __init__(self, config: None, context: ObserverContext) -> None:
        self._directory = Path(context.directory)
        self._file = self._directory / f"observed.{context.name}.jsonl"

    def _write(self, what: str, **facts: Any) -> None:
        with open(self._file, "a") as file:
            file.write(json.dumps({"told": what, **facts}) + "\n")

    def run_start(self, run: RunFacts) -> None:
        self._write("run_start", name=run.name, resumed_from=run.resumed_from)

    def step_end(self, report: StepReport) -> None:
        self._write(
            "step_end", step=report.step, metrics=report.metrics, evaluation=report.evaluation
        )

    def weights_published(self, version: int) -> None:
        self._write("weights_published", version=version)

    def checkpoint_saved(self, step: int, path: str) -> None:
        self._write("checkpoint_saved", step=step, path=path)

    def worker_failed(self, failure: WorkerFailure) -> None:
        self._write("worker_failed", role=failure.role, rank=failure.rank)

    def run_end(self, error: str) -> None:
        self._write("run_end", error=error)


class FakeDataset:
    """Gives the prompts "row 0", "row 1" and so on."""

    def __init__(self, config: FakeDataConfig) -> None:
        self._rows = config.rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        return Prompt(row=row, text=f"row {row}")


class FakeAdvantage:
    """Gives each record its reward minus the mean of its group."""

    requires: frozenset[str] = frozenset()

    def __init__(self, config: FakeAdvantageConfig) -> None:
        self.group_size = config.group_size

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        return np.zeros(0)

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        return [group.rewards - group.rewards.mean() for group in groups]


class FakeObjective:
    """Sums -advantage * logp over the trained actions.

    It works on torch tensors. The fake trainer does not use it and computes its own loss.
    """

    requires: frozenset[str] = frozenset()

    def __init__(self, config: None) -> None:
        pass

    def loss(
        self, columns: Mapping[str, Any], current: Mapping[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        trained = columns["mask"]
        logp = current["logp"][trained]
        loss = -(columns["advantage"][trained] * logp)
        weight = self.weight(columns)
        return loss.sum(), weight, {"surprise": (-logp.detach().sum(), weight)}

    def weight(self, columns: Mapping[str, Any]) -> Any:
        return columns["mask"].sum().to(columns["rollout_logp"].dtype)


class FakeBalancer:
    """Gives the longest record first, each to the lightest bin so far."""

    def __init__(self, config: None = None) -> None:
        pass

    def costs(self, work: Work) -> np.ndarray:
        return np.asarray(work.lengths + work.extra)

    def split(self, work: Work, bins: int) -> list[list[int]]:
        costs = self.costs(work)
        indexes_of: list[list[int]] = [[] for _ in range(bins)]
        loads = [(0.0, 0)] * bins
        for i in np.argsort(-costs, kind="stable").tolist():
            lightest = loads.index(min(loads))
            indexes_of[lightest].append(i)
            loads[lightest] = loads[lightest][0] + float(costs[i]), len(indexes_of[lightest])
        return indexes_of


class FakeMeter:
    """Counts a second of use a call, for every device that is asked for."""

    def __init__(self) -> None:
        self._calls = 0

    def used_s(self, devices: Mapping[int, Sequence[int]]) -> dict[int, float]:
        self._calls += 1
        return dict.fromkeys(devices, float(self._calls))

    def close(self) -> None:
        pass


@hookimpl
def gcore_generators() -> Iterable[p.GeneratorProvider]:
    yield p.GeneratorProvider(
        summary="letters from a table of logits",
        factory="gcore_testing.fake:FakeGenerator",
        config=AbleGeneratorConfig,
    )


@hookimpl
def gcore_trainers() -> Iterable[p.TrainerProvider]:
    yield p.TrainerProvider(
        summary="REINFORCE on a table of logits",
        factory="gcore_testing.fake:FakeTrainer",
        config=AbleTrainerConfig,
    )


@hookimpl
def gcore_annotators() -> Iterable[p.AnnotatorProvider]:
    yield p.AnnotatorProvider(
        summary="log-probs under a fixed table of logits",
        factory="gcore_testing.fake:FakeAnnotator",
        config=FakeAnnotatorConfig,
    )


@hookimpl
def gcore_rewards() -> Iterable[p.RewardProvider]:
    yield p.RewardProvider(summary="share of the letter a", factory="gcore_testing.fake:FakeScorer")


@hookimpl
def gcore_observers() -> Iterable[p.ObserverProvider]:
    yield p.ObserverProvider(
        summary="writes what it is told into a file", factory="gcore_testing.fake:FakeObserver"
    )


@hookimpl
def gcore_datasets() -> Iterable[p.DatasetProvider]:
    yield p.DatasetProvider(
        summary="numbered prompts",
        factory="gcore_testing.fake:FakeDataset",
        config=FakeDataConfig,
    )


@hookimpl
def gcore_advantages() -> Iterable[p.AdvantageProvider]:
    yield p.AdvantageProvider(
        summary="reward minus the group's mean",
        factory="gcore_testing.fake:FakeAdvantage",
        config=FakeAdvantageConfig,
    )


@hookimpl
def gcore_objectives() -> Iterable[p.ObjectiveProvider]:
    yield p.ObjectiveProvider(summary="REINFORCE", factory="gcore_testing.fake:FakeObjective")


@hookimpl
def gcore_balancers() -> Iterable[p.BalancerProvider]:
    yield p.BalancerProvider(
        summary="longest first to the lightest bin", factory="gcore_testing.fake:FakeBalancer"
    )
