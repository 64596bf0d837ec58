"""Tells what makes log-probs disagree, from the records of one step. Pure.

Every cause predicts the gaps g = rollout - trainer in its own way. A cause's score is the share of
the gaps' energy (their sum of squares, each clipped at 4 nats) that its prediction explains, so
that scores of different causes compare.

    shifted      the rollout's log-prob is its neighbour's
    last         only the last action of records is off
    prompts      only some prompts are off, or all samples of a group but the first: cached keys and
                 values of a shared prefix
    temperature  g = (T/T' - 1) (logp + entropy) to first order, T' being what was sampled with
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


def diagnose(records: Sequence[Compared], low_precision: Table | None = None) -> list[Finding]:
    """Returns a finding for every cause.

    low_precision: a table of healthy bfloat16 gaps, where the pair itself is float32.
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
        "prompts": lambda: _prompts(records, gaps),
        "temperature": lambda: _temperature(records, energy),
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


def _prompts(records: Sequence[Compared], gaps: Sequence[np.ndarray]) -> tuple[float, str]:
    """Looks for groups without any gap beside others with large ones, and for first samples."""
    mean_of: dict[int, list[float]] = {}
    first: list[float] = []
    rest: list[float] = []
    lowest: dict[int, int] = {}
    for record in records:
        lowest[record.ordinal] = min(record.sample, lowest.get(record.ordinal, record.sample))
    for record, gap in zip(records, gaps, strict=True):
        if gap.size:
            mean = _energy(gap) / gap.size
            mean_of.setdefault(record.ordinal, []).append(mean)
            (first if record.sample == lowest[record.ordinal] else rest).append(mean)
    groups = np.array([np.mean(means) for means in mean_of.values()])
    if len(first) >= 8 and len(rest) >= len(first) and np.mean(rest) > 0:
        ratio = np.median(first) / np.median(rest) if np.median(rest) > 0 else 1.0
        if ratio < 0.05:
            return _CLEAR, (
                "the first sample of a prompt is right and the others are not: they read cached "
                "keys and values of the prompt"
            )
    if len(groups) < 8:
        return 0.0, ""
    clean = groups < 0.02 * groups.mean()
    share = float(clean.mean())
    text = (
        f"{int((~clean).sum())} of {len(groups)} prompts are off and the others are not: cached "
        "keys and values of a shared prefix that outlived a push"
    )
    return (_CLEAR if 0.25 <= share < 1 else 0.0), text


def _temperature(records: Sequence[Compared], energy: float) -> tuple[float, str]:
    """Regresses gaps on logp + entropy; on logp less its mean where entropies are missing."""
    products = squares = gaps = 0.0
    with_entropy = [record for record in records if record.entropy is not None]
    chosen = with_entropy or records
    for record in chosen:
        logp = record.trainer_logp[record.mask].astype(np.float64)
        if record.entropy is not None:
            direction = logp + record.entropy[record.mask]
        else:
            direction = logp - logp.mean() if logp.size else logp
        gap = _gap(record)
        products += float(gap @ direction)
        squares += float(direction @ direction)
        gaps += float(gap @ gap)
    if squares <= 0 or gaps <= 0:
        return 0.0, ""
    slope = products / squares
    ratio = 1 / (1 + slope) if slope > -0.9 else float("inf")
    score = products**2 / (squares * gaps)
    return score, (
        f"the generator samples at {ratio:.3g} times the temperature that the trainer divides by "
        f"(slope of gaps against log-probs {slope:+.3g})"
    )


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
        limits = table.quantiles[np.digitize(trainer, EDGES), 0] + FLOOR
        over += int((np.abs(_gap(record)) > limits).sum())
        actions += trainer.size
    share = over / max(actions, 1)
    score = 1 - abs(np.log(max(share, 1e-6) / 0.1)) / np.log(4)
    return score, "gaps are as large as those of bfloat16: one side computes in another dtype"


def _weights(gaps: Sequence[np.ndarray]) -> tuple[float, str]:
    """Tests E[exp(-g)] = 1 over records."""
    means = np.array([np.expm1(-gap).mean() for gap in gaps if gap.size])
    deviation = means.std() / np.sqrt(len(means)) if len(means) > 1 else np.inf
    honest = abs(means.mean()) <= 4 * deviation
    text = "gaps everywhere: other weights (old, or not loaded whole), or other arithmetic" + (
        ", for its log-probs are true ones of what it sampled" if honest else ""
    )
    return _LEFT, text
