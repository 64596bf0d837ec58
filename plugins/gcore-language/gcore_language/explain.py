"""Looks for why a generator gave other log-probs than the trainer, by scoring its records again.

It is asked after an alarm, while the generator still holds the weights that sampled the records.
Everything that could be wrong predicts log-probs of its own; what predicts those that came with the
records is the cause. A finding's score is the share of the gaps' energy (their sum of squares, each
clipped at 4 nats) that it explains, as in gcore-sentinel.

    derived    something that was made of the weights, or a table, is not what it must be
    read       the prompts were read with other tokens at their ends
    told       log-probs are right and were told otherwise: without temperature, or of some tokens
    scale      one side divides its logits by another number than the other
    dtype      a part is computed in another dtype
    sampling   a plain forward pass gives the trainer's log-probs, and sampling gives others
    held       a plain forward pass gives what came: generator and trainer hold other weights, or
               the trainer's forward pass is another
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gcore_core.contract.columns import Columns
from gcore_core.contract.sentinel import Compared, Finding

#: Scores the actions of records: float32[A] of each.
Score = Callable[[Sequence[Columns]], Sequence[np.ndarray]]
_CLIP = 4.0
#: What is left of the energy where two sides agree, and what a cause must explain to be named.
_AGREES = 0.02
_EXPLAINS = 0.8
_EXACT = 0.99
#: The score of what remains when nothing more is known; above that of "gaps everywhere".
_KNOWN_SIDE = 0.6
#: The search for a scale: over e ** -1.5 .. e ** 1.5, until it is known to five digits.
_WIDEST = 1.5
_GOLDEN = (5**0.5 - 1) / 2
_SEARCHES = 24
_SAME_SCALE = 1e-2


def explain(
    records: Sequence[Compared],
    score: Score,
    *,
    name: str,
    scaled: Callable[[float], Score],
    others: Sequence[tuple[str, str, Score]],
    derived: Sequence[str],
) -> list[Finding]:
    """Returns a finding for the cause that explains the gaps best; none where nothing does.

    score: a plain forward pass with the weights that are held now.
    name: of the generator, for the sentences.
    scaled: factor of the logits -> a forward pass with it.
    others: (cause, what the generator does then, a forward pass that does so), of what else it can
        try.
    derived: what is derived from weights and is not what it must be.
    """
    records = [record for record in records if record.prompt_ids is not None]
    if not records:
        return []
    columns = [_columns(record) for record in records]
    gaps = _energy(records, [record.trainer_logp for record in records])
    if gaps <= 0:
        return []

    def finding(cause: str, share: float, text: str) -> Finding:
        return Finding(cause=cause, score=share, weight=gaps, text=text)

    if derived:
        names = ", ".join(derived[:3]) + (f" and {len(derived) - 3} more" if derived[3:] else "")
        text = f"{name} samples with {names}: its weights and its model give others"
        return [finding("derived", 1.0, text)]
    plain = score(columns)
    # A cause explains what a plain forward pass leaves open too, else it is only near to that.
    left_open = min(gaps, _energy(records, plain))
    tried = [
        (_energy(records, logps), cause, f"{name} {text}")
        for cause, text, logps in _predictions(columns, score, others)
    ]
    causes = [one for one in tried if one[0] <= (1 - _EXPLAINS) * left_open]
    held = _energy(records, plain) <= _AGREES * gaps  # a plain pass gives what came with records
    right = _apart(records, plain) <= _AGREES * gaps  # it gives what the trainer has
    # A plain pass agrees with one side alone: a scale of its logits is looked for that gives the
    # other side's log-probs, unless something that was tried explains nearly all.
    if held != right and not any(one[0] <= (1 - _EXACT) * left_open for one in causes):
        energy = _apart if held else _energy
        factor, left = _scale(lambda factor: energy(records, scaled(factor)(columns)))
        if left <= (1 - _EXPLAINS) * gaps:
            text = _of_scale(records, 1 / factor if held else factor, name)
            causes.append((left, "scale", text))
        if not causes:
            text = _of_side(records, gaps, name, held=held)
            return [finding("held" if held else "sampling", _KNOWN_SIDE, text)]
    return [finding(cause, 1 - left / gaps, text) for left, cause, text in sorted(causes)[:1]]


def _scale(
    left: Callable[[float], float],
) -> tuple[float, float]:
    """Returns the factor of logits that leaves the least energy, and that energy.

    A golden-section search over the logarithm.
    """
    low, high = -_WIDEST, _WIDEST
    first, second = (low + (high - low) * share for share in (1 - _GOLDEN, _GOLDEN))
    at_first, at_second = left(np.exp(first)), left(np.exp(second))
    for _ in range(_SEARCHES):
        if at_first < at_second:
            high, second, at_second = second, first, at_first
            first = high - _GOLDEN * (high - low)
            at_first = left(np.exp(first))
        else:
            low, first, at_first = first, second, at_second
            second = low + _GOLDEN * (high - low)
            at_second = left(np.exp(second))
    return float(np.exp((low + high) / 2)), min(at_first, at_second)


def _of_scale(records: Sequence[Compared], factor: float, name: str) -> str:
    """factor: of the generator's logits over the trainer's, both behind their temperatures."""
    told = records[0].temperature
    what = f"{name} samples as if its logits were {factor:.3g} times the trainer's: "
    if told != 1 and abs(factor * told - 1) < _SAME_SCALE:
        return f"{what}the trainer's know nothing of the temperature {told:g} that records say"
    return f"{what}one of them has another temperature, or a scale of logits that the other lacks"


def _of_side(records: Sequence[Compared], gaps: float, name: str, *, held: bool) -> str:
    """Says which side a plain forward pass of the generator agrees with: what came, or not."""
    if held:
        return (
            f"{name} computes what came again from the weights that it holds: the trainer holds "
            "other weights than it has sent, or its forward pass is another"
        )
    right = (
        f"a plain forward pass of {name} gives the trainer's log-probs, so its weights are right"
    )
    if _of_first(records) >= (1 - _AGREES) * gaps:
        return (
            f"{right}, and only the first action of answers is off: what was computed of prompts "
            "is kept in a cache that outlives a push"
        )
    return f"{right}, and sampling gives others: a cache, a captured graph, a kernel"


def _predictions(
    columns: Sequence[Columns], score: Score, others: Sequence[tuple[str, str, Score]]
) -> list[tuple[str, str, Sequence[np.ndarray]]]:
    """Returns (cause, end of a sentence, log-probs) of everything that is tried."""
    predictions: list[tuple[str, str, Sequence[np.ndarray]]] = []
    ends: tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...] = (
        ("reads the first token of prompts twice", lambda ids: np.concatenate([ids[:1], ids])),
        ("reads prompts without their first token", lambda ids: ids[1:]),
        ("reads prompts without their last token", lambda ids: ids[:-1]),
    )
    for text, change in ends:
        if all(len(record["prompt_ids"]) > 1 for record in columns):
            changed = [{**r, "prompt_ids": change(r["prompt_ids"])} for r in columns]
            predictions.append(("read", f"{text}: others than records hold", score(changed)))
    if any(float(record["temperature"]) != 1 for record in columns):
        text = "tells log-probs of before the temperature, the trainer computes those of after it"
        warm = [{**record, "temperature": np.ones((), np.float32)} for record in columns]
        predictions.append(("told", text, score(warm)))
    predictions += [(cause, text, other(columns)) for cause, text, other in others]
    return predictions


def _columns(record: Compared) -> Columns:
    assert record.prompt_ids is not None and record.action_ids is not None
    return {
        "prompt_ids": record.prompt_ids,
        "action_ids": record.action_ids,
        "logp": record.rollout_logp,
        "action_mask": record.mask.astype(np.uint8),
        "temperature": np.array(record.temperature, np.float32),
    }


def _energy(records: Sequence[Compared], logps: Sequence[np.ndarray]) -> float:
    """Returns the energy of the gaps between what came with records and other log-probs."""
    return float(
        sum(
            _squares(record.rollout_logp, logp, record.mask)
            for record, logp in zip(records, logps, strict=True)
        )
    )


def _of_first(records: Sequence[Compared]) -> float:
    """Returns the energy of the first actions alone, of records that have several."""
    return float(
        sum(
            _squares(record.rollout_logp[:1], record.trainer_logp[:1], record.mask[:1])
            for record in records
            if len(record.rollout_logp) > 1
        )
    )


def _apart(records: Sequence[Compared], logps: Sequence[np.ndarray]) -> float:
    """Returns the energy of the gaps between the trainer's log-probs and others."""
    return float(
        sum(
            _squares(record.trainer_logp, logp, record.mask)
            for record, logp in zip(records, logps, strict=True)
        )
    )


def _squares(first: np.ndarray, second: np.ndarray, mask: np.ndarray) -> float:
    gap = (first.astype(np.float64) - second)[mask]
    return float(np.square(np.clip(np.nan_to_num(gap, nan=_CLIP), -_CLIP, _CLIP)).sum())
