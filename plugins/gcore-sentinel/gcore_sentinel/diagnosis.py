"""Tells what makes log-probs disagree, from the records of one step. Pure.

Every cause predicts the gaps g = rollout - trainer in its own way. A cause's score is the share of
the gaps' energy (their sum of squares, each clipped at 4 nats) that its prediction explains, so
that scores of different causes compare.

    shifted      the rollout's log-prob is its neighbour's
    last         only the last action of records is off
    prompts      only some prompts are off, or all samples of a group but the first: cached keys and
                 values of a shared prefix
    temperature  g = (T/T' - 1) (logp + entropy) to first order, T' being what was sampled with;
                 in low precision, where noise has most of the energy, by the share of
                 exceedances that are gone when this line is taken off the gaps
    rounded      the rollout's log-probs themselves are bfloat16 or float16
    precision    in a float32 pair, gaps are those of bfloat16 arithmetic
    weights      gaps everywhere, of log-probs that are true ones of what was sampled: for any
                 honest pair E[exp(-g)] = 1, whatever the weights

The last one is what is left: old weights, weights that are not loaded whole, other kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gcore_core.contract.sentinel import Compared, Finding
from gcore_sentinel.evidence import EDGES, FLOOR, Table

_CLIP = 4.0
#: The score of what is left: any cause that explains more than this is named instead.
_LEFT = 0.5
#: A cause whose signs are clear but which explains no energy itself, such as rounding.
_CLEAR = 0.9
#: A slope beyond this is no temperature: log-probs that have nothing to do with the trainer's have
#: a slope of -1.
_STEEPEST = 0.6
#: A slope must be so many of its own standard errors.
_SURE = 5.0
#: The share of healthy gaps above the .9 quantile.
_SHARE = 0.1
#: With a table, a record or a prompt is right below the one share of such gaps, and off above the
#: other.
_RIGHT = 0.3
_OFF = 0.5
#: Rounds of reweighting, in which the slope of a robust regression settles.
_ROUNDS = 20


def diagnose(
    records: Sequence[Compared],
    low_precision: Table | None = None,
    healthy: Table | None = None,
) -> list[Finding]:
    """Returns a finding for every cause.

    low_precision: a table of healthy bfloat16 gaps, where the pair itself is float32.
    healthy: the table of healthy gaps of the pair itself, where it is of low precision.
    """
    if not records:
        return []
    gaps = [_gap(record) for record in records]
    energy = float(sum(_energy(gap) for gap in gaps))
    if energy <= 0:
        return []
    causes: dict[str, Callable[[], tuple[float, str]]] = {
        "shifted": lambda: _shifted(records),
        "last": lambda: _last(records, energy),
        "prompts": lambda: _prompts(records, gaps, healthy),
        "temperature": lambda: _temperature(records, healthy),
        "rounded": lambda: _rounded(records),
        "precision": lambda: _precision(records, low_precision),
        "weights": lambda: _weights(gaps),
    }
    findings = []
    for cause, explain in causes.items():
        score, text = explain()
        findings.append(
            Finding(cause=cause, score=float(np.clip(score, 0, 1)), weight=energy, text=text)
        )
    return findings


def _gap(record: Compared) -> np.ndarray:
    """Returns the compared gaps of a record, float64; a log-prob that is not a number is 4 off."""
    gap = (record.rollout_logp.astype(np.float64) - record.trainer_logp)[record.mask]
    clipped: np.ndarray = np.clip(np.nan_to_num(gap, nan=_CLIP), -_CLIP, _CLIP)
    return clipped


def _energy(gap: np.ndarray) -> float:
    return float(np.square(np.clip(np.nan_to_num(gap, nan=_CLIP), -_CLIP, _CLIP)).sum())


def _shifted(records: Sequence[Compared]) -> tuple[float, str]:
    """Compares each log-prob with the trainer's of the action before, and of the one after."""
    best = 0.0
    where = "before"
    for name, mine, other in (
        ("before", slice(1, None), slice(None, -1)),
        ("after", slice(None, -1), slice(1, None)),
    ):
        here = shifted = 0.0
        for record in records:
            both = record.mask[mine] & record.mask[other]
            rollout = record.rollout_logp[mine][both].astype(np.float64)
            here += _energy(rollout - record.trainer_logp[mine][both])
            shifted += _energy(rollout - record.trainer_logp[other][both])
        score = 1 - shifted / here if here > 0 else 0.0
        if score > best:
            best, where = score, name
    return best, f"log-probs are shifted by one: each is that of the action {where} it"


def _last(records: Sequence[Compared], energy: float) -> tuple[float, str]:
    """Looks at the last compared action of each record alone."""
    lasts = 0.0
    zeros = neighbours = compared = actions = 0
    for record in records:
        places = np.flatnonzero(record.mask)
        if len(places) < 2:
            continue
        rollout = record.rollout_logp[places]
        lasts += _energy(rollout[-1:].astype(np.float64) - record.trainer_logp[places[-1:]])
        zeros += bool(rollout[-1] == 0)
        neighbours += bool(rollout[-1] == rollout[-2])
        compared += 1
        actions += len(places)
    if not compared or compared > actions / 2:
        return 0.0, ""
    what = "is another's"
    if zeros > compared / 2:
        what = "is 0"
    elif neighbours > compared / 2:
        what = "is that of the action before it"
    text = f"only the last action of records is off: the log-prob that came with it {what}"
    return lasts / energy, text


def _prompts(
    records: Sequence[Compared], gaps: Sequence[np.ndarray], healthy: Table | None
) -> tuple[float, str]:
    """Looks for prompts that are right beside others that are off, and for first samples.

    Right and off is said of a record's mean energy; in low precision, where that has too heavy a
    tail, of the share of its gaps that exceed the healthy .9 quantile.
    """
    lowest: dict[int, int] = {}
    for record in records:
        lowest[record.ordinal] = min(record.sample, lowest.get(record.ordinal, record.sample))
    sizes: dict[int, list[float]] = {}
    first: list[float] = []
    rest: list[float] = []
    for record, gap in zip(records, gaps, strict=True):
        if gap.size:
            size = _size(record, gap, healthy)
            sizes.setdefault(record.ordinal, []).append(size)
            (first if record.sample == lowest[record.ordinal] else rest).append(size)
    enough = len(first) >= 8 and len(rest) >= len(first)
    if enough and _is_right(float(np.median(first)), float(np.median(rest)), 0.05, healthy):
        return _CLEAR, (
            "the first sample of a prompt is right and the others are not: they read cached keys "
            "and values of the prompt"
        )
    groups = np.array([np.mean(group) for group in sizes.values()])
    if len(groups) < 8:
        return 0.0, ""
    right = np.array([_is_right(group, groups.mean(), 0.02, healthy) for group in groups])
    off = ~right if healthy is None else groups > _OFF
    share = float(right.mean())
    text = (
        f"{int((~right).sum())} of {len(groups)} prompts are off and the others are not: cached "
        "keys and values of a shared prefix that outlived a push"
    )
    apart = 0.25 <= share < 1 and bool((right | off).mean() >= _CLEAR)
    return (_CLEAR if apart else 0.0), text


def _size(record: Compared, gap: np.ndarray, healthy: Table | None) -> float:
    """Returns how far a record is off: mean energy, or share above the healthy .9 quantile."""
    if healthy is None:
        return _energy(gap) / gap.size
    return float((np.abs(gap) > _limits(record.trainer_logp[record.mask], healthy)).mean())


def _is_right(size: float, others: float, share: float, healthy: Table | None) -> bool:
    """Whether a size is that of a right record beside others, see ``_size``.

    share: of the others' mean energy that a right one may have.
    """
    if healthy is None:
        return bool(others > 0 and size < share * others)
    return bool(size < _RIGHT and others > _RIGHT)


def _limits(trainer: np.ndarray, table: Table) -> np.ndarray:
    """Returns the .9 quantile of healthy gaps at each log-prob, float64[A]."""
    limits: np.ndarray = table.quantiles[np.digitize(trainer, EDGES), 0] + FLOOR
    return limits


def _temperature(records: Sequence[Compared], healthy: Table | None) -> tuple[float, str]:
    """Regresses gaps on logp + entropy; on logp less its mean where entropies are missing."""
    with_entropy = [record for record in records if record.entropy is not None]
    chosen = with_entropy or list(records)
    gaps = [_gap(record) for record in chosen]
    directions = [_direction(record) for record in chosen]
    gap, direction = np.concatenate(gaps), np.concatenate(directions)
    if not (direction @ direction > 0 and gap @ gap > 0):
        return 0.0, ""
    if healthy is None:
        slope = float(gap @ direction / (direction @ direction))
        score = float((gap @ direction) ** 2 / (direction @ direction) / (gap @ gap))
    else:
        trainer = np.concatenate([record.trainer_logp[record.mask] for record in chosen])
        sizes = [part.size for part in gaps]
        slope, score = _robust(gap, direction, _limits(trainer, healthy), sizes)
    if abs(slope) > _STEEPEST:
        return 0.0, ""
    return score, (
        f"the generator samples at {1 / (1 + slope):.3g} times the temperature that the trainer "
        f"divides by (slope of gaps against log-probs {slope:+.3g})"
    )


def _direction(record: Compared) -> np.ndarray:
    """Returns the derivative of log-probs by the inverse temperature, float64[A]."""
    direction: np.ndarray = record.trainer_logp[record.mask].astype(np.float64)
    if record.entropy is not None:
        direction += record.entropy[record.mask]
    elif direction.size:
        direction -= direction.mean()
    return direction


def _robust(
    gap: np.ndarray, direction: np.ndarray, limits: np.ndarray, sizes: Sequence[int]
) -> tuple[float, float]:
    """Returns a slope, and the share of the excess of exceedances that its line explains.

    Each gap counts by the size that a healthy one of its log-prob has; one that is larger than that
    counts less (Huber's M-estimate, by reweighting). The slope's error is that of whole records,
    whose actions are not independent.

    gap, direction, limits: float64[A]. sizes: actions of each record.
    """
    slope = 0.0
    for _ in range(_ROUNDS):
        rest = np.abs(gap - slope * direction) / limits
        weights = 1 / np.square(limits) / np.maximum(rest, 1.0)
        information = float((weights * direction * direction).sum())
        slope = float((weights * gap * direction).sum()) / information
    rest = gap - slope * direction
    of_record = np.repeat(np.arange(len(sizes)), sizes)
    scores = np.bincount(of_record, weights * rest * direction, minlength=len(sizes))
    error = float(np.sqrt(np.square(scores).sum())) / information
    before = float((np.abs(gap) > limits).mean()) - _SHARE
    after = float((np.abs(rest) > limits).mean()) - _SHARE
    if abs(slope) < _SURE * error or before <= 0:
        return slope, 0.0
    return slope, 1 - after / before


def _rounded(records: Sequence[Compared]) -> tuple[float, str]:
    """Looks whether the rollout's log-probs have fewer bits than float32."""
    rollout = np.concatenate([r.rollout_logp[r.mask] for r in records]).astype(np.float32)
    rollout = rollout[np.isfinite(rollout) & (rollout != 0)]
    if len(rollout) < 16:
        return 0.0, ""
    bits = np.ascontiguousarray(rollout).view(np.uint32)
    for dtype, rounded in (
        ("bfloat16", (bits & 0xFFFF) == 0),
        ("float16", rollout.astype(np.float16).astype(np.float32) == rollout),
    ):
        if rounded.mean() > 0.99:
            return 1.0, f"the generator's log-probs are rounded to {dtype}"
    return 0.0, ""


def _precision(records: Sequence[Compared], table: Table | None) -> tuple[float, str]:
    """Looks whether a float32 pair's gaps have the quantiles of bfloat16 arithmetic."""
    if table is None:
        return 0.0, ""
    over = actions = 0
    for record in records:
        trainer = record.trainer_logp[record.mask]
        over += int((np.abs(_gap(record)) > _limits(trainer, table)).sum())
        actions += trainer.size
    share = over / max(actions, 1)
    score = 1 - abs(np.log(max(share, 1e-6) / 0.1)) / np.log(4)
    return score, "gaps are as large as those of bfloat16: one side computes in another dtype"


def _weights(gaps: Sequence[np.ndarray]) -> tuple[float, str]:
    """Tests E[exp(-g)] = 1 over records: the mean ratio of probabilities, trainer's by rollout's.

    It is 1 for whatever weights, if the log-probs are true ones of what was sampled.
    """
    means = np.array([np.expm1(-gap).mean() for gap in gaps if gap.size])
    deviation = means.std() / np.sqrt(len(means)) if len(means) > 1 else np.inf
    text = "gaps everywhere: other weights (old, or not loaded whole), or other arithmetic"
    if abs(means.mean()) <= 4 * deviation:
        text += (
            f"; its log-probs are true ones of what it sampled (mean ratio {1 + means.mean():.3f})"
        )
    return _LEFT, text
