"""Measures on a GPU what has been written for CUDA.

    python benchmarks/gpu.py [--parts learns step decode ..] [--json] [--check] [--keep FOLDER]
                             [--model FOLDER --gsm8k FOLDER [--steps 116]]

`tox run -e gpu` runs it, after the tests in tests/gpu. Each part is a claim with a bar, or a rate.
They are in the order of their worth, for a GPU that is at hand for some minutes; the first ones are
real models' (gpu_real.py), and a run of ``published`` that was ended goes on:

notes      recipes/smollm2/notes.yaml learns in three minutes what takes six on two cores
published  Qwen2.5-0.5B-Instruct learns GSM8K, beside verl; ``--model`` and ``--gsm8k`` are needed
learns     the quickstart on one device: held-out accuracy before and after
bfloat16   trainer and generator in bfloat16: how far their log-probs are apart after every push
ipc        pushes by handles of device memory, each compared with the trainer's digests
sleep      a torch generator gives its device memory back, and wakes with the same weights
busy       seconds of a device's work by its own events, over those of a clock that waits for it
tokens     tokens per second of the torch generator through plugin, worker and RPC
vllm       the same of vLLM, in the venv of `g-core venv create vllm --cuda`

The parts of ``gpu_large.py``, with models of real shapes, follow: step, lora, step_64k, lora_64k,
decode, decode_compiled, naps, save, repeat, offload.

All but ``notes``, ``published``, ``vllm``, ``busy``, ``tokens``, ``step_64k``, ``lora``,
``lora_64k`` and ``save`` have run to their end on an H100. Where something is missing, it is named
and the exit code is 0. A part that fails is named, the others go on, and the exit code is 1.
``--out`` is written after each part. With ``--keep`` what each part has found lies in a folder, and
a second call does not run it again; it must be of the same code and settings. ``--device cpu`` runs
the parts of this file and ``notes`` on a CPU, to test the benchmark itself; such numbers say
nothing of a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import gpu_large
import gpu_real
from gcore_testing.runs import RunResult, run_recipe
from report import Claim, add_options, interval, publish, report_of

from gcore_core.contract.run_files import read_metrics

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
DISTRIBUTIONS = ["gcore-core", "gcore-torch", "gcore-vllm", "torch", "transformers"]
LIMIT_S = 900
PUSHES = 6
#: Part -> libraries and plugins that it needs besides torch.
NEEDED = {
    "notes": ("gguf", "peft"),
    "published": ("gcore_rewards", "peft"),
    "lora": ("peft",),
    "lora_64k": ("peft",),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the parts are run.

    device: "cuda", or "cpu" to test the benchmark itself.
    folder: where runs and models lie.
    steps: of the run that must learn.
    rounds: batches whose rate is measured.
    model: a directory with Qwen2.5-0.5B-Instruct, for ``published``.
    gsm8k: a folder with the rows of GSM8K.
    gsm8k_steps: of ``published``.
    notes_overrides: settings of a short form of ``notes``, which is held to no bar.
    """

    device: str
    folder: Path
    steps: int = 120
    rounds: int = 7
    model: Path | None = None
    gsm8k: Path | None = None
    gsm8k_steps: int = gpu_real.VERL_STEPS
    notes_overrides: tuple[str, ...] = ()


def run_quickstart(setting: Setting, name: str, *overrides: str) -> RunResult:
    """Runs the quickstart with trainer and generator on one device."""
    on_device = [f"roles.{role}.config.device={setting.device}" for role in ("policy", "rollout")]
    return run_recipe(
        RECIPE,
        setting.folder / name,
        ["plugins=[]", "cluster.devices=1", *on_device, *overrides],
        LIMIT_S,
    )


def short_run(setting: Setting, name: str, *overrides: str) -> RunResult:
    """Runs a few steps of the quickstart with a model that was hardly taught."""
    return run_quickstart(
        setting,
        name,
        f"run.steps={PUSHES}",
        "evaluation.every=0",
        "controller.config.prompts=8",
        "roles.policy.model.make.config={seed: 0, steps: 40}",
        *overrides,
    )


def learns(setting: Setting) -> list[Claim]:
    """Returns what the quickstart learns."""
    run_quickstart(setting, "learns", f"run.steps={setting.steps}")
    evaluations = [
        row["evaluation"] for row in read_metrics(setting.folder / "learns") if row["evaluation"]
    ]
    return [
        Claim("quickstart_accuracy_after", evaluations[-1]["greedy/exact"], "share, greedy", 0.95),
        Claim("quickstart_accuracy_before", evaluations[0]["greedy/exact"], "share, greedy"),
    ]


def bfloat16(setting: Setting) -> list[Claim]:
    """Returns how far log-probs of trainer and generator are apart in bfloat16."""
    from gcore_language.settings import LOGPROB_BANDS

    types = [f"roles.{role}.config.dtype=bfloat16" for role in ("policy", "rollout")]
    result = short_run(setting, "bfloat16", *types)
    band = LOGPROB_BANDS["bfloat16"]  # beyond it a run stops by itself
    return [
        Claim("bfloat16_logprob_gap_max", max(result.gaps), "nats", band, "<="),
        Claim("bfloat16_logprob_gap_share", max(result.shares), "of actions > 1e-4"),
        Claim("bfloat16_pushes", len(result.versions) - 1, "pushes", PUSHES),
    ]


def ipc(setting: Setting) -> list[Claim]:
    """Returns how many pushes by handles of device memory arrived whole.

    A receiver compares each bucket with the trainer's digests, and the run stops where they differ
    or where a side does not speak this transport.
    """
    result = short_run(setting, "ipc", "controller.config.push_transport=ipc")
    return [
        Claim("ipc_pushes_verified", len(result.versions) - 1, "pushes", PUSHES),
        Claim("ipc_logprob_gap_max", max(result.gaps), "nats"),
    ]


def sleep(setting: Setting) -> list[Claim]:
    """Returns what a sleep frees, and whether the generator is the same after it."""
    import torch
    from sleeping_model import Model, _tensors, make_model

    model_folder = setting.folder / "sleep"
    make_model(model_folder, 50)
    # on a CPU a sleep that keeps the weights moves nothing
    mode = "keep" if setting.device == "cuda" else "discard"
    model = Model(model_folder, mode, list(_tensors(model_folder)))

    def allocated() -> int:
        if setting.device == "cuda":
            return torch.cuda.memory_allocated()
        return int(model.generator.memory_bytes)

    weights = sum(array.nbytes for _, array in model.tensors)
    fingerprint = model.generator.fingerprint()
    awake = allocated()
    model.generator.sleep()
    freed = awake - allocated()
    model.wake()
    is_same = model.generator.fingerprint() == fingerprint and model.sample() == model.tokens
    return [
        Claim("sleep_freed_over_weights", freed / weights, "ratio", 0.95),
        Claim("wake_taken_over_freed", (allocated() - awake + freed) / freed, "ratio"),
        Claim("same_weights_and_samples_after_wake", float(is_same), "1: yes", 1),
    ]


def busy(setting: Setting) -> list[Claim]:
    """Returns how well events measure a device's work, and in how many steps a trainer reports it.

    A CPU has no events; there only the steps are counted.
    """
    result = short_run(setting, "busy")
    steps = sum(
        "balance_achieved" in row["metrics"] for row in read_metrics(setting.folder / "busy")
    )
    claims = [Claim("busy_steps_reported", steps, "steps", len(result.versions) - 1)]
    if setting.device == "cuda":
        ratios = [events_over_waiting_clock() for _ in range(setting.rounds)]
        ratio = statistics.median(ratios)
        spread = interval(ratios, statistics.median)
        name = "busy_events_over_waiting_clock"
        # the host's clock has the start and the end of the work in it, the events have not
        claims += [
            Claim(f"{name}_least", ratio, "", 0.9, interval=spread),
            Claim(f"{name}_most", ratio, "", 1.05, "<=", interval=spread),
        ]
    return claims


def events_over_waiting_clock(passes: int = 50) -> float:
    """Returns the seconds of some matrix products by ``DeviceClock`` over those by the host."""
    import torch
    from gcore_language.device_clock import DeviceClock

    device = torch.device("cuda")
    clock = DeviceClock(device)
    matrix = torch.randn(4096, 4096, device=device)
    torch.mm(matrix, matrix)  # the first product loads the library
    torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    for _ in range(passes):
        with clock.running():
            torch.mm(matrix, matrix)
    torch.cuda.synchronize(device)
    waited_s = time.perf_counter() - began_s
    return (clock.read_s() or 0.0) / waited_s


def rate_of(engine: str, setting: Setting) -> list[Claim]:
    """Returns the tokens per second of an engine, from the request to the last header."""
    from engine_overhead import round_of, worker
    from gcore_language.tiny import save_untrained

    folder = setting.folder / engine
    folder.mkdir()
    save_untrained(folder / "model")

    async def measure() -> list[float]:
        async with worker(engine, folder / "model", folder) as peer:
            return [await round_of(peer, engine, number) for number in range(setting.rounds + 1)]

    rates = asyncio.run(measure())[1:]  # the first one warms up
    return [
        Claim(
            f"{engine}_tokens_per_second",
            statistics.median(rates),
            "tokens/s",
            interval=interval(rates, statistics.median),
        )
    ]


def tokens(setting: Setting) -> list[Claim]:
    """Returns the rate of the torch generator."""
    return rate_of("torch", setting)


def vllm(setting: Setting) -> list[Claim]:
    """Returns the rate of vLLM."""
    return rate_of("vllm", setting)


def notes(setting: Setting) -> list[Claim]:
    """Returns what the recipe of a real model learns, and how long that takes."""
    return gpu_real.notes(setting.folder, setting.device, *setting.notes_overrides)


def published(setting: Setting) -> list[Claim]:
    """Returns the curve of a real model on GSM8K."""
    assert setting.model is not None and setting.gsm8k is not None, "missing() has asked for both"
    return gpu_real.published(setting.folder, setting.model, setting.gsm8k, setting.gsm8k_steps)


def _large(part: str) -> Callable[[Setting], list[Claim]]:
    return lambda setting: gpu_large.claims_of(part, setting.folder)


PARTS: dict[str, Callable[[Setting], list[Claim]]] = {
    "notes": notes,
    "published": published,
    "learns": learns,
    "bfloat16": bfloat16,
    "ipc": ipc,
    "sleep": sleep,
    "busy": busy,
    "tokens": tokens,
    "vllm": vllm,
    **{part: _large(part) for part in gpu_large.PARTS},
}


def missing(part: str, device: str = "cuda", is_given: bool = False) -> str:
    """Returns what a part lacks on this machine, "" for nothing.

    is_given: whether there is a model of ``published``, and its rows.
    """
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device (torch.cuda.is_available())"
    if (part in gpu_large.PARTS or part == "published") and device != "cuda":
        return "it is for CUDA alone"
    lacking = [name for name in NEEDED.get(part, ()) if importlib.util.find_spec(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} is not installed"
    if part == "published" and not is_given:
        return "it needs --model and --gsm8k"
    if part == "vllm" and "vllm" not in ready_venvs():
        return "the venv vllm is not ready: g-core venv create vllm --cuda"
    return ""


def ready_venvs() -> list[str]:
    """Returns the names of the engines' venvs that are ready."""
    listing = subprocess.run(
        [sys.executable, "-m", "gcore_core", "venv", "list", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        return []
    return [row["name"] for row in json.loads(listing.stdout) if row["state"] == "ready"]


def kept(part: str, setting: Setting) -> list[Claim]:
    """Returns what a part has found, which it is run for unless the folder has it already."""
    found = setting.folder / f"{part}.json"
    if not found.exists():
        claims = PARTS[part](setting)
        written = json.dumps([asdict(claim) for claim in claims])
        found.write_text(written, encoding="utf-8")
    return [Claim(**fields) for fields in json.loads(found.read_text(encoding="utf-8"))]


def main() -> int:
    parser = argparse.ArgumentParser(description="What has been written for CUDA, on a GPU.")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--keep", type=Path, help="a folder for what parts have found, to go on")
    parser.add_argument("--model", type=Path, help="a directory with Qwen2.5-0.5B-Instruct")
    parser.add_argument("--gsm8k", type=Path, help="a folder with train.jsonl and test.jsonl")
    parser.add_argument("--steps", type=int, default=gpu_real.VERL_STEPS, help="of published")
    add_options(parser)
    args = parser.parse_args()
    is_given = args.model is not None and args.gsm8k is not None
    reasons = {part: missing(part, args.device, is_given) for part in args.parts}
    for part, reason in reasons.items():
        if reason:
            print(f"{part}: not run, {reason}", file=sys.stderr)
    claims: list[Claim] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if args.keep is None else args.keep.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        setting = Setting(
            device=args.device,
            folder=folder,
            model=args.model and args.model.absolute(),
            gsm8k=args.gsm8k and args.gsm8k.absolute(),
            gsm8k_steps=args.steps,
        )
        for part in args.parts:
            if reasons[part]:
                continue
            began_s = time.monotonic()
            try:
                claims += kept(part, setting)
            except Exception:  # one part must not take the others' numbers along
                traceback.print_exc()
                failed.append(part)
            if args.out is not None:  # what was measured is kept if a later part takes too long
                report = report_of("gpu", claims, DISTRIBUTIONS)
                args.out.write_text(json.dumps(report, indent=2) + "\n")
            print(f"{part}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    if not claims:
        if args.json:
            print(json.dumps({"benchmark": "gpu", "missing": reasons, "claims": []}, indent=2))
        return int(bool(failed))
    return publish("gpu", claims, args, DISTRIBUTIONS) or int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
