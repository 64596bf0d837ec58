"""The plugin ``critic`` has the role of a value model, and the loss that trains it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract.providers import ObjectiveProvider, RoleProvider
from gcore_critic.config import ValueLossConfig

#: The role's name.
CRITIC = "critic"
#: What says how a model of the Hugging Face layout reads text.
_TOKENIZER = "tokenizer.json"


@hookimpl
def gcore_roles() -> Iterable[RoleProvider]:
    yield RoleProvider(
        name=CRITIC,
        summary="a value model, trained beside the policy: what reward is still to come",
        kind="trainer",
        columns=("values", "next_values"),
        objective="critic",
    )


@hookimpl
def gcore_objectives() -> Iterable[ObjectiveProvider]:
    yield ObjectiveProvider(
        summary="squared error of values, clipped around the old ones (PPO's critic)",
        factory="gcore_critic.loss:ValueLoss",
        config=ValueLossConfig,
        needs=("torch>=2.7",),
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    """Yields a problem where the critic would read the policy's tokens by another tokenizer.

    Both models must be directories of this machine; of others nothing is known here.
    """
    roles = plan["roles"]
    if CRITIC not in roles or "policy" not in roles:
        return
    texts = [_tokenizer_of(roles[name]["model"]) for name in (CRITIC, "policy")]
    if None not in texts and texts[0] != texts[1]:
        yield (
            f"roles.{CRITIC}.model.path: its {_TOKENIZER} is not that of roles.policy, and the "
            "critic gets the policy's token ids; take a model with the policy's tokenizer."
        )


def _tokenizer_of(model: Mapping[str, Any]) -> bytes | None:
    """Returns the tokenizer of a model directory; None where there is none to look at."""
    file = Path(str(model.get("path") or "")) / _TOKENIZER
    return file.read_bytes() if model.get("path") and file.is_file() else None
