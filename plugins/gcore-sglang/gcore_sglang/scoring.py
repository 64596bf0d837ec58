"""Has SGLang score actions that are given: it reads prompt and actions as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gcore_language.images import GRID

from gcore_core.contract.columns import Columns
from gcore_core.contract.errors import ContractError


def check_scorable(record: Columns, context_length: int) -> None:
    """Raises ContractError for a record whose log-probs SGLang cannot tell.

    context_length: most tokens of prompt and actions.
    """
    length = len(record["prompt_ids"]) + len(record["action_ids"])
    problem = ""
    if GRID in record:
        problem = "log-probs of records with images are asked for without their images."
    elif length > context_length:
        problem = f"a record of {length} tokens is longer than the context of {context_length}."
    if problem:
        raise ContractError(problem, where="logprobs")


def scoring_body(record: Columns) -> dict[str, Any]:
    """Returns the body of ``/generate`` that has the record's actions scored."""
    return {
        "input_ids": [*record["prompt_ids"].tolist(), *record["action_ids"].tolist()],
        "sampling_params": {
            "temperature": float(record["temperature"]),
            "max_new_tokens": 1,
            "ignore_eos": True,
        },
        "return_logprob": True,
        # Log-probs from the prompt's last token on; all before it may come from the cache.
        "logprob_start_len": max(len(record["prompt_ids"]) - 1, 0),
    }


def scored(record: Columns, answer: Mapping[str, Any]) -> np.ndarray:
    """Returns log-probs float32[A] of the record's actions.

    answer: SGLang's to ``scoring_body``. Raises ContractError when it is about other tokens.
    """
    actions: Sequence[int] = record["action_ids"].tolist()
    told = answer["meta_info"]["input_token_logprobs"][-len(actions) :]
    # SGLang calls the vocabulary's last token 0 here; the log-prob is that of the last token.
    if any(token not in (action, 0) for (_, token, *_), action in zip(told, actions, strict=True)):
        raise ContractError("SGLang scored other tokens than it was given.", where="logprobs")
    return np.array([logp for logp, *_ in told], np.float32)
