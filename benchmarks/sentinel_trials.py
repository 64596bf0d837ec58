"""Tries the sentinel on healthy log-probs in bfloat16, and on planted faults.

Everything is sampled and compared by the backends of torch (``bf16_pair.py``). The policies are of
seeds that the table of healthy gaps has not seen.

healthy: policies train as in the quickstart. Under every version of the weights, each of STREAMS
    sentinels gets the groups of a step, 32 of its own. When the time is over, what is missing to
    TOKENS is drawn anew: a sentinel goes through the versions of a training in their order, and
    each of its steps has 32 of the groups that were sampled under that version, drawn with
    replacement. So groups keep their dependence, and versions keep what they have in common.

faults: at some versions one of two replicas goes wrong. The delay is how many of its tokens were
    compared until the alarm; the step of the alarm is counted whole.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from bf16_pair import PROMPTS, Pair, Replica, Sampled, Weights, changed
from gcore_sentinel.config import SequentialConfig
from gcore_sentinel.sequential import Sequential

from gcore_core.contract import sentinel as contract
from gcore_core.contract.sentinel import Alarm, Compared, SentinelContext
from gcore_core.controllers.watching import likeliest

TOKENS = 10_000_000
#: Seeds of the policies, of their teaching and of their prompts. The shipped table has others.
SEEDS = (7, 1)
STREAMS = 8
TRAINING_STEPS = 120
#: Versions at which faults are planted, and steps after which a fault counts as not found.
PLANTED_AT = (4, 12, 24, 40)
MOST_STEPS = 30
#: What each fault is to be told as, from its records alone: hashes of weights are not asked.
CAUSES = {
    "old weights": "weights",
    "tensor zeroed": "weights",
    "temperature .99": "temperature",
    "shifted by one": "shifted",
    "last token masked": "masked",
}
_PAIR = contract.Pair(
    generator="torch",
    generator_precision="bfloat16",
    trainer="torch",
    trainer_precision="bfloat16",
)


class Watch:
    """A sentinel with both of its halves, which gets the records of whole steps."""

    def __init__(self, model: Path) -> None:
        context = SentinelContext(pair=_PAIR, band=4.0, model={"path": str(model)}, replicas=2)
        self._model = model
        self.sentinel = Sequential(SequentialConfig(), context)
        if self.sentinel.notes():
            sys.exit(self.sentinel.notes()[0])

    def groups(self, records: Sequence[Compared]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of each group, float64[groups, K], and its replica, int64[groups]."""
        rows = self.sentinel.measure(records)
        ordinals = np.array([record.ordinal for record in records])
        firsts = np.flatnonzero(np.r_[True, ordinals[1:] != ordinals[:-1]])
        replicas = np.array([records[place].replica for place in firsts.tolist()])
        return np.add.reduceat(rows, firsts, axis=0), replicas

    def judge(self, step: int, sums: np.ndarray, replicas: np.ndarray) -> list[Alarm]:
        """Judges a step; see ``groups``."""
        rows = self.sentinel.weigh(sums)
        evidence = {
            (replica, step): rows[replicas == replica].sum(axis=0)
            for replica in np.unique(replicas).tolist()
        }
        return self.sentinel.judge(step, evidence)

    def anew(self) -> Watch:
        """Returns a sentinel that has seen nothing yet."""
        return Watch(self._model)

    @property
    def level(self) -> float:
        return self.sentinel.metrics()["sentinel/log_e"]


@dataclass(kw_only=True)
class Healthy:
    """Counts what healthy log-probs gave.

    tokens, sampled: all that were judged, and those of them that were sampled for it.
    alarms: all of them are false.
    highest: largest log e of any sentinel.
    records, measured_s: of the sampled ones, and the time that the sentinel took for them.
    """

    tokens: int = 0
    sampled: int = 0
    alarms: int = 0
    highest: float = -np.inf
    records: int = 0
    measured_s: float = 0.0
    _versions: list[tuple[Path, list[tuple[np.ndarray, np.ndarray]]]] = field(default_factory=list)

    def sample(self, models: Sequence[Path], minutes: float) -> None:
        """Trains one policy after the other for some minutes, and judges what they sample."""
        began_s = time.monotonic()
        share_s = 60 * minutes / len(models)  # every policy gets some of a time that is short
        run = 0
        while time.monotonic() < began_s + 60 * minutes and self.sampled < TOKENS:
            model = models[run % len(models)]
            until_s = began_s + share_s * min(run + 1, len(models))
            versions: list[tuple[np.ndarray, np.ndarray]] = []
            self._versions.append((model, versions))
            pair = Pair(model, TRAINING_STEPS, first=run * TRAINING_STEPS * STREAMS * PROMPTS)
            generator = Replica(model, 0)
            watches = [Watch(model) for _ in range(STREAMS)]
            while pair.version < TRAINING_STEPS and time.monotonic() < until_s:
                versions.append(self._version(pair, generator, watches))
                if self.sampled >= TOKENS:
                    break
            say(
                f"{self.sampled:,} healthy tokens are sampled in {run + 1} trainings: "
                f"{self.alarms} alarms, log e {self.highest:.1f} at most"
            )
            run += 1
        self.tokens = self.sampled

    def _version(
        self, pair: Pair, generator: Replica, watches: list[Watch]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Samples under one version, has all sentinels judge, and trains the next version."""
        step = pair.version
        generator.push(step, pair.weights())
        sampled = generator.sample(pair.requests(PROMPTS * STREAMS))
        halves = [
            replace(one, replica=one.finished.request.ordinal % 2) for one in sampled
        ]  # as if two had sampled them
        compared = pair.compare(halves, step)
        per_stream = len(compared) // STREAMS
        parts = []
        for number in range(STREAMS):
            part = compared[number * per_stream : (number + 1) * per_stream]
            before_s = time.perf_counter()
            sums, replicas = watches[number].groups(part)
            self._judge(watches, number, step, sums, replicas)
            self.measured_s += time.perf_counter() - before_s
            parts.append((sums, replicas))
        self.records += len(compared)
        self.sampled += int(sum(record.mask.sum() for record in compared))
        pair.train(sampled[:per_stream])
        if pair.version % 40 == 0:
            say(f"{self.sampled:,} healthy tokens, version {pair.version}")
        return np.concatenate([sums for sums, _ in parts]), np.concatenate([r for _, r in parts])

    def _judge(
        self, watches: list[Watch], number: int, step: int, sums: np.ndarray, replicas: np.ndarray
    ) -> None:
        """Judges a step; a sentinel that gave an alarm begins anew."""
        alarms = watches[number].judge(step, sums, replicas)
        self.highest = max(self.highest, watches[number].level)
        self.alarms += bool(alarms)
        if alarms:
            say(f"false alarm: {alarms[0].text}")
            watches[number] = watches[number].anew()

    def draw(self) -> None:
        """Draws groups anew until TOKENS are judged."""
        chance = np.random.default_rng(0)
        trainings = [training for training in self._versions if training[1]]
        while self.tokens < TOKENS:
            model, versions = trainings[chance.integers(len(trainings))]
            watches = [Watch(model)]
            for step, (sums, replicas) in enumerate(versions):
                places = chance.integers(len(sums), size=PROMPTS)
                self._judge(watches, 0, step, sums[places], replicas[places])
                self.tokens += int(sums[places, 1].sum())


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Says how a planted fault was found.

    tokens: of the wrong replica that were compared until then.
    found: whether there was an alarm that named the wrong replica alone.
    cause: the word for it.
    """

    fault: str
    version: int
    tokens: int
    found: bool
    cause: str


def plant(model: Path) -> list[Trial]:
    """Plants every fault at some versions of one training."""
    pair = Pair(model, TRAINING_STEPS, first=10**8)
    right, wrong = Replica(model, 0), Replica(model, 1)
    cold = Replica(model, 1, temperature=0.99)
    older: Weights = []
    trials = []
    while pair.version <= max(PLANTED_AT):
        weights = pair.weights()
        right.push(pair.version, weights)
        if pair.version in PLANTED_AT:
            for fault in CAUSES:
                replica = cold if fault == "temperature .99" else wrong
                replica.push(pair.version, older if fault == "old weights" else weights)
                if fault == "tensor zeroed":
                    replica.zero()
                trials.append(_until_found(Watch(model), pair, right, replica, fault))
                say(str(trials[-1]))
        older = weights
        pair.train(right.sample(pair.requests(PROMPTS)))
    return trials


def _until_found(watch: Watch, pair: Pair, right: Replica, wrong: Replica, fault: str) -> Trial:
    tokens = 0
    for step in range(pair.version, pair.version + MOST_STEPS):
        half = PROMPTS // 2
        planted = _CHANGES[fault](wrong.sample(pair.requests(half)))
        compared = pair.compare([*right.sample(pair.requests(half)), *planted], step)
        own = [record for record in compared if record.replica == wrong.number]
        tokens += int(sum(record.mask.sum() for record in own))
        alarms = watch.judge(step, *watch.groups(compared))
        if alarms:
            cause = alarms[0].cause or likeliest(watch.sentinel.diagnose(own))[0]
            found = {alarm.replica for alarm in alarms} == {wrong.number}
            return Trial(fault=fault, version=pair.version, tokens=tokens, found=found, cause=cause)
    return Trial(fault=fault, version=pair.version, tokens=tokens, found=False, cause="")


def _same(sampled: list[Sampled]) -> list[Sampled]:
    return sampled


def _says_one(sampled: list[Sampled]) -> list[Sampled]:
    return changed(sampled, temperature=lambda _: np.float32(1.0))


def _shifted(sampled: list[Sampled]) -> list[Sampled]:
    return changed(sampled, logp=lambda logp: np.roll(logp, 1))


def _masked(sampled: list[Sampled]) -> list[Sampled]:
    return changed(sampled, action_mask=lambda mask: np.r_[mask[:-1], np.uint8(0)])


_CHANGES: dict[str, Callable[[list[Sampled]], list[Sampled]]] = {
    "old weights": _same,
    "tensor zeroed": _same,
    "temperature .99": _says_one,
    "shifted by one": _shifted,
    "last token masked": _masked,
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


torch.set_num_threads(1)
