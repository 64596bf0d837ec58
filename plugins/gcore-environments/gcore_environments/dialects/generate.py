"""vLLM's way to send a prompt by ids, as verifiers' train client speaks it.

Ids that come this way are a prompt, whatever they are: they are read and never trained.
"""

from __future__ import annotations

import secrets
from typing import Any

from gcore_core.contract.records import TRUNCATED
from gcore_environments.dialects import Event
from gcore_environments.dialects.chat import error_of, logprobs_of, usage_of
from gcore_environments.dialects.reading import (
    ids_of,
    refuse_other_sampling,
    stop_texts,
    whole_number,
    without_effect,
)
from gcore_environments.questions import IDS, Drawn, Policy, Refused, Wish

#: Sampling values that change nothing of what is sampled, or only how text is shown.
_KNOWN = (
    *("max_tokens", "logprobs", "stop", "skip_special_tokens", "spaces_between_special_tokens"),
    *("detokenize", "include_stop_str_in_output", "output_kind", "flat_logprobs"),
)


class Generate:
    """See ``gcore_environments.dialects.Dialect``."""

    names_events = False

    def read(self, body: dict[str, Any], policy: Policy) -> Wish:
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise Refused(400, "sampling_params must be an object.")
        refuse_other_sampling(sampling, policy)
        refuse_other_sampling(body, policy)
        for name in ("features", "content_parts"):
            if body.get(name):
                raise Refused(400, f"{name}: only ids are read.", "unsupported_value")
        if body.get("stream"):
            raise Refused(400, "stream must be false: the ids come in one piece.")
        if (sampling.get("logprobs") or 0) not in (0, 1):
            raise Refused(
                400,
                "sampling_params.logprobs must be 1: the policy's log-probs are known of what it "
                "sampled, and of nothing else.",
                "unsupported_value",
            )
        ignored = without_effect(body, ("token_ids", "sampling_params"))
        inner = without_effect(sampling, _KNOWN)
        return Wish(
            kind=IDS,
            ids=ids_of(body.get("token_ids"), "token_ids", policy.vocabulary),
            most=whole_number(sampling, "max_tokens"),
            stop=stop_texts(sampling),
            ignored=(*ignored, *(f"sampling_params.{name}" for name in inner)),
        )

    def write(self, wish: Wish, drawn: Drawn, policy: Policy) -> dict[str, Any]:
        choice = {
            "index": 0,
            "token_ids": drawn.ids,
            "logprobs": logprobs_of(drawn),
            "finish_reason": "length" if drawn.status == TRUNCATED else "stop",
        }
        return {
            "request_id": f"generate-{secrets.token_hex(12)}",
            "choices": [choice],
            "prompt_logprobs": None,
            "prompt_token_ids": drawn.prompt_ids,
            "usage": usage_of(drawn),
        }

    def events(self, wish: Wish, whole: dict[str, Any]) -> list[Event]:
        return [("", whole)]

    def error(self, refused: Refused) -> dict[str, Any]:
        return error_of(refused)
