"""``sentinel``: the band, and the sequential test of gaps below it; both halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gcore_core.contract.sentinel import (
    Alarm,
    Compared,
    Finding,
    SentinelContext,
    Source,
    on_grid,
)
from gcore_sentinel import tables
from gcore_sentinel.config import SequentialConfig
from gcore_sentinel.diagnosis import diagnose
from gcore_sentinel.evidence import (
    AGAINST,
    ALONE,
    COUNTS,
    MOMENTS,
    NUMBERS,
    WIDTH,
    Cusum,
    Table,
    exact_table,
    log_e,
    marks,
    moments,
    slope_moments,
    slope_terms,
    stream_of,
)

#: A pair with a wider band is a low-precision one.
_EXACT_BAND = 1e-2
#: Actions over the band, actions compared, records, records whose last action is masked.
_PLAIN = 4
#: Fewer records than this with a masked end say nothing.
_MANY = 64
#: The key of all replicas together.
_ALL = -1


class Sequential:
    """Watches one pair.

    Numbers of a record: those of _PLAIN, and where there is a table ``counts``. Evidence of a
    group: the same first four, then ALONE logarithms of e-values, ``moments`` and
    ``slope_moments``. In float32 the table is that of ``exact_table``.
    """

    def __init__(self, config: SequentialConfig, context: SentinelContext) -> None:
        self._config = config
        self._context = context
        self._exact = context.band < _EXACT_BAND
        self._table: Table | None = self._find_table()
        self._replicas: dict[int, Cusum] = {}
        watched = context.replicas + (context.replicas > 1)
        # Each replica, and all together, may give a false alarm.
        self._threshold = float(np.log(config.steps_to_false_alarm * watched))
        self._level = 0.0
        self._compared = 0

    def _find_table(self) -> Table | None:
        context = self._context
        if self._exact:
            return exact_table(context.band)
        file = tables.find(self._config.table, context.pair, context.model)
        return file.table() if file else None

    # -- on a rank ---------------------------------------------------------------------------------

    def measure(self, records: Sequence[Compared]) -> np.ndarray:
        if self._config.keep and records:
            self._write(records)
        numbers = np.zeros((len(records), _PLAIN + (NUMBERS if self._table else 0)))
        sizes = np.array([len(record.mask) for record in records], np.int64)
        if not sizes.sum():
            return numbers
        # All records at once: a step has thousands, and numpy takes microseconds for each call.
        mask = np.concatenate([record.mask for record in records])
        rollout = np.concatenate([record.rollout_logp for record in records])[mask]
        trainer = np.concatenate([record.trainer_logp for record in records])[mask]
        of_record = np.repeat(np.arange(len(records)), sizes)[mask]
        over = ~(np.abs(rollout - trainer) <= self._context.band)
        columns = [over, np.ones_like(over)]
        if self._table is not None:
            columns += list(marks(rollout, trainer, self._table).T)
        sums = [np.bincount(of_record[column], minlength=len(records)) for column in columns]
        some = sums[1] > 0
        numbers[:, 0], numbers[:, 1], numbers[:, 2] = sums[0], sums[1], some
        numbers[:, 3] = some & ~mask[np.cumsum(sizes) - 1]  # the last action is masked
        if self._table is not None:
            numbers[:, _PLAIN : _PLAIN + COUNTS] = np.stack(sums[2:], axis=1)
            entropy = np.concatenate([_entropy(record) for record in records])[mask]
            for column, terms in enumerate(slope_terms(rollout, trainer, entropy, self._table)):
                sums_of_records = np.bincount(of_record, terms, minlength=len(records))
                numbers[:, _PLAIN + COUNTS + column] = on_grid(sums_of_records)
        return numbers

    def diagnose(self, records: Sequence[Compared]) -> list[Finding]:
        low = None
        if self._exact:
            pair = self._context.pair
            bf16 = replace(pair, generator_precision="bfloat16", trainer_precision="bfloat16")
            file = tables.find("auto", bf16, self._context.model)
            low = file.table() if file else None
        return diagnose(records, low, None if self._exact else self._table)

    def _write(self, records: Sequence[Compared]) -> None:
        """Writes what was compared, so that ``g-core sentinel calibrate`` can read it."""
        folder = Path(self._context.directory) / "sentinel"
        folder.mkdir(exist_ok=True)
        about = {"pair": self._context.pair, "model": tables.model_facts(self._context.model)}
        (folder / "about.json").write_bytes(msgspec.json.encode(about))
        sizes = [int(record.mask.sum()) for record in records]
        arrays: dict[str, Any] = {
            name: np.repeat([getattr(record, name) for record in records], sizes)
            for name in ("ordinal", "sample", "replica", "version")
        }
        arrays["rollout"] = np.concatenate([r.rollout_logp[r.mask] for r in records])
        arrays["trainer"] = np.concatenate([r.trainer_logp[r.mask] for r in records])
        arrays["entropy"] = np.concatenate([_entropy(r)[r.mask] for r in records])
        np.savez(folder / f"rank{self._context.rank}-step{records[0].step:06}.npz", **arrays)

    # -- in controllers ----------------------------------------------------------------------------

    def weigh(self, sums: np.ndarray) -> np.ndarray:
        if self._table is None:
            return sums
        counted = sums[:, _PLAIN:]
        parts = [log_e(counted, self._table), moments(counted), slope_moments(counted, self._table)]
        return np.concatenate([sums[:, :_PLAIN], *parts], axis=1)

    def judge(self, step: int, evidence: Mapping[Source, np.ndarray]) -> list[Alarm]:
        rows: dict[int, np.ndarray] = {}
        for (replica, _), row in sorted(evidence.items()):
            rows[replica] = rows[replica] + row if replica in rows else row
        self._compared = int(sum(row[1] for row in rows.values()))
        alarms = [
            alarm for replica, row in rows.items() for alarm in self._plain(step, replica, row)
        ]
        if self._table is not None:
            alarms += self._sequential(step, rows)
        return alarms

    def _plain(self, step: int, replica: int, row: np.ndarray) -> list[Alarm]:
        """Judges what one step alone shows of a replica."""
        over, actions, records, ends_masked = (int(value) for value in row[:_PLAIN])
        alarms = []
        if over:
            text = f"{over} of {actions} actions are off by more than {self._context.band:g} nats"
            alarms.append(Alarm(replica=replica, since_step=step, actions=actions, text=text))
        if records >= _MANY and ends_masked == records:
            text = (
                f"the last action of each of {records} records is masked: a policy whose end "
                "tokens are masked never learns to stop"
            )
            alarms.append(
                Alarm(replica=replica, since_step=step, actions=actions, text=text, cause="masked")
            )
        return alarms

    def _sequential(self, step: int, rows: Mapping[int, np.ndarray]) -> list[Alarm]:
        """Adds a step to the tests of each replica, and of all together where there are several."""
        everything = dict(rows)
        if self._context.replicas > 1 and rows:
            everything[_ALL] = np.sum(list(rows.values()), axis=0)
        for replica, row in everything.items():
            by_itself, own, slope = np.split(row[_PLAIN:], (ALONE, ALONE + MOMENTS))
            others = np.zeros(MOMENTS)
            if replica != _ALL and len(rows) > 1:
                others = everything[_ALL][_PLAIN + ALONE : _PLAIN + ALONE + MOMENTS] - own
            else:
                own = others  # there is nothing to compare it with
            cusum = self._replicas.setdefault(replica, Cusum())
            compared = cusum.compared(np.concatenate([own, others, slope]))
            cusum.add(step, np.concatenate([by_itself, compared]), int(row[1]))
        self._level = max((cusum.level for cusum in self._replicas.values()), default=0.0)
        alarms = [self._alarm(replica) for replica in sorted(everything) if self._is_over(replica)]
        alone = [alarm for alarm in alarms if alarm.replica != _ALL]
        return alone or alarms

    def _is_over(self, replica: int) -> bool:
        return self._replicas[replica].level > self._threshold

    def _alarm(self, replica: int) -> Alarm:
        cusum = self._replicas[replica]
        best = cusum.leader
        actions = int(cusum.actions[best])
        return Alarm(
            replica=replica,
            since_step=int(cusum.since[best]),
            actions=actions,
            text=(
                f"{self._seen(best)}: log e {cusum.level:.1f} after {actions} actions, the alarm "
                f"is at {self._threshold:.1f}"
            ),
        )

    def _seen(self, bet: int) -> str:
        """Says what one of the WIDTH bets has won on."""
        if bet >= ALONE + AGAINST:
            return "gaps rise or fall with log-prob + entropy, as those of another temperature do"
        stratum, quantile = stream_of(bet)
        limit = f"the healthy {quantile:g} quantile"
        if self._exact:
            limit = f"{self._context.band / 10:g} nats, a tenth of the band,"
        often = "too often" if bet < ALONE else "more often than those of the other replicas"
        return f"gaps of {stratum} actions exceed {limit} {often}"

    def metrics(self) -> dict[str, float]:
        if self._table is None:
            return {}
        return {"sentinel/log_e": self._level, "sentinel/actions": float(self._compared)}

    def notes(self) -> list[str]:
        if self._exact or self._table is not None:
            return []
        pair = tables.shown(self._context.pair)
        return [
            f"sentinel: no table of healthy gaps for {pair} on this model, so only a gap of more "
            f"than {self._context.band:g} nats stops the run (g-core sentinel calibrate makes one)"
        ]

    def state(self) -> dict[str, Any]:
        return {
            str(replica): {
                "m": cusum.m.tolist(),
                "since": cusum.since.tolist(),
                "actions": cusum.actions.tolist(),
                "waiting": cusum.waiting.tolist(),
            }
            for replica, cusum in self._replicas.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint; what is known of a replica that is no more is dropped."""
        first = _ALL if self._context.replicas > 1 else 0  # one alone is not judged twice
        self._replicas = {
            int(replica): Cusum(
                m=np.array(kept["m"], np.float64),
                since=np.array(kept["since"], np.int64),
                actions=np.array(kept["actions"], np.int64),
                waiting=np.array(kept["waiting"], np.float64),
            )
            for replica, kept in state.items()
            if len(kept["m"]) == WIDTH and first <= int(replica) < self._context.replicas
        }


def _entropy(record: Compared) -> np.ndarray:
    """Returns a record's entropies, float32[A]; not a number where they were not computed."""
    if record.entropy is not None:
        return record.entropy
    return np.full(len(record.mask), np.nan, np.float32)
