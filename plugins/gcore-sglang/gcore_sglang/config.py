"""What may be set under ``config:`` of a role that uses this plugin."""

from __future__ import annotations

from dataclasses import dataclass

from gcore_language.settings import GeneratorSettings, require


@dataclass(frozen=True, kw_only=True)
class SglangGeneratorConfig(GeneratorSettings):
    """Settings of ``roles.<generator>.config``.

    Every other argument of SGLang's server goes under ``engine:``.
    """

    kv_cache_tokens: int | None = None
    """Tokens that the key-value cache holds, above 0; empty: 16,384 on a CPU, on a GPU what SGLang
    finds free.
    """
    start_timeout_s: float = 900.0
    """Most seconds, above 0, until SGLang has started and answers: it loads the model and, on a
    GPU, captures graphs.
    """
    push_timeout_s: float = 600.0
    """Most seconds, above 0, that SGLang may take for one bucket of a weight push."""

    def __post_init__(self) -> None:
        super().__post_init__()
        room = self.kv_cache_tokens
        require(room is None or room > 0, "kv_cache_tokens", f"must be positive, is {room}")
        for name in ("start_timeout_s", "push_timeout_s"):
            require(getattr(self, name) > 0, name, f"must be positive, is {getattr(self, name)}")
