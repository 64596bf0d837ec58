"""Measures what a trainer holds while it sleeps, and what sleep and wake cost.

trainer_asleep_memory_over_awake
                      anonymous memory of gcore-torch's trainer asleep over that awake, each above
                      the process before the model was loaded, after a step of AdamW; a Llama of
                      some 100 million random weights in float32 on a CPU
sleep_and_wake_over_copy
                      the median time of a sleep and a wake over that of writing the same bytes to
                      a file of the same disk and reading them into new memory, in turn

    python benchmarks/large.py --parts sleep [--sleep-layers 32] [--sleep-rounds 5]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from large_load import _environment, _step, _write
from report import Claim, median_ratio, repeated

WIDTH = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the part's own words."""
    parser.add_argument("--sleep-layers", type=int, default=32)
    parser.add_argument("--sleep-rounds", type=int, default=5)


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the part's claims."""
    with tempfile.TemporaryDirectory(prefix="large-sleep-", dir=os.environ.get("TMPDIR")) as name:
        room = Path(name)
        model = _write(room / "model", layers=args.sleep_layers, width=WIDTH)
        command = [sys.executable, __file__, str(model), str(room), str(args.sleep_rounds)]
        done = subprocess.run(
            command, env=_environment(), stdout=subprocess.PIPE, text=True, check=True
        )
    found = json.loads(done.stdout.splitlines()[-1])
    share = found["asleep"] / found["awake"]
    return [
        Claim("trainer_asleep_memory_over_awake", share, "ratio", 0.1, "<="),
        repeated("sleep_and_wake_over_copy", found["rounds"], median_ratio, "ratio", 1.5, "<="),
    ]


def _measured(model: Path, room: Path, rounds: int) -> dict[str, Any]:
    """Trains a step, then sleeps and wakes in turn with copies of the same bytes."""
    from anonymous_memory import anonymous_bytes
    from gcore_torch.config import TorchTrainerConfig
    from gcore_torch.trainer import TorchTrainer

    from gcore_core.contract.context import WorkerContext
    from gcore_core.testing.contracts.agreement import PolicyGradient

    def open_trainer(path: Path) -> TorchTrainer:
        context = WorkerContext(
            role="policy",
            directory=str(room),
            steps=1,
            model={"path": str(path)},
            parts={"objective": PolicyGradient()},
        )
        return TorchTrainer(TorchTrainerConfig(learning_rate=1e-3), context)

    tiny = open_trainer(_write(room / "tiny", layers=2, width=64))  # imports what a trainer does
    _step(tiny, 0, 0)
    tiny.close()
    base = anonymous_bytes()
    trainer = open_trainer(model)
    _step(trainer, 0, 0)
    awake = anonymous_bytes() - base
    trainer.sleep()
    asleep = anonymous_bytes() - base
    nbytes = sum(file.stat().st_size for file in room.glob("asleep-*"))
    trainer.wake()
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        trainer.sleep()
        trainer.wake()
        slept_s = time.perf_counter() - began_s
        times.append((slept_s, _copy_s(room / "copy.bin", nbytes)))
    trainer.close()
    return {"awake": awake, "asleep": asleep, "rounds": times}


def _copy_s(file: Path, nbytes: int) -> float:
    """Returns the seconds to write bytes to a new file, and to read them into new memory."""
    content = mmap.mmap(-1, nbytes)
    content.write(bytes(nbytes))
    began_s = time.perf_counter()
    with file.open("wb", buffering=0) as written:
        left = memoryview(content)
        while left:
            left = left[written.write(left) :]
    room = mmap.mmap(-1, nbytes)
    with file.open("rb", buffering=0) as read:
        left = memoryview(room)
        while left:
            left = left[read.readinto(left) :]
    file.unlink()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    print(json.dumps(_measured(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
    sys.stdout.flush()
    os._exit(0)  # all is printed; a thread of a library may abort a process that exits as usual
