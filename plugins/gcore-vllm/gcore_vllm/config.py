"""What may be set under ``config:`` of a role that uses this plugin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gcore_core.errors import ConfigError

#: Below it vLLM takes this temperature in silence, and log-probs would be those of another one than the record says.
_COLDEST = 0.01


def _require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise ConfigError(what, where=where)


@dataclass(frozen=True, kw_only=True)
class VllmGeneratorConfig:
    """Settings of ``roles.<generator>.config``. Every other argument of vLLM's engine goes under ``engine:``."""

    max_new_tokens: int = 512
    """Most actions of one sample; the end-of-sequence token counts."""
    temperature: float = 1.0
    """Logits are divided by it; log-probs are of the divided logits. 0 samples greedily."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability; log-probs stay those of all tokens."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 is all. Log-probs stay those of all tokens."""
    stop: list[str] = field(default_factory=list)
    """A sample ends when its text contains one of these."""
    max_batch: int = 256
    """Most samples decoded at once; others wait (vLLM's max_num_seqs)."""
    context_length: int | None = None
    """Most tokens of prompt and completion; empty: the model's. A prompt that fills it fails as prompt_too_long."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and cache; log-probs are always computed in float32."""
    kv_cache_gib: float | None = None
    """Memory of the key-value cache in GiB; empty: 1 on a CPU, on a GPU what vLLM finds free."""
    threads: int = 1
    """CPU threads; 0 leaves vLLM's choice."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model directory."""

    def __post_init__(self) -> None:
        _require(self.max_new_tokens > 0, "max_new_tokens", f"must be positive, is {self.max_new_tokens}")
        _require(self.max_batch > 0, "max_batch", f"must be positive, is {self.max_batch}")
        cold = self.temperature != 0 and self.temperature < _COLDEST
        _require(not cold, "temperature", f"must be 0 or at least {_COLDEST}, is {self.temperature}")
        _require(0 < self.top_p <= 1, "top_p", f"must be in 0..1, is {self.top_p}")
        _require(self.top_k >= 0, "top_k", f"must not be negative, is {self.top_k}")
        _require("" not in self.stop, "stop", "an empty string would end every sample")
        length = self.context_length
        _require(length is None or length > 0, "context_length", f"must be positive, is {length}")
        room = self.kv_cache_gib
        _require(room is None or room > 0, "kv_cache_gib", f"must be positive, is {room}")
