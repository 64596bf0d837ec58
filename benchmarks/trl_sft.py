"""Fine-tunes the quickstart's model by TRL's SFTTrainer: same model, rows, batch and rate.

    python benchmarks/trl_sft.py MODEL_DIRECTORY OUTPUT_DIRECTORY SETTINGS_JSON

Run by benchmarks/roles_sft.py, in any environment that has TRL 1.16. The last line of its output is
a JSON object. The clock (user and system seconds of this process and its children) runs from the
end of update ``first`` to the end of the last.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """Notes the CPU-seconds at the end of some updates."""

    def __init__(self, updates: set[int]) -> None:
        self._updates = updates
        self.cpu_s: list[float] = []

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        """Notes the time. TRL calls it after every update."""
        if state.global_step in self._updates:
            times = os.times()
            self.cpu_s.append(sum(times[:4]))


def main(model: Path, output: Path, settings: dict[str, object]) -> None:
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in Path(str(settings["data"])).read_text().splitlines()]
    updates = int(str(settings["updates"]))
    clock = Clock({int(str(settings["first"])), updates})
    config = SFTConfig(
        output_dir=str(output),
        max_steps=updates,
        per_device_train_batch_size=int(str(settings["batch"])),
        learning_rate=float(str(settings["learning_rate"])),
        lr_scheduler_type="constant",
        seed=int(str(settings["seed"])),
        completion_only_loss=True,
        packing=False,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=updates,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[clock],
    )
    trainer.train()
    print(json.dumps({"cpu_s": clock.cpu_s[-1] - clock.cpu_s[0]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
