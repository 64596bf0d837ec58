"""A model and a task that our fast path for short records does not cover; quickstart.py uses them.

GPT-NeoX is no family of ``gcore_language.flat``, and a record has about 1,024 tokens: a prompt of
703 to 767 characters and 256 sampled tokens. The model is random and the task means nothing: what
is measured is how fast the same work is done, not what is learned.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore_core.contract.scorer import ScoredRecord

PROMPT_CHARACTERS = (703, 767)  # the longest, a first token and 256 sampled ones make 1,024
MAX_NEW_TOKENS = 256
WORDS = 4096  # so many that the end token is rare
POSITIONS = 2048


def make(directory: Path, config: dict[str, Any], progress: Callable[[float, str], None]) -> None:
    """Writes a random GPT-NeoX of 1.8 million weights and a tokenizer of single characters.

    config: ``seed``.
    """
    import torch
    from gcore_language.tiny import VOCABULARY, save_tokenizer
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(int(config["seed"]))
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=WORDS,
            num_attention_heads=4,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=False,
            **sizes,
            **ids,
        )
    )
    model.save_pretrained(directory)
    save_tokenizer(directory, extra=WORDS - VOCABULARY)
    progress(1.0, "a random GPT-NeoX")


def write_rows(path: Path, count: int) -> None:
    """Writes prompts of random digits, of lengths that differ."""
    draw = random.Random(0)
    lines = [
        {"prompt": "".join(draw.choices("0123456789", k=draw.randint(*PROMPT_CHARACTERS)))}
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(line | {"answer": ""}) + "\n" for line in lines))


def digit_share_of(text: str) -> float:
    """Returns the share of digits among a text's characters, which differs between answers."""
    return sum(map(str.isdigit, text)) / max(1, len(text))


def digit_share(record: ScoredRecord) -> float:
    """The reward, as our recipes call it."""
    return digit_share_of(record.text)
