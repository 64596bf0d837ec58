"""The quickstart's task: add five digits, either by a careless guess or by writing the running
totals.

    prompt    7+3+8+5+2=
    careless  ?31            '?' and a number near the sum: right about once in thirteen
    worked    :0710182325    ':' and the totals 07 10 18 23 25

The answer is what stands in the last two characters. ``teach`` makes a small model that has seen
both habits, 70% of the time the careless one; reinforcement learning must find out that working
pays.

``python arithmetic.py write`` makes ``train.jsonl`` and ``heldout.jsonl`` anew, the same ones every
time. The functions ``exact`` and ``shows_work`` are the rewards that quickstart.yaml names.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import LlamaForCausalLM

    from gcore_core.contract.scorer import ScoredRecord

DIGITS = 5
PROBLEMS = 10**DIGITS
TRAIN_ROWS, HELDOUT_ROWS = 4096, 512
CARELESS_OFF_BY = 6
WORKED_SHARE = 0.3

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
PAD, BOS, EOS, UNK = range(4)
# more than the task writes, so that a judge can be made from the same model
CHARACTERS = "0123456789+-=?:*yn"

PROMPT_END = 1 + 2 * DIGITS  # <bos>, the digits, a sign after each
TEXT_TOKENS = PROMPT_END + 1 + 2 * DIGITS + 1  # ':', the totals, <eos>


# -- problems --------------------------------------------------------------------------------------


def prompt_of(problem: int) -> str:
    """The question whose operands are the decimal digits of ``problem``, a number below 100,000."""
    return "+".join(f"{problem:0{DIGITS}d}") + "="


def answer_of(problem: int) -> str:
    """The sum, in two digits."""
    return f"{sum(map(int, str(problem))):02d}"


def _hash(problem: int) -> int:
    return int.from_bytes(
        hashlib.blake2b(prompt_of(problem).encode(), digest_size=8).digest(), "big"
    )


def is_held_out(problem: int) -> bool:
    """True for one problem in a hundred, chosen by its hash: no training text of any kind contains
    it.
    """
    return _hash(problem) % 100 == 0


def rows(held_out: bool) -> list[dict[str, str]]:
    """What the data files hold: the first rows, in the order of the hash, of the held-out problems
    or of the others.
    """
    problems = sorted((p for p in range(PROBLEMS) if is_held_out(p) == held_out), key=_hash)
    count = HELDOUT_ROWS if held_out else TRAIN_ROWS
    return [
        {"prompt": prompt_of(problem), "answer": answer_of(problem)} for problem in problems[:count]
    ]


def write(directory: Path) -> None:
    """Writes ``train.jsonl`` and ``heldout.jsonl``."""
    for name, held_out in (("train.jsonl", False), ("heldout.jsonl", True)):
        text = "".join(json.dumps(row) + "\n" for row in rows(held_out))
        (directory / name).write_text(text, encoding="utf-8")


# -- rewards ---------------------------------------------------------------------------------------


def exact(record: ScoredRecord) -> float:
    """1 when the model ended by itself and its last two characters are the sum."""
    return float(record.status == "finished" and record.text[-2:] == record.prompt.fields["answer"])


def shows_work(record: ScoredRecord) -> float:
    """1 when a total is written for every digit, right or wrong, whatever stands before it.

    It has weight 0: a curve to watch, nothing to learn from.
    """
    totals = record.text[1:]
    return float(len(totals) == 2 * DIGITS and totals.isdecimal())


# -- the model before reinforcement learning -------------------------------------------------------


def teach(directory: Path, config: dict[str, Any], progress: Callable[[float, str], None]) -> None:
    """Makes a model of 134,208 parameters, teaches it both habits and saves it in Hugging Face
    layout.

    config: ``seed`` (0), ``threads`` (1), ``steps`` (750) of 64 texts each: about half a minute on
        one core.
    progress: called with the share of the work that is done and a line for the reader.
    """
    teach_by(_losses, directory, {"steps": 750, **config}, progress)


def teach_by(
    losses: Callable[[LlamaForCausalLM, int, int], Iterator[Tensor]],
    directory: Path,
    config: dict[str, Any],
    progress: Callable[[float, str], None],
    tokenizer_of: Callable[[], Tokenizer] | None = None,
) -> None:
    """Makes a model, teaches it what makes losses small and saves it in Hugging Face layout.

    losses: called with the model, the seed and the number of steps; yields the loss of each step,
        which it computes when it is asked for the next one.
    config: as in ``teach``; ``steps`` is there.
    progress: as in ``teach``.
    tokenizer_of: makes the tokenizer; None: one of ``CHARACTERS``.
    """
    unknown = sorted(set(config) - {"seed", "threads", "steps"})
    if unknown:
        raise ValueError(f"teach knows seed, threads and steps, not {', '.join(unknown)}")
    seed, threads = int(config.get("seed", 0)), int(config.get("threads", 1))
    steps = int(config["steps"])
    progress(0.0, "importing torch and transformers")
    import torch
    from transformers import PreTrainedTokenizerFast

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = (tokenizer_of or _tokenizer)()
    model = _model(tokenizer.get_vocab_size())
    # Muon for the matrices inside the layers: with AdamW alone, three of six seeds got fewer than
    # nine worked answers in ten right after 900 steps.
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    outer = [p for name, p in model.named_parameters() if p.ndim == 1 or ".layers." not in name]
    optimizers = {
        torch.optim.Muon(inner, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"): 1e-2,
        torch.optim.AdamW(outer, weight_decay=0.01, betas=(0.9, 0.98), fused=True): 5e-3,
    }
    for step, loss in enumerate(losses(model, seed, steps)):
        done = step / steps
        loss.backward()
        for optimizer, peak in optimizers.items():
            optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 30) * (1 - 0.9 * done)
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            progress(done, f"teaching: step {step} of {steps}, loss {loss.item():.2f}")
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    ).save_pretrained(directory)
    progress(1.0, f"taught: loss {loss.item():.2f}")


def _model(vocabulary: int) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 100.0,
            },  # texts are 23 tokens long, not thousands
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            tie_word_embeddings=False,
        )
    )


def _losses(model: LlamaForCausalLM, seed: int, steps: int) -> Iterator[Tensor]:
    """Yields the loss of each step; see ``teach_by``."""
    import torch

    for batch in _batches(seed, steps):
        yield _loss(model, torch.from_numpy(batch))


def _loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Mean over the tokens of the completions in ``ids``, int64[B, 23]; the prompt is not learned.

    Worked and careless texts go through the model apart, each at its own length: a quarter fewer
        tokens to compute.
    """
    import torch

    total = torch.zeros(())
    worked = ids[:, PROMPT_END] == token(":")
    for texts in (ids[worked], ids[~worked, : PROMPT_END + 4]):
        completion = texts[:, PROMPT_END:]
        logits = model(
            input_ids=texts[:, :-1], use_cache=False, logits_to_keep=completion.shape[1]
        ).logits
        total = total + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), completion.flatten(), reduction="sum"
        )
    return total / (ids[:, PROMPT_END:] != PAD).sum()


def _batches(seed: int, steps: int, size: int = 64) -> Iterator[np.ndarray]:
    """int64[size, 23] each: <bos>, prompt, completion, <eos>, padding. All texts are made at
    once.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    allowed = np.array([problem for problem in range(PROBLEMS) if not is_held_out(problem)])
    problems = random.choice(allowed, steps * size)
    worked = random.random(len(problems)) < WORKED_SHARE
    digits = problems[:, None] // 10 ** np.arange(DIGITS)[::-1] % 10
    totals = digits.cumsum(1)
    guesses = np.maximum(
        0, totals[:, -1] + random.integers(-CARELESS_OFF_BY, CARELESS_OFF_BY + 1, len(problems))
    )

    zero = token("0")
    ids = np.full((len(problems), TEXT_TOKENS), PAD, dtype=np.int64)
    ids[:, 0] = BOS
    ids[:, 1:PROMPT_END:2] = zero + digits
    ids[:, 2:PROMPT_END:2] = token("+")
    ids[:, PROMPT_END - 1] = token("=")
    ids[:, PROMPT_END] = np.where(worked, token(":"), token("?"))
    ids[worked, PROMPT_END + 1 : -1 : 2] = zero + totals[worked] // 10
    ids[worked, PROMPT_END + 2 : -1 : 2] = zero + totals[worked] % 10
    ids[worked, -1] = EOS
    ids[~worked, PROMPT_END + 1] = zero + guesses[~worked] // 10
    ids[~worked, PROMPT_END + 2] = zero + guesses[~worked] % 10
    ids[~worked, PROMPT_END + 3] = EOS
    yield from ids.reshape(steps, size, -1)


def token(character: str) -> int:
    """The token of one character."""
    return len(SPECIAL) + CHARACTERS.index(character)


def _tokenizer(characters: str = CHARACTERS) -> Tokenizer:
    """One token a character, <bos> in front; decoding joins characters without spaces."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


if __name__ == "__main__":
    if sys.argv[1:] != ["write"]:
        sys.exit("usage: python arithmetic.py write")
    write(Path(__file__).parent)
