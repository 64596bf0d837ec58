"""Has SGLang give log-probs of a prompt's tokens at the request's temperature.

SGLang by itself gives them at temperature 1, and log-probs of what it samples at the request's.
"""

from __future__ import annotations

from typing import Any

import torch


def divide_input_logits() -> None:
    """Changes SGLang in this process, which must be one that runs a model.

    It changes two methods: one notes the temperatures of a batch's requests, the other divides by
    them the logits of all rows that nothing is sampled from.
    """
    from sglang.srt.layers.logits_processor import LogitsMetadata
    from sglang.srt.layers.logprob_processor import InputLogprobProcessor

    metadata_of = LogitsMetadata.from_forward_batch
    forward = InputLogprobProcessor.forward

    def noting(cls: Any, forward_batch: Any) -> Any:
        metadata = metadata_of(forward_batch)
        if metadata.extend_return_logprob and forward_batch.sampling_info is not None:
            metadata.temperature = forward_batch.sampling_info.temperatures
        return metadata

    def dividing(self: Any, *, get_logits_fn: Any, **arguments: Any) -> Any:
        temperatures = arguments["logits_metadata"].temperature
        if temperatures is not None:
            get_logits_fn = _Divided(get_logits_fn, _divisors(temperatures, arguments))
        return forward(self, get_logits_fn=get_logits_fn, **arguments)

    LogitsMetadata.from_forward_batch = classmethod(noting)
    InputLogprobProcessor.forward = dividing


def _divisors(temperatures: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    """Returns the divisor of each row of logits, float32[rows, 1].

    temperatures: float32[B, 1] of the batch's requests.
    arguments: those of InputLogprobProcessor.forward.
    """
    of_rows = torch.tensor(arguments["token_to_seq_idx"], device=temperatures.device)
    divisors = temperatures.float().reshape(-1)[of_rows]
    # The sampler divides these rows itself.
    divisors[arguments["sample_indices"].to(divisors.device)] = 1.0
    return divisors[:, None]


class _Divided:
    """Computes logits as SGLang's function does, piece by piece, and divides them.

    logits_of: SGLang's function.
    divisors: float32[rows, 1] of all pieces together.
    """

    def __init__(self, logits_of: Any, divisors: torch.Tensor) -> None:
        self._logits_of = logits_of
        self._divisors = divisors
        self._done = 0  # rows of the pieces before this one

    def __call__(self, states: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        """Returns logits float32[R, V] of the next R rows."""
        logits: torch.Tensor = self._logits_of(states, *arguments, **named)
        divisors = self._divisors[self._done : self._done + len(states)]
        self._done += len(states)
        return logits / divisors
