"""Trains a pretrained model by TRL: the same rows, reward, batch, rate and lengths as G-Core.

    python benchmarks/trl_real_model.py MODEL_DIRECTORY OUTPUT_DIRECTORY SETTINGS_JSON

Run by benchmarks/real_model.py, in any environment that has TRL 1.16 (and peft for adapters). One
process measures one thread and several: after the first step the number of threads changes at each
step. The last line of its output is a JSON object: when the first step began, the versions, and of
each step the threads, seconds of the processor and of the clock, and what came of it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

DISTRIBUTIONS = ("trl", "torch", "transformers", "accelerate", "peft")


class Clock(TrainerCallback):
    """Notes what each step takes, and sets the threads of the next one.

    threads: of each step.
    answers: filled by the reward function; what is in it after a step belongs to that step.
    """

    def __init__(self, threads: Sequence[int], answers: list[dict[str, float]]) -> None:
        self._threads = threads
        self._answers = answers
        self._mark = (0.0, 0.0)
        self.first_step_unix_s = 0.0
        self.steps: list[dict[str, Any]] = []

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        if not self.first_step_unix_s:
            self.first_step_unix_s = time.time()
            self._mark = now_s()

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        cpu_s, wall_s = now_s()
        self.steps.append(
            {
                "threads": self._threads[len(self.steps)],
                "cpu_s": cpu_s - self._mark[0],
                "wall_s": wall_s - self._mark[1],
                "answers": len(self._answers),
                "answer_tokens": sum(answer["tokens"] for answer in self._answers),
                "rewards": [answer["reward"] for answer in self._answers],
            }
        )
        self._answers.clear()
        if len(self.steps) < len(self._threads):
            torch.set_num_threads(self._threads[len(self.steps)])
        self._mark = now_s()

    def on_log(
        self, args: object, state: object, control: object, logs: Any = None, **_: object
    ) -> None:
        """Adds what TRL logs of a step: after ``on_step_end``, and a summary at the end."""
        if self.steps and logs and "loss" in logs:
            self.steps[-1]["logs"] = {
                name: float(value) for name, value in logs.items() if is_number(value)
            }


def now_s() -> tuple[float, float]:
    """Returns the seconds of the processor, children included, and of the clock."""
    return sum(os.times()[:4]), time.perf_counter()


def is_number(value: object) -> bool:
    """Whether a logged value is a number; TRL logs texts that hold one."""
    try:
        float(str(value))
    except ValueError:
        return False
    return True


def reward_of(
    file: str, name: str, end: int, answers: list[dict[str, float]]
) -> Callable[..., list[float]]:
    """Returns a reward of G-Core as TRL calls it.

    file, name: of the function, which takes a record.
    end: the token that ends an answer.
    answers: gets the tokens and the reward of each answer.
    """
    spec = importlib.util.spec_from_file_location("rewards", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(file).parent))  # it imports what lies beside it
    spec.loader.exec_module(module)
    of_record = getattr(module, name)

    def reward(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        fields = {key: value for key, value in columns.items() if isinstance(value, list)}
        given = []
        for place, (completion, ids) in enumerate(zip(completions, completion_ids, strict=True)):
            record = SimpleNamespace(
                text=completion[0]["content"],
                status="finished" if ids and ids[-1] == end else "truncated",
                prompt=SimpleNamespace(fields={key: fields[key][place] for key in fields}),
            )
            given.append(float(of_record(record)))
            answers.append({"tokens": len(ids), "reward": given[-1]})
        return given

    return reward


def common(settings: dict[str, Any], output: Path) -> dict[str, Any]:
    """Returns the arguments of all trainers: as fast as they can be on a CPU, and nothing saved."""
    return {
        "output_dir": str(output),
        "max_steps": len(settings["threads"]),
        "per_device_train_batch_size": settings["batch"],
        "gradient_accumulation_steps": 1,
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta1": settings["betas"][0],
        "adam_beta2": settings["betas"][1],
        "weight_decay": settings["weight_decay"],
        "max_grad_norm": settings["clip_grad_norm"],
        "seed": settings["seed"],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def grpo(model: str, settings: dict[str, Any], rows: Dataset, given: dict[str, Any]) -> Any:
    """Returns a trainer of one update for each generation of prompts x group_size answers."""
    clock, tokenizer = given["callbacks"][0], given["processing_class"]
    reward = settings["reward"]
    given["args"] = GRPOConfig(
        **given["args"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=settings["clip"],
    )
    function = reward_of(reward["path"], reward["name"], tokenizer.eos_token_id, clock._answers)
    if settings["lora"]:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(
            r=settings["lora"]["rank"],
            lora_alpha=settings["lora"]["alpha"],
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    return GRPOTrainer(model=model, reward_funcs=function, train_dataset=rows, **given)


def sft(model: str, settings: dict[str, Any], rows: Dataset, given: dict[str, Any]) -> Any:
    given["args"] = SFTConfig(**given["args"], completion_only_loss=True, packing=False)
    return SFTTrainer(model=model, train_dataset=rows, **given)


def dpo(model: str, settings: dict[str, Any], rows: Dataset, given: dict[str, Any]) -> Any:
    given["args"] = DPOConfig(**given["args"], beta=settings["beta"])
    return DPOTrainer(model=model, train_dataset=rows, **given)


PROGRAMS = {"grpo": grpo, "sft": sft, "dpo": dpo}


def main(model: str, output: Path, settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"][0])
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    clock = Clock(settings["threads"], [])
    trainer = PROGRAMS[settings["program"]](
        model,
        settings,
        Dataset.from_list(rows),
        {
            "args": common(settings, output),
            "processing_class": AutoTokenizer.from_pretrained(model),
            "callbacks": [clock],
        },
    )
    trainer.train()
    result = {
        "first_step_unix_s": clock.first_step_unix_s,
        "versions": {name: importlib.metadata.version(name) for name in DISTRIBUTIONS},
        "steps": clock.steps,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
