"""Plays episodes by TRL's GRPOTrainer, for episode_rivals.py, with generation scripted.

    python benchmarks/trl_episodes.py TOKENIZER ids|generate

``ids``: what stands in for the engine gives ids, as a server of vLLM does. ``generate``: it stands
in for ``model.generate``, TRL's default, so the trainer pads prompts and cuts answers. The clock
runs from the reset of environments until TRL has the ids and the mask of all episodes: prompts are
rendered, calls are parsed, tools are called, their answers are rendered. What TRL does then
(padding to tensors, rewards, advantages) is not counted.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from typing import Any

import episode_rounds as rounds
import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

#: More than an episode has.
TOKENS = 1 << 15


class Guess:
    """The environment: a tool that is never satisfied."""

    def reset(self, **_: object) -> None:
        self.turn = 0

    def guess(self, number: int) -> str:
        """
        Guesses the number.

        Args:
            number: The guess.
        """
        self.turn += 1
        return rounds.told(self.turn)


class Ended(Exception):
    """The episodes of a round have been played."""


class Trainer(GRPOTrainer):
    """TRL's, with a script in place of what generates.

    turn: of the round that is played.
    """

    turn = 0
    scripted_ids = True
    played: tuple[float, list[list[int]], list[list[int]], list[list[int]]]

    def said(self) -> list[int]:
        self.turn += 1
        return [
            *self._tokenizer(rounds.called(self.turn), add_special_tokens=False).input_ids,
            self._tokenizer.eos_token_id,
        ]

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **words: Any) -> Any:
        if not self.scripted_ids:
            return super()._generate_single_turn(prompt_ids, *rest, **words)
        said = self.said()
        return [list(said) for _ in prompt_ids], [[-0.25] * len(said) for _ in prompt_ids]

    def _generate(self, prompts: Any) -> Any:
        prompt_ids, completion_ids, mask, *_ = super()._generate(prompts)
        self.played = rounds.cpu_s(), prompt_ids, completion_ids, mask
        raise Ended


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=1,
        max_position_embeddings=TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    rows = [{"prompt": [{"role": "user", "content": rounds.ASKED}]}] * rounds.EPISODES
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=LlamaForCausalLM(config),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=output,
                per_device_train_batch_size=rounds.EPISODES,
                num_generations=rounds.EPISODES,
                max_completion_length=TOKENS,
                use_cpu=True,
                bf16=False,
                report_to="none",
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            environment_factory=Guess,
        )
        trainer.scripted_ids = sys.argv[2] == "ids"

        def generate(input_ids: torch.Tensor, **_: object) -> torch.Tensor:
            said = torch.tensor(trainer.said()).expand(len(input_ids), -1)
            return torch.cat([input_ids, said], dim=1)

        trainer.model.generate = generate

        def play() -> dict[str, Any]:
            trainer.turn = 0
            began_s = rounds.cpu_s()
            with contextlib.suppress(Ended):
                trainer._generate_and_score_completions([dict(row) for row in rows])
            ended_s, prompt_ids, completion_ids, masks = trainer.played
            return {
                "cpu_s": ended_s - began_s,
                "errors": [],
                "episodes": [
                    {"ids": [*prompt, *ids], "sampled": [0] * len(prompt) + mask}
                    for prompt, ids, mask in zip(prompt_ids, completion_ids, masks, strict=True)
                ],
            }

        rounds.serve(play)


if __name__ == "__main__":
    main()
