"""Measures what all processes of a training run hold together, while trainer and generator share
the machine's memory by turns.

A random Llama takes a few GRPO steps (AdamW, 8 records of 64 actions) by ``g-core run``: two ranks
of gcore-torch's trainer share it, and one generator in bfloat16 drops its weights while they train.
Float32 weights, gradients and two moments are 16 bytes for each parameter, which have to be there
once; a rank drops gradients after the update, so they are not there in a rollout.

Memory is the proportional set size (PSS) of all processes of the run, read again and again: a page
that several processes share counts once. Phases are those of the run's trace.

whole_job_peak_gib      the most that all processes of the run held together, in GiB
whole_job_peak_over_needed
                        the same less the peak of such a run with a tiny model, over what is needed:
                        16 bytes for each parameter
whole_job_<phase>_gib   the most that they held in a phase: start (before the first rollout),
                        rollout, prepare, train, push, end (after the last push)
whole_job_tiny_gib      the peak of the run with a tiny model: what processes need without one
whole_job_trainer_rollout_gib
                        the most that both ranks held in a rollout: no gradients
whole_job_generator_train_gib
                        the most that the generator held in training: no weights
whole_job_parameters    of the model, in billions
whole_job_steps         that were taken
whole_job_s             seconds from the start of the run to its end

Nothing is started on a machine without the memory and the disk for it. A run that leaves too little
memory to others is ended, and so is the benchmark.

    python benchmarks/large.py --parts whole [--whole-layers 22] [--whole-width 2048]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml
from quickstart_runs import environment
from report import Claim

from gcore_core.contract.run_files import Stage, read_metrics, read_trace

GIB = 2**30
#: Of each parameter: float32 weights, gradients and two moments.
NEEDED_BYTES = 16
BAR_GIB = 21.0
#: Seconds between two readings.
EVERY_S = 0.1
#: How long a run that was ended may take to tidy up.
_LAST_S = 60
#: A run is ended when others have less than this, in bytes.
LEAST_LEFT = GIB // 2
PHASES = ("start", "rollout", "prepare", "train", "push", "end")
TINY = (2, 64, 512)
HEADS_OF = 64  # width of a head

REWARD = '''
"""A reward of which nothing is learned: one number for each text."""

import zlib


def number(record):
    return zlib.crc32(record.text.encode()) % 1000 / 1000
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the part's own words."""
    parser.add_argument("--whole-layers", type=int, default=22)
    parser.add_argument("--whole-width", type=int, default=2048)
    parser.add_argument("--whole-words", type=int, default=32000, help="the vocabulary")
    parser.add_argument("--whole-steps", type=int, default=3)


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the part's claims."""
    sizes = (args.whole_layers, args.whole_width, args.whole_words)
    parameters = _parameters(*sizes)
    with tempfile.TemporaryDirectory(prefix="large-whole-", dir=os.environ.get("TMPDIR")) as name:
        room = Path(name)
        _require_room(parameters, room)
        tiny = _run(room / "tiny", TINY, args.whole_steps)
        large = _run(room / "large", sizes, args.whole_steps)
    peak, base = large.peak(), tiny.peak()
    needed = NEEDED_BYTES * parameters / GIB
    print(f"tiny\n{tiny.table()}\nlarge\n{large.table()}", file=sys.stderr)
    phases = [
        Claim(f"whole_job_{phase}_gib", large.peak(phase), "GiB")
        for phase in PHASES
        if large.readings(phase)
    ]
    return [
        Claim("whole_job_peak_gib", peak, "GiB", BAR_GIB, "<="),
        Claim("whole_job_peak_over_needed", (peak - base) / needed, "ratio"),
        *phases,
        Claim("whole_job_tiny_gib", base, "GiB"),
        Claim("whole_job_trainer_rollout_gib", large.peak("rollout", "policy"), "GiB"),
        Claim("whole_job_generator_train_gib", large.peak("train", "rollout"), "GiB"),
        Claim("whole_job_parameters", parameters / 1e9, "billions"),
        Claim("whole_job_steps", large.steps, "steps"),
        Claim("whole_job_s", large.took_s, "s"),
    ]


def _parameters(layers: int, width: int, words: int) -> int:
    """Returns how many parameters the model has; output and input embeddings are two."""
    fed = _fed(width)
    keys = HEADS_OF * _key_heads(width)
    layer = 2 * width * width + 2 * width * keys + 3 * width * fed + 2 * width
    return layers * layer + 2 * words * width + width


def _fed(width: int) -> int:
    return 11 * width // 4


def _key_heads(width: int) -> int:
    return max(1, width // HEADS_OF // 8)


def _require_room(parameters: int, room: Path) -> None:
    """Ends the benchmark where memory or disk are too small for the run.

    room: on the disk that it needs: for the model and what the run writes of it, in bfloat16 each.
    """
    needed = 1.15 * NEEDED_BYTES * parameters + 1.5 * GIB + LEAST_LEFT
    there = psutil.virtual_memory().available
    if there < needed:
        sys.exit(f"the run needs {needed / GIB:.1f} GiB of memory, and {there / GIB:.1f} are free")
    on_disk = 3 * 2 * parameters
    free = shutil.disk_usage(room).free
    if free < on_disk:
        sys.exit(f"the run needs {on_disk / GIB:.1f} GiB of disk, and {free / GIB:.1f} are free")


# -- a run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the run's processes held at a time.

    at_s: seconds since 1970.
    held: role or kind of process -> bytes of PSS.
    """

    at_s: float
    held: Mapping[str, int]

    def gib(self, role: str = "") -> float:
        """Returns what a role's processes held, or all."""
        return (self.held.get(role, 0) if role else sum(self.held.values())) / GIB


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run: phase -> its readings, the steps that it took, and in how many seconds."""

    phases: Mapping[str, list[Reading]]
    steps: int
    took_s: float

    def readings(self, phase: str = "") -> list[Reading]:
        """Returns a phase's readings, or all."""
        if phase:
            return self.phases.get(phase, [])
        return [reading for readings in self.phases.values() for reading in readings]

    def peak(self, phase: str = "", role: str = "") -> float:
        """Returns the most that was held in a phase, or ever, by a role, or by all; in GiB."""
        return max((reading.gib(role) for reading in self.readings(phase)), default=0.0)

    def table(self) -> str:
        """Returns what each kind of process held when all together held most, by phase."""
        lines = []
        for phase in PHASES:
            readings = self.readings(phase)
            if not readings:
                continue
            fullest = max(readings, key=Reading.gib)
            parts = sorted(fullest.held.items(), key=lambda part: -part[1])
            words = ", ".join(f"{role} {nbytes / GIB:.2f}" for role, nbytes in parts)
            lines.append(f"{phase:8} {fullest.gib():6.2f} GiB of {len(readings)}: {words}")
        return "\n".join(lines)


def _run(folder: Path, sizes: tuple[int, int, int], steps: int) -> Measured:
    """Makes a model and takes the steps; ends the benchmark when the run fails."""
    folder.mkdir()
    words = [str(size) for size in sizes]
    subprocess.run([sys.executable, __file__, str(folder / "model"), *words], check=True)
    job = _write_job(folder, steps)
    log = folder / "log.txt"
    began_s = time.time()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gcore_core", "run", str(job)],
            env=environment(folder),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        with Watch(folder, process) as watch:
            code = process.wait()
    if watch.ended_it:
        sys.exit("the run was ended, since too little memory was left to others")
    if code:
        sys.exit(f"g-core run ended with {code}:\n{log.read_text()[-3000:]}")
    took_s = time.time() - began_s
    taken = int(read_metrics(folder / "run")[-1]["step"])
    if taken != steps:
        sys.exit(f"the run ended at step {taken} of {steps}")
    stages = [line for line in read_trace(folder / "run") if isinstance(line, Stage)]
    phases: dict[str, list[Reading]] = {}
    for reading in watch.readings:
        phases.setdefault(_phase_at(reading.at_s, stages), []).append(reading)
    return Measured(phases=phases, steps=taken, took_s=took_s)


def _phase_at(at_s: float, stages: list[Stage]) -> str:
    """Returns the phase of a time; between two stages it is that of the earlier one."""
    begun = [stage for stage in stages if stage.start_s <= at_s]
    if not begun:
        return "start"
    if at_s > max(stage.end_s for stage in stages):
        return "end"
    return max(begun, key=lambda stage: stage.start_s).name


def _write_job(folder: Path, steps: int) -> Path:
    """Writes the job with its data and its reward; returns its file."""
    (folder / "reward.py").write_text(REWARD)
    rows = [f'{{"prompt": "{number}+{number}="}}\n' for number in range(10, 74)]
    (folder / "data.jsonl").write_text("".join(rows))
    job: dict[str, Any] = {
        "run": {"steps": steps, "dir": str(folder / "run"), "spares": "never"},
        "cluster": {"devices": 2},
        "placement": {"sleep_in_training": "always"},
        "controller": {"use": "core/sync", "config": {"prompts": 2}},
        "data": {"use": "core/jsonl", "config": {"path": "data.jsonl"}},
        "advantage": {"use": "algorithms/grpo", "config": {"group_size": 4}},
        "objective": {"use": "algorithms/ppo_clip"},
        "rewards": {
            "number": {"use": "core/function", "config": {"path": "reward.py", "name": "number"}}
        },
        "roles": {
            "policy": {
                "use": "torch",
                "slots": 2,
                "model": {"path": str(folder / "model")},
                "config": {
                    "dtype": "bfloat16",
                    "gradient_checkpointing": True,
                    "budget_tokens": 1024,
                    "learning_rate": 1e-5,
                },
            },
            "rollout": {
                "use": "torch",
                "slots": 1,
                "follows": "policy",
                "config": {
                    "dtype": "bfloat16",
                    "sleep": "discard",
                    "max_new_tokens": 64,
                    "max_batch": 8,
                },
            },
        },
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


class Watch:
    """Reads what a run's processes hold, again and again, within a ``with`` block.

    readings: in the order of time.
    ended_it: whether the run was ended since others had too little memory.

    folder: the run's; it is in the environment of all its processes.
    process: the run.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.readings: list[Reading] = []
        self.ended_it = False
        self._mark = f"G_CORE_CACHE={folder / 'cache'}\0".encode()
        self._process = process
        self._kinds: dict[str, str] = {}  # number of a process -> its role; "" of a stranger
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while not self._ended.is_set():
            self.readings.append(Reading(at_s=time.time(), held=self._held()))
            if psutil.virtual_memory().available < LEAST_LEFT and not self.ended_it:
                self.ended_it = True
                self._end()
            self._ended.wait(EVERY_S)

    def _end(self) -> None:
        """Kills the run and its trainer, which holds most; the rest ends by itself."""
        _kill(self._process.pid)
        for number, kind in self._kinds.items():
            if kind == "policy":
                _kill(int(number))

    def _held(self) -> Counter[str]:
        held: Counter[str] = Counter()
        numbers = [entry.name for entry in os.scandir("/proc") if entry.name.isdigit()]
        self._kinds = {n: kind for n, kind in self._kinds.items() if n in numbers}
        for number in numbers:
            kind = self._kinds.get(number) or self._kind_of(number)
            if kind:
                held[kind] += _pss(number)
        return held

    def _kind_of(self, number: str) -> str:
        """Returns the role of a process, by its log; "" of one that is not of the run."""
        process = Path("/proc") / number
        try:
            if self._mark not in (process / "environ").read_bytes() + b"\0":
                return ""
            log = Path(os.readlink(process / "fd/1")).name
        except OSError:
            return ""
        kind = re.sub(r"(\.\d+)?\.\w+$", "", log)
        self._kinds[number] = kind
        return kind

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._end()
        self._ended.set()
        self._thread.join()
        for _ in range(_LAST_S):
            if not self._held():
                break
            time.sleep(1)


def _kill(number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)


def _pss(number: str) -> int:
    """Returns the PSS of a process in bytes; 0 when it has ended."""
    try:
        text = (Path("/proc") / number / "smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


# -- in a process of its own -----------------------------------------------------------------------


def _write_model(directory: Path, layers: int, width: int, words: int) -> None:
    """Writes a random Llama in bfloat16, with two embeddings."""
    import torch
    from gcore_language.tiny import VOCABULARY, save_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=_fed(width),
        num_hidden_layers=layers,
        num_attention_heads=width // HEADS_OF,
        num_key_value_heads=_key_heads(width),
        vocab_size=words,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    assert model.num_parameters() == _parameters(layers, width, words)
    model.save_pretrained(directory)
    save_tokenizer(directory, extra=words - VOCABULARY)


if __name__ == "__main__":
    _write_model(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
