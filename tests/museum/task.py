"""The museum's task and model: as small as a run can be that still has every part.

Prompts are sums such as "12+7=". The model is a random Llama of two layers, whose weights are large
enough that a wrong weight changes log-probs by far more than rounding. What is learned does not
matter here; that weights, log-probs and gradients move at every step does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore_core.contract.scorer import ScoredRecord


def make(directory: Path, config: dict[str, Any], progress: Callable[[float, str], None]) -> None:
    """Writes the model and its tokenizer. config: ``seed`` (0)."""
    from gcore_language.tiny import save_model

    save_model(directory, "llama", int(config.get("seed", 0)), scale=2.0)
    progress(1.0, "made")


def digits(record: ScoredRecord) -> float:
    """The share of digits among the answer's characters, and a part that the row alone decides."""
    text = record.text
    share = sum(character.isdecimal() for character in text) / max(len(text), 1)
    return share + float(record.prompt.fields["bonus"])
