"""Has SGLang never sample some ids, and leave the log-probs of all others as they are.

What SGLang offers for it changes log-probs too: a ``logit_bias``, a processor of logits and a
grammar all come before the softmax that log-probs are taken from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

#: Environment variable of SGLang's processes: the file with the ids.
_FILE = "GCORE_SGLANG_NEVER"


def tell(ids: Sequence[int], private: Path) -> None:
    """Lets the processes that this one starts know of the ids; see ``leave_out``.

    private: a directory that is there as long as they are.
    """
    file = private / "never.json"
    file.write_text(json.dumps(list(ids)), encoding="utf-8")
    os.environ[_FILE] = str(file)


def leave_out() -> None:
    """Changes SGLang in this process, which must be one that runs a model.

    It changes nothing where no id was told.
    """
    file = os.environ.get(_FILE)
    ids = json.loads(Path(file).read_text(encoding="utf-8")) if file else []
    if not ids:
        return
    from sglang.srt.layers.sampler import Sampler

    never = torch.tensor(ids, dtype=torch.int64)
    forward = Sampler.forward

    def leaving_out(
        self: Any, logits_output: Any, info: Any, return_logprob: bool, *rest: Any, **named: Any
    ) -> torch.Tensor:
        logits = logits_output.next_token_logits
        if return_logprob:
            # By this argument SGLang takes log-probs from other logits than it samples from.
            named.setdefault("logprob_logits", logits.clone())
        logits.index_fill_(-1, never.to(logits.device), -torch.inf)
        sampled: torch.Tensor = forward(self, logits_output, info, return_logprob, *rest, **named)
        return sampled

    Sampler.forward = leaving_out
