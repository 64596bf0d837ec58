"""What a worker imports: each module here is paid for at every start, and after every fault."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gcore_language.tiny import save_model

#: torch's compiler, and what transformers imports where it can.
NOT_IMPORTED = (
    "torch._dynamo.eval_frame",
    "torch._inductor",
    "accelerate",
    "peft",
    "scipy",
    "sklearn",
    "pandas",
    "datasets",
    "gcore_megatron",
    "gcore_deepspeed",
)


def run_step(model: Path, *modules: str) -> list[str]:
    """Returns which of the modules a process has that has sampled and trained."""
    save_model(model, "llama")
    program = Path(__file__).with_name("lean_step.py")
    done = subprocess.run(
        [sys.executable, program, str(model), *modules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_sampling_and_training_import_no_compiler_and_nothing_that_is_not_used(
    tmp_path: Path,
) -> None:
    """They would take as long as all the rest; see ``gcore_language.lean``."""
    there = [name for name in ("accelerate", "peft", "scipy", "sklearn") if find_spec(name)]
    assert there, "the test environment has them, else this test says little"
    assert run_step(tmp_path, *NOT_IMPORTED, "torch", "transformers") == ["torch", "transformers"]
