"""A model that counts down, so that a prompt says how long the answer to it is; and its trainer.

``placement_real.py`` measures placement on real engines with it. The prompt "w120" is answered
"w119 w118 ... w1" and the end, 120 tokens in all. Each token is the next one's code: the embedding
of ``w120`` is the row of the output matrix that makes ``w119`` all but certain. What attention and
the inner layers compute is as much work as in any model of this shape; their last matrices are
zero, so it changes no token.

The trainer changes nothing. It opens its records and pushes the weights as they are, so that
lengths stay what the prompts say, and a step is mostly generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core import hookimpl
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.providers import TrainerProvider
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.trainer import TrainRecord
from gcore_core.testing.safetensors_files import read_safetensors, write_safetensors

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
BOS = 1
EOS = 2
WIDTH = 256  # of the model, and words in its vocabulary
LONGEST = WIDTH - len(SPECIAL)
#: Logit of the next word; that of any other one is 0.
SURE = 60.0


def make(directory: Path, config: dict[str, Any], progress: Callable[[float, str], None]) -> None:
    """Makes the model and its tokenizer, in Hugging Face layout.

    config: ``layers`` (2), ``inner`` (512, the width of the inner layers) and ``seed`` (0).
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(int(config.get("seed", 0)))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WIDTH,
            hidden_size=WIDTH,
            intermediate_size=int(config.get("inner", 512)),
            num_hidden_layers=int(config.get("layers", 2)),
            num_attention_heads=WIDTH // 64,
            num_key_value_heads=WIDTH // 64,
            max_position_embeddings=1024,
            pad_token_id=0,
            bos_token_id=BOS,
            eos_token_id=EOS,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        codes = torch.zeros(WIDTH, WIDTH)
        codes[:, EOS] = 1
        for word in range(len(SPECIAL) + 1, WIDTH):
            codes[word] = torch.eye(WIDTH)[word - 1]
        model.model.embed_tokens.weight.copy_(codes)
        # The last norm gives a vector with a single 1 the length of sqrt(WIDTH).
        model.lm_head.weight.copy_(torch.eye(WIDTH) * SURE / WIDTH**0.5)
    model.save_pretrained(directory)
    words = [*SPECIAL, *(f"w{length}" for length in range(1, LONGEST + 1))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    progress(1.0, "made")


class StillTrainer:
    """Trains nothing: it keeps the model's weights and pushes them after every step.

    It implements ``gcore_core.contract.trainer.Trainer``.
    """

    def __init__(self, config: None, context: WorkerContext) -> None:
        self.version = 0
        self._tensors = read_safetensors(Path(context.model["path"]) / "model.safetensors")
        self._gaps = np.zeros(0)

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        """Returns zeros. A countdown's tokens are certain, so log-probs are nothing, too."""
        self._gaps = np.array([np.abs(r.columns["logp"]).max(initial=0.0) for r in records])
        return [dict.fromkeys(scalars, 0.0) for _ in records]

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        self.version = step + 1
        names = ("loss", "grad_norm", "learning_rate", "entropy", "kl", "clip_share", "busy_s")
        return dict.fromkeys(names, 0.0) | {
            "logprob_gap_max": float(self._gaps.max(initial=0.0)),
            "logprob_gap_mean": float(self._gaps.mean()) if len(self._gaps) else 0.0,
        }

    def skip(self, step: int) -> None:
        self.version = step + 1

    def weight_specs(self) -> list[TensorSpec]:
        return [spec for spec, _ in self._tensors]

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        yield from self._tensors

    def save(self, directory: Path) -> None:
        (directory / "version").write_text(str(self.version))

    def load(self, directory: Path) -> None:
        self.version = int((directory / "version").read_text())

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_safetensors(directory / "model.safetensors", self._tensors)

    def close(self) -> None:
        pass


@hookimpl
def gcore_trainers() -> Iterable[TrainerProvider]:
    yield TrainerProvider(summary="changes nothing", factory="countdown:StillTrainer")
