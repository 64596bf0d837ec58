"""Tries the sentinel on healthy log-probs in bfloat16, and on planted faults, for one pair.

    PYTHON benchmarks/sentinel_trials.py --generator vllm --out FILE --minutes 6 --tokens 5000000
                                         MODEL [MODEL]

``proved.py`` runs it, for vLLM by an interpreter that has vLLM. Everything is sampled and compared
by the plugins' backends (``bf16_pair.py``). The policies are of seeds that the tables of healthy
gaps have not seen.

healthy: policies train as in the quickstart. Under every version of the weights, each of STREAMS
    sentinels gets the groups of a step, 32 of its own. When the time is over, what is missing to
    ``--tokens`` is drawn anew: a sentinel goes through the versions of a training in their order,
    and each of its steps has 32 of the groups that were sampled under that version, drawn with
    replacement. So groups keep their dependence, and versions keep what they have in common.

spot check: what float32 on the trainer's side would add. Records sampled at temperature 0.998 are
    scored by the trainer in bfloat16 and in float32, and compared in two ways with what came: by
    the mean gap, and by the slope of gaps against log-prob + entropy. ``kl_by_mean`` and
    ``kl_by_slope`` say how far apart two sides must be to be five standard errors from none, after
    10,000 tokens.

faults: at some versions one of two replicas goes wrong. The delay is how many of its tokens were
    compared until the alarm; the step of the alarm is counted whole.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bf16_pair import PROMPTS, Engine, Pair, Replica, Sampled, Weights, changed, zeroed
from gcore_sentinel import tables
from gcore_sentinel.causes import likeliest
from gcore_sentinel.config import SequentialConfig
from gcore_sentinel.evidence import slope_terms
from gcore_sentinel.sequential import Sequential

from gcore_core.contract import sentinel as contract
from gcore_core.contract.sentinel import Alarm, Compared, SentinelContext

STREAMS = 8
TRAINING_STEPS = 120
#: Versions at which faults are planted, and steps after which a fault counts as not found.
PLANTED_AT = (4, 12, 24, 40)
MOST_STEPS = 30
#: Prompts of the spot check.
SPOT_GROUPS = 160
#: What each fault is to be told as, from its records alone: hashes of weights are not asked.
CAUSES = {
    "old weights": "weights",
    "tensor zeroed": "weights",
    "temperature .99": "temperature",
    "temperature .998": "temperature",
    "shifted by one": "shifted",
    "last token masked": "masked",
}


def _pair_of(generator: str) -> contract.Pair:
    return contract.Pair(
        generator=generator,
        generator_precision="bfloat16",
        trainer="torch",
        trainer_precision="bfloat16",
    )


class Watch:
    """A sentinel with both of its halves, which gets the records of whole steps.

    generator: the plugin of the generator that it watches.
    """

    def __init__(self, generator: str, model: Path) -> None:
        context = SentinelContext(
            pair=_pair_of(generator), band=4.0, model={"path": str(model)}, replicas=2
        )
        self._generator = generator
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
        return Watch(self._generator, self._model)

    @property
    def level(self) -> float:
        return self.sentinel.metrics()["sentinel/log_e"]


@dataclass(kw_only=True)
class Healthy:
    """Counts what healthy log-probs gave.

    generator: the plugin that samples.
    wanted: how many tokens are to be judged.
    tokens, sampled: all that were judged, and those of them that were sampled for it.
    alarms: all of them are false.
    highest: largest log e of any sentinel.
    records, measured_s: of the sampled ones, and the time that the sentinel took for them.
    """

    generator: str
    wanted: int
    tokens: int = 0
    sampled: int = 0
    alarms: int = 0
    highest: float = -np.inf
    records: int = 0
    measured_s: float = 0.0
    _versions: list[tuple[Path, list[tuple[np.ndarray, np.ndarray]]]] = field(default_factory=list)

    def sample(self, models: Sequence[Path], engine: Engine, minutes: float) -> None:
        """Trains one policy after the other for some minutes, and judges what they sample.

        engine: gets the weights of each, since all have one shape.
        """
        began_s = time.monotonic()
        share_s = 60 * minutes / len(models)  # every policy gets some of a time that is short
        run = 0
        while time.monotonic() < began_s + 60 * minutes and self.sampled < self.wanted:
            model = models[run % len(models)]
            until_s = began_s + share_s * min(run + 1, len(models))
            versions: list[tuple[np.ndarray, np.ndarray]] = []
            self._versions.append((model, versions))
            pair = Pair(model, TRAINING_STEPS, first=run * TRAINING_STEPS * STREAMS * PROMPTS)
            replica = Replica(engine, 0)
            watches = [Watch(self.generator, model) for _ in range(STREAMS)]
            while pair.version < TRAINING_STEPS and time.monotonic() < until_s:
                versions.append(self._version(pair, replica, watches))
                if self.sampled >= self.wanted:
                    break
            say(
                f"{self.generator}: {self.sampled:,} healthy tokens in {run + 1} trainings, "
                f"{self.alarms} alarms, log e {self.highest:.1f} at most"
            )
            run += 1
        self.tokens = self.sampled

    def _version(
        self, pair: Pair, replica: Replica, watches: list[Watch]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Samples under one version, has all sentinels judge, and trains the next version."""
        step = pair.version
        replica.push(pair.weights())
        sampled = replica.sample(pair.requests(PROMPTS * STREAMS))
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
            say(f"{self.generator}: {self.sampled:,} healthy tokens, version {pair.version}")
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
        """Draws groups anew until as many tokens are judged as are wanted."""
        chance = np.random.default_rng(0)
        trainings = [training for training in self._versions if training[1]]
        while self.tokens < self.wanted:
            model, versions = trainings[chance.integers(len(trainings))]
            watches = [Watch(self.generator, model)]
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


def plant(generator: str, model: Path, engine: Engine) -> list[Trial]:
    """Plants every fault at some versions of one training."""
    pair = Pair(model, TRAINING_STEPS, first=10**8)
    right, wrong = Replica(engine, 0), Replica(engine, 1)
    cold = {
        "temperature .99": Replica(engine, 1, temperature=0.99),
        "temperature .998": Replica(engine, 1, temperature=0.998),
    }
    older: Weights = []
    trials = []
    while pair.version <= max(PLANTED_AT):
        weights = pair.weights()
        right.push(weights)
        if pair.version in PLANTED_AT:
            for fault in CAUSES:
                replica = cold.get(fault, wrong)
                planted = {"old weights": older, "tensor zeroed": zeroed(weights)}
                replica.push(planted.get(fault, weights))
                watch = Watch(generator, model)
                trials.append(_until_found(watch, pair, right, replica, fault))
                say(f"{generator}: {trials[-1]}")
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
    "temperature .998": _says_one,
    "shifted by one": _shifted,
    "last token masked": _masked,
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class SpotCheck:
    """Says what scoring in a precision shows of records that were sampled at 0.998.

    tokens: how many were compared.
    slope_errors: the slope, which is 0.002 for exact log-probs, in its own standard errors.
    kl_by_mean, kl_by_slope: KL in nats that is five errors from none, after 10,000 tokens.
    """

    precision: str
    tokens: int
    slope_errors: float
    kl_by_mean: float
    kl_by_slope: float


def spot_check(generator: str, model: Path, engine: Engine) -> list[SpotCheck]:
    """Samples at temperature 0.998, and compares with the trainer in either precision."""
    pair = Pair(model, TRAINING_STEPS, first=2 * 10**8)
    replica = Replica(engine, 0, temperature=0.998)
    replica.push(pair.weights())
    sampled = _says_one(replica.sample(pair.requests(SPOT_GROUPS)))
    in_bf16 = pair.compare(sampled, 0)
    with pair.in_float32():
        in_float32 = pair.compare(sampled, 0)
    checks = {"bf16": in_bf16, "float32": in_float32}
    return [_spot(generator, model, name, records) for name, records in checks.items()]


def _spot(generator: str, model: Path, precision: str, records: Sequence[Compared]) -> SpotCheck:
    table = tables.find("auto", _pair_of(generator), {"path": str(model)})
    assert table is not None
    trainer, entropy = (
        np.concatenate([getattr(record, name) for record in records])
        for name in ("trainer_logp", "entropy")
    )
    rollout = np.concatenate([record.rollout_logp for record in records])
    sizes = [len(record.mask) for record in records]
    group = np.repeat([record.ordinal for record in records], sizes)
    _, place = np.unique(group, return_inverse=True)

    def by_group(values: np.ndarray) -> np.ndarray:
        return np.bincount(place, values)

    u, information = (by_group(v) for v in slope_terms(rollout, trainer, entropy, table.table()))
    slope = u.sum() / information.sum()
    slope_error = np.sqrt(np.square(u - slope * information).sum()) / information.sum()
    gaps = by_group(rollout.astype(np.float64) - trainer)
    tokens = len(trainer)
    mean_error = np.sqrt(np.square(gaps - gaps.mean()).sum()) / tokens
    shrink = np.sqrt(tokens / 10_000)  # errors fall with the root of the tokens
    # A slope s is a temperature whose KL is s^2 / 2 times the variance of log-probs.
    variance = float(np.square(trainer.astype(np.float64) + entropy).mean())
    return SpotCheck(
        precision=precision,
        tokens=tokens,
        slope_errors=float(slope / slope_error),
        kl_by_mean=float(5 * mean_error * shrink),
        kl_by_slope=float((5 * slope_error * shrink) ** 2 / 2 * variance),
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Says how a pair's sentinel did.

    trials: of planted faults.
    spots: of the spot check.
    alarms, sampled, highest, records, measured_s: as in ``Healthy``.
    """

    trials: list[Trial]
    spots: list[SpotCheck]
    alarms: int
    sampled: int
    highest: float
    records: int
    measured_s: float

    @classmethod
    def read(cls, content: str) -> Outcome:
        """Reads what ``main`` wrote."""
        fields: dict[str, Any] = json.loads(content)
        trials = [Trial(**trial) for trial in fields.pop("trials")]
        spots = [SpotCheck(**spot) for spot in fields.pop("spots")]
        return cls(trials=trials, spots=spots, **fields)


def try_pair(generator: str, models: Sequence[Path], minutes: float, tokens: int) -> Outcome:
    """Tries the sentinel of one pair.

    models: the policies to begin with.
    minutes: how long healthy tokens may be sampled.
    tokens: how many healthy ones are judged.
    """
    torch.set_num_threads(1)
    engine = Engine(generator, models[0])
    healthy = Healthy(generator=generator, wanted=tokens)
    healthy.sample(models, engine, minutes)
    healthy.draw()
    return Outcome(
        trials=plant(generator, models[0], engine),
        spots=spot_check(generator, models[0], engine),
        alarms=healthy.alarms,
        sampled=healthy.sampled,
        highest=healthy.highest,
        records=healthy.records,
        measured_s=healthy.measured_s,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="The sentinel on one pair; see proved.py.")
    parser.add_argument("models", nargs="+", type=Path, help="policies to begin with")
    parser.add_argument("--generator", choices=("torch", "vllm"), required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--tokens", type=int, default=5_000_000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    outcome = try_pair(args.generator, args.models, args.minutes, args.tokens)
    args.out.write_text(json.dumps(asdict(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
