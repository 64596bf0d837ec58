"""Says what most likely went wrong, once log-probs are known to disagree. Pure.

An alarm only says that a generator's log-probs are not the trainer's. The records of the step say
more, because each mistake leaves a pattern of its own in the gaps. A gap is the rollout's log-prob
of one action less the trainer's, in nats.

``diagnose`` tries each cause that it knows and gives it a score from 0 to 1: how well its pattern
fits. Whoever asks averages the scores that ranks give a cause, weighed by the sum of their squared
gaps, and names the cause with the highest mean (``gcore_sentinel.causes``).

    cause        its pattern
    shifted      each log-prob is that of the action before, or of the action after
    last         only the last action of each record is off
    prompts      some prompts are off and the others are not, or all samples of a prompt but its
                 first: keys and values of a shared prefix were cached and are wrong
    temperature  gaps grow in proportion to log-prob + entropy
    rounded      the log-probs that came have no more bits than bfloat16 or float16 have
    precision    a float32 pair has gaps of the size that bfloat16 arithmetic gives
    weights      gaps everywhere, without a pattern: what is left

How much is wrong. Most scores are "which part of what is wrong does this cause explain?", so there
must be a number for "how much is wrong" (``_Scale.misfit``):

    float32        the sum of squared gaps. Healthy gaps are so small that they do not count.
    low precision  how many more gaps than usual are large. A gap is large when it exceeds the 0.9
                   quantile of healthy gaps at its log-prob; usual is one in ten. Squares would not
                   do: one gap of a healthy run can have a larger square than a thousand wrong ones
                   together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gcore_core.contract.sentinel import Compared, Finding
from gcore_sentinel.evidence import EDGES, FLOOR, Table

#: (score, sentence for a person).
_Explained = tuple[float, str]

#: Gaps count as at most so many nats. A log-prob that is not a number is off by as much.
_LARGEST = 4.0
#: Share of healthy gaps above the 0.9 quantile.
_USUAL = 0.1
#: Low precision: what is right has a smaller share of large gaps than the first, what is off has a
#: larger share than the second.
_RIGHT, _OFF = 0.3, 0.5
#: Score of "weights", the cause that is left: another cause is named where it explains more.
_LEFT = 0.5
#: Score of a pattern that is either there or not.
_CLEAR = 0.9


def diagnose(
    records: Sequence[Compared],
    low_precision: Table | None = None,
    healthy: Table | None = None,
) -> list[Finding]:
    """Returns a finding for each cause; none where there is no gap at all.

    records: of one step and of the replicas that the alarm names.
    low_precision: healthy bfloat16 gaps of this model, where the pair itself is of float32.
    healthy: healthy gaps of the pair, where it is of low precision.
    """
    scale = _Scale(healthy)
    weight = sum(_squares(_gaps(record)) for record in records)
    if weight <= 0:
        return []
    causes: dict[str, Callable[[], _Explained]] = {
        "shifted": lambda: _shifted(records, scale),
        "last": lambda: _last(records, scale),
        "prompts": lambda: _prompts(records, scale),
        "temperature": lambda: _temperature(records, scale),
        "rounded": lambda: _rounded(records),
        "precision": lambda: _precision(records, low_precision),
        "weights": lambda: _weights(records),
    }
    findings = []
    for cause, explain in causes.items():
        score, text = explain()
        findings.append(
            Finding(cause=cause, score=float(np.clip(score, 0, 1)), weight=weight, text=text)
        )
    return findings


# -- gaps, and how much is wrong -------------------------------------------------------------------


def _gaps(record: Compared) -> np.ndarray:
    """Returns the gaps of a record's unmasked actions, float64[A], in nats."""
    return _difference(record.rollout_logp[record.mask], record.trainer_logp[record.mask])


def _difference(rollout: np.ndarray, trainer: np.ndarray) -> np.ndarray:
    gaps = np.nan_to_num(rollout.astype(np.float64) - trainer, nan=_LARGEST)
    clipped: np.ndarray = np.clip(gaps, -_LARGEST, _LARGEST)
    return clipped


def _trainers(record: Compared) -> np.ndarray:
    """Returns the trainer's log-probs of a record's unmasked actions, float32[A]."""
    logp: np.ndarray = record.trainer_logp[record.mask]
    return logp


def _squares(values: np.ndarray) -> float:
    return float(np.square(values).sum())


@dataclass(frozen=True)
class _Scale:
    """Measures gaps; see the top of this module.

    healthy: the pair's table in low precision; None in float32.
    """

    healthy: Table | None

    def limits(self, trainer: np.ndarray) -> np.ndarray:
        """Returns the 0.9 quantile of healthy gaps at each log-prob, float64[A]."""
        return np.ones(len(trainer)) if self.healthy is None else _limits(self.healthy, trainer)

    def misfit(self, gaps: np.ndarray, trainer: np.ndarray) -> float:
        """Returns how much is wrong with some gaps, at least 0; it adds up over actions."""
        if self.healthy is None:
            return _squares(gaps)
        large = int(np.count_nonzero(np.abs(gaps) > self.limits(trainer)))
        return max(large - _USUAL * len(gaps), 0.0)

    def mean(self, gaps: np.ndarray, trainer: np.ndarray) -> float:
        """Returns how large the gaps of one record are: mean square, or share of large ones."""
        if self.healthy is None:
            return float(np.square(gaps).mean())
        return float((np.abs(gaps) > self.limits(trainer)).mean())


def _limits(table: Table, trainer: np.ndarray) -> np.ndarray:
    limits: np.ndarray = table.quantiles[np.digitize(trainer, EDGES), 0] + FLOOR
    return limits


def _explained(before: float, after: float) -> float:
    """Returns the part of a misfit that a cause explains; ``after`` is what it leaves."""
    return 1 - after / before if before > 0 else 0.0


# -- shifted ---------------------------------------------------------------------------------------


def _shifted(records: Sequence[Compared], scale: _Scale) -> _Explained:
    """Compares each log-prob with the trainer's of the action before it, and of that after it."""
    best, where = 0.0, "before"
    for name, own, other in (
        ("before", slice(1, None), slice(None, -1)),
        ("after", slice(None, -1), slice(1, None)),
    ):
        in_place = shifted = 0.0
        for record in records:
            both = record.mask[own] & record.mask[other]
            rollout = record.rollout_logp[own][both]
            for_own, for_other = record.trainer_logp[own][both], record.trainer_logp[other][both]
            in_place += scale.misfit(_difference(rollout, for_own), for_own)
            shifted += scale.misfit(_difference(rollout, for_other), for_other)
        score = _explained(in_place, shifted)
        if score > best:
            best, where = score, name
    return best, f"log-probs are shifted by one: each is that of the action {where} it"


# -- the last action -------------------------------------------------------------------------------


def _last(records: Sequence[Compared], scale: _Scale) -> _Explained:
    """Looks which part of what is wrong lies in the last actions, and what came for them."""
    longer = [record for record in records if record.mask.sum() >= 2]
    actions = sum(int(record.mask.sum()) for record in longer)
    if not longer or len(longer) > actions / 2:  # last actions are most of all actions
        return 0.0, ""
    gaps = np.concatenate([_gaps(record) for record in records])
    trainer = np.concatenate([_trainers(record) for record in records])
    last_gaps = np.array([_gaps(record)[-1] for record in longer])
    last_trainer = np.array([_trainers(record)[-1] for record in longer])
    if scale.healthy is not None and scale.mean(last_gaps, last_trainer) <= _OFF:
        return 0.0, ""  # most last actions are right
    everything = scale.misfit(gaps, trainer)
    score = scale.misfit(last_gaps, last_trainer) / everything if everything > 0 else 0.0
    came = [record.rollout_logp[record.mask] for record in longer]
    what = "is another's"
    if np.mean([logp[-1] == 0 for logp in came]) > 0.5:
        what = "is 0"
    elif np.mean([logp[-1] == logp[-2] for logp in came]) > 0.5:
        what = "is that of the action before it"
    return score, f"only the last action of records is off: the log-prob that came with it {what}"


# -- prompts ---------------------------------------------------------------------------------------

#: Fewer prompts than this say nothing.
_LEAST_PROMPTS = 8
#: Float32: a right record has at most this part of the others' mean square.
_RIGHT_SAMPLE, _RIGHT_PROMPT = 0.05, 0.02


def _prompts(records: Sequence[Compared], scale: _Scale) -> _Explained:
    """Looks for right prompts beside wrong ones, and for right first samples beside wrong others.

    Samples of a prompt share its cached keys and values. The first sample computes them, the others
    read them. A cache that outlived a push spoils all samples of the prompts that were in it.
    """
    sized = [record for record in records if record.mask.any()]
    sizes = np.array([scale.mean(_gaps(record), _trainers(record)) for record in sized])
    prompts: dict[int, list[int]] = {}
    for place, record in enumerate(sized):
        prompts.setdefault(record.ordinal, []).append(place)
    lowest = {ordinal: min(sized[i].sample for i in places) for ordinal, places in prompts.items()}
    is_first = np.array([record.sample == lowest[record.ordinal] for record in sized], bool)
    first, rest = sizes[is_first], sizes[~is_first]
    enough = len(first) >= _LEAST_PROMPTS and len(rest) >= len(first)
    if enough and _is_right(np.median(first), np.median(rest), _RIGHT_SAMPLE, scale):
        return _CLEAR, (
            "the first sample of a prompt is right and the others are not: they read cached keys "
            "and values of the prompt"
        )
    means = np.array([sizes[places].mean() for places in prompts.values()])
    if len(means) < _LEAST_PROMPTS:
        return 0.0, ""
    right = np.array([_is_right(mean, means.mean(), _RIGHT_PROMPT, scale) for mean in means])
    off = ~right if scale.healthy is None else means > _OFF
    # Most prompts must be clearly one or the other, and a quarter of them right.
    apart = 0.25 <= right.mean() < 1 and (right | off).mean() >= _CLEAR
    text = (
        f"{int((~right).sum())} of {len(means)} prompts are off and the others are not: cached "
        "keys and values of a shared prefix that outlived a push"
    )
    return (_CLEAR if apart else 0.0), text


def _is_right(size: float, others: float, part: float, scale: _Scale) -> bool:
    """Returns whether something of this size is right, beside others that are not.

    part: in float32, of the others' size, that a right one may have.
    """
    if scale.healthy is None:
        return bool(others > 0 and size < part * others)
    return bool(size < _RIGHT < others)


# -- temperature -----------------------------------------------------------------------------------

#: Log-probs that have nothing to do with the trainer's have a slope of -1. So a slope beyond this
#: is not called a temperature.
_STEEPEST = 0.6
#: In low precision a slope must be so many of its own standard errors.
_SURE = 5.0
#: In low precision, where no more than this share of gaps is larger than usual, a slope cannot be
#: judged by what it explains; a sure one is then named.
_UNSEEN = 0.05
#: Below this a slope may be the pair's own rounding.
_FLATTEST = 1e-3
#: Rounds of reweighting, in which the slope of a robust regression settles.
_ROUNDS = 20


def _temperature(records: Sequence[Compared], scale: _Scale) -> _Explained:
    """Fits gaps = slope (log-prob + entropy), and looks how much is wrong beside that line.

    A sampler at temperature T where the trainer divides by 1 has gaps of that form, to first order
    in slope = 1 / T - 1. Other weights have no such slope, or one that explains little. Records
    without entropies are left out where others have some; else their mean log-prob stands for it.
    """
    chosen = [record for record in records if record.entropy is not None] or list(records)
    gaps = np.concatenate([_gaps(record) for record in chosen])
    trainer = np.concatenate([_trainers(record) for record in chosen])
    direction = np.concatenate([_direction(record) for record in chosen])
    if not (_squares(direction) > 0 and _squares(gaps) > 0):
        return 0.0, ""
    if scale.healthy is None:
        slope = float(gaps @ direction) / _squares(direction)  # least squares
        is_sure = True
    else:
        sizes = [int(record.mask.sum()) for record in chosen]
        slope, error = _robust_slope(gaps, direction, scale.limits(trainer), sizes)
        is_sure = abs(slope) >= max(_SURE * error, _FLATTEST)
    if not is_sure or abs(slope) > _STEEPEST:
        return 0.0, ""
    text = (
        f"the generator samples at {1 / (1 + slope):.4g} times the temperature that the trainer "
        f"divides by (slope of gaps against log-probs {slope:+.3g})"
    )
    before = scale.misfit(gaps, trainer)
    if scale.healthy is not None and before < _UNSEEN * len(gaps):
        return _CLEAR, text  # no gap is larger for it, and the slope is sure
    score = _explained(before, scale.misfit(gaps - slope * direction, trainer))
    return score, text


def _direction(record: Compared) -> np.ndarray:
    """Returns the derivative of a record's log-probs by the inverse temperature, float64[A]."""
    direction: np.ndarray = _trainers(record).astype(np.float64)
    if record.entropy is not None:
        direction += record.entropy[record.mask]
    elif direction.size:
        direction -= direction.mean()
    return direction


def _robust_slope(
    gaps: np.ndarray, direction: np.ndarray, limits: np.ndarray, sizes: Sequence[int]
) -> tuple[float, float]:
    """Returns (slope, its standard error) of a regression that large healthy gaps do not spoil.

    A gap is measured by ``limits``, the size that healthy ones at its log-prob have. Where it
    is larger than that, it counts less (Huber's M-estimate, by reweighting). The error is that of
    whole records, since the actions of one are not independent.

    gaps, direction, limits: float64[A]. sizes: actions of each record.
    """
    slope = 0.0
    for _ in range(_ROUNDS):
        rest = np.abs(gaps - slope * direction) / limits
        weights = 1 / np.square(limits) / np.maximum(rest, 1.0)
        information = float((weights * direction * direction).sum())
        slope = float((weights * gaps * direction).sum()) / information
    of_record = np.repeat(np.arange(len(sizes)), sizes)
    scores = weights * (gaps - slope * direction) * direction
    by_record = np.bincount(of_record, scores, minlength=len(sizes))
    return slope, float(np.sqrt(_squares(by_record))) / information


# -- the rest --------------------------------------------------------------------------------------


def _rounded(records: Sequence[Compared]) -> _Explained:
    """Looks whether the log-probs that came have fewer bits than float32."""
    rollout = np.concatenate([r.rollout_logp[r.mask] for r in records]).astype(np.float32)
    rollout = rollout[np.isfinite(rollout) & (rollout != 0)]
    if len(rollout) < 16:
        return 0.0, ""
    bits = np.ascontiguousarray(rollout).view(np.uint32)
    for dtype, is_rounded in (
        ("bfloat16", (bits & 0xFFFF) == 0),  # bfloat16 is the upper half of a float32
        ("float16", rollout.astype(np.float16).astype(np.float32) == rollout),
    ):
        if is_rounded.mean() > 0.99:
            return 1.0, f"the generator's log-probs are rounded to {dtype}"
    return 0.0, ""


def _precision(records: Sequence[Compared], table: Table | None) -> _Explained:
    """Looks whether the gaps of a float32 pair have the 0.9 quantiles of bfloat16 arithmetic.

    Then one gap in ten exceeds them. Score 1 is exactly so many, score 0 four times as many or a
    quarter of that.
    """
    if table is None:
        return 0.0, ""
    gaps = np.concatenate([_gaps(record) for record in records])
    trainer = np.concatenate([_trainers(record) for record in records])
    share = float((np.abs(gaps) > _limits(table, trainer)).mean()) if gaps.size else 0.0
    score = 1 - abs(np.log(max(share, 1e-6) / _USUAL)) / np.log(4)
    return score, "gaps are as large as those of bfloat16: one side computes in another dtype"


def _weights(records: Sequence[Compared]) -> _Explained:
    """Says what is left, and whether the log-probs are true ones of what was sampled.

    They are when exp(-gap), the trainer's probability over the rollout's, has a mean of 1. That
    holds for whatever weights. It does not for log-probs that are not those of the sampler.
    """
    means = np.array([np.expm1(-_gaps(record)).mean() for record in records if record.mask.any()])
    error = means.std() / np.sqrt(len(means)) if len(means) > 1 else np.inf
    text = "gaps everywhere: other weights (old, or not loaded whole), or other arithmetic"
    if abs(means.mean()) <= 4 * error:
        text += (
            f"; its log-probs are true ones of what it sampled (mean ratio {1 + means.mean():.3f})"
        )
    return _LEFT, text
