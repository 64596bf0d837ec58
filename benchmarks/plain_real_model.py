"""Fine-tunes a model in plain torch: forward, backward and AdamW in a loop, and nothing else.

    python benchmarks/plain_real_model.py MODEL_DIRECTORY SETTINGS_JSON

Run by benchmarks/real_model.py, on the rows that G-Core fine-tunes on, with one thread. Rows are
padded to the longest one, as transformers' models take them. Only the states that predict trained
tokens go through the head. The last line of the output is a JSON object: seconds of the processor,
tokens and loss of each step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer


def batch_of(tokenizer: Any, rows: list[dict[str, str]]) -> tuple[torch.Tensor, ...]:
    """Returns tokens [R, T], where rows have any, and where the next token is trained on."""
    prompts = [tokenizer(row["prompt"], add_special_tokens=False).input_ids for row in rows]
    answers = [
        [*tokenizer(row["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        for row in rows
    ]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    shape = (len(rows), longest)
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    predicts = torch.zeros(shape, dtype=torch.bool)
    for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[place, :end] = torch.tensor(prompt + answer)
        mask[place, :end] = 1
        predicts[place, len(prompt) - 1 : end - 1] = True
    return ids, mask, predicts


def main(path: str, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    ids, mask, predicts = batch_of(AutoTokenizer.from_pretrained(path), rows)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings["learning_rate"],
        betas=tuple(settings["betas"]),
        weight_decay=settings["weight_decay"],
        fused=True,
    )
    targets = ids.roll(-1, 1)[predicts]
    steps = []
    for _ in range(settings["steps"]):
        began_s = time.process_time()
        hidden = model.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state
        loss = cross_entropy(model.lm_head(hidden[predicts]), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cpu_s = time.process_time() - began_s
        steps.append({"cpu_s": cpu_s, "tokens": int(mask.sum()), "loss": loss.item()})
    print(json.dumps(steps))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
