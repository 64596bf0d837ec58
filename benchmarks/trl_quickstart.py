"""Trains the quickstart by TRL's GRPOTrainer: same model, prompts, reward, batch and schedule.

    python benchmarks/trl_quickstart.py MODEL_DIRECTORY OUTPUT_DIRECTORY SETTINGS_JSON

Run by benchmarks/quickstart.py, in any environment that has TRL 1.16; its other settings and its
other model (uncovered_model.py) are trained so, too. The last line of its output is a JSON object.
One iteration is one generation of prompts x group_size samples and the updates made with it; the
clock (user and system seconds of this process and its children) runs from the end of the first
iteration to the end of the last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from uncovered_model import digit_share_of


def digit_share_reward(end: int) -> Callable[..., list[float]]:
    """Returns the reward function of uncovered_model.py for TRL."""

    def digit_share(completions: list[str], **_: object) -> list[float]:
        return list(map(digit_share_of, completions))

    return digit_share


def exact_reward(end: int) -> Callable[..., list[float]]:
    """Returns a reward function of TRL: 1 for a right answer that the model has ended, else 0.

    The model has ended it with the token ``end``; it is right when its last two characters are the
    sum.
    """

    def exact(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: object
    ) -> list[float]:
        rows = zip(completions, completion_ids, answer, strict=True)
        return [float(end in ids and text[-2:] == total) for text, ids, total in rows]

    return exact


#: By the name of the recipe's reward: from the end token to TRL's reward function.
REWARDS = {"exact": exact_reward, "digit_share": digit_share_reward}


class Clock(TrainerCallback):
    """Notes the time at the end of the first and of the last iteration.

    updates_per_iteration, updates: of one iteration and of the whole training; TRL counts updates.
    """

    def __init__(self, updates_per_iteration: int, updates: int) -> None:
        self._marks = {updates_per_iteration, updates}
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        """Notes the time at the two marks. TRL calls it after every update."""
        if state.global_step in self._marks:
            process_times = os.times()
            self.cpu_s.append(
                process_times.user
                + process_times.system
                + process_times.children_user
                + process_times.children_system
            )
            self.wall_s.append(time.perf_counter())


def grpo_config(settings: dict[str, float], output: Path) -> GRPOConfig:
    """Returns TRL's settings for the recipe's batch, algorithm and schedule."""
    minibatch = settings["prompts"] * settings["group_size"] // settings["minibatches"]
    return GRPOConfig(
        output_dir=str(output / "trainer"),
        seed=settings["seed"],
        # The same batch: one generation for `steps_per_generation` updates, each of one minibatch.
        per_device_train_batch_size=minibatch,
        gradient_accumulation_steps=1,
        steps_per_generation=settings["minibatches"],
        num_iterations=1,
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        max_steps=settings["steps"] * settings["minibatches"],
        # The same algorithm: GRPO's advantages, token-mean loss ("dapo"), clipped ratio, no KL,
        # temperature 1.
        loss_type="dapo",
        scale_rewards="group",
        epsilon=settings["clip"],
        beta=0.0,
        temperature=1.0,
        max_grad_norm=settings["clip_grad_norm"],
        # As fast as it can be on a CPU: float32 (its default, bf16, is slower there), activations
        # kept (its default checkpoints them, a second forward pass), no saving, no tracker, no
        # progress bar, one log line at the end.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=settings["steps"] * settings["minibatches"],
    )


def optimizer_and_schedule(
    model: torch.nn.Module, settings: dict[str, float]
) -> tuple[object, object]:
    """Returns fused AdamW and the recipe's linear decay.

    The decay ends above zero, which transformers' own "linear" does not.
    """
    updates = settings["steps"] * settings["minibatches"]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings["learning_rate"],
        betas=tuple(settings["betas"]),
        weight_decay=0.0,
        fused=True,
    )

    def factor(update: int) -> float:
        return 1 - (1 - settings["final_fraction"]) * min(1.0, update / max(1, updates - 1))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main() -> int:
    directory = Path(sys.argv[1])
    output = Path(sys.argv[2])
    settings = json.loads(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(settings["seed"])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    # The attention that the recipe's trainer and generator use.
    model = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="sdpa", dtype=torch.float32
    )
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    clock = Clock(settings["minibatches"], settings["steps"] * settings["minibatches"])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=REWARDS[settings["reward"]](tokenizer.eos_token_id),
        args=grpo_config(settings, output),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
        optimizers=optimizer_and_schedule(model, settings),
    )
    trainer.train()
    trainer.save_model(str(output / "weights"))
    tokenizer.save_pretrained(output / "weights")
    result = {
        "cpu_s": clock.cpu_s[1] - clock.cpu_s[0],
        "wall_s": clock.wall_s[1] - clock.wall_s[0],
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
