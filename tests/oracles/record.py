"""Records what three recipes do, step by step, and checks that they still do it.

    python tests/oracles/record.py                     # record every case anew, into goldens/
    python tests/oracles/record.py quickstart judge    # record these
    python tests/oracles/record.py --check             # compare with goldens/; 1 when one differs

A case is a recipe with few steps and ``run.deterministic=true``. It is run by ``g-core run`` in a
temporary directory, with one thread in each process. Everything is read from the files that the run
leaves. Nothing of the core is imported, so that a golden outlives any rebuilding of it.

A golden holds of every step:

- the metrics that are not measured in seconds, bytes or messages, and the evaluation;
- which ordinals were drawn and which trained, and how many records had which verdict and status;
- a hash over the lengths, status, verdict and version of every record.

It ends with the position in the data and with SHA-256 hashes: of the answers that were shown, of
the models that the run began with, and of the exported weights (over name, type, shape and bytes of
each tensor, in the order of their names). Which replica drew a record is not held, since a
placement policy decides that by measured time.

How exact a comparison is depends on the machine, since another kind of CPU adds in another order:

- A machine with the same fingerprint (kind of CPU, versions of the libraries): every value must be
  the same, to the last bit.
- Another machine that began with the same models (``--models`` with a folder from the recording
  machine): ordinals and counts must be the same; losses, gradient norms and mean rewards may differ
  by a relative 1e-4, or by 1e-7 where a loss is nearly zero. Measured between AVX-512 and AVX2: a
  relative 2e-6 for the quickstart, an absolute 1e-8 for the losses of digits.
- Another machine that made its own models: ordinals and counts alone. Two hundred steps of teaching
  turn a difference in the last bit into another model, whose losses differ by tens of percent.
  Record there from a commit that is known to be good: a golden has room for several machines.
  Where a filter drops groups, rewards decide which ordinals are drawn, so nothing is compared.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "recipes"
#: The code that runs is the one beside this file, whatever is installed.
SOURCES = [REPOSITORY, *sorted(path.parent for path in REPOSITORY.glob("plugins/*/pyproject.toml"))]
GOLDENS = Path(__file__).parent / "goldens"
TIMEOUT_S = 900.0

#: Every case has these settings.
COMMON = (
    "run.deterministic=true",
    "controller.config.tiles=8",  # another number has other last bits
    "cluster.devices=2",
    "plugins=[]",  # observers draw pictures and change nothing
    "evaluation.show=8",
)
#: What depends on the machine, on how messages are sent or on which replica drew a record, not on
#: what is computed.
MEASURED = (
    "loop_delay_ms",
    "sentinel/log_e",
    "seconds/",
    "cpu_seconds",
    "memory_mib",
    "placement/",
    "controller/",
    "actions_per_s",
    "balance_achieved",
)
#: What is hashed of a record: all of its trace but times, sizes and replicas.
RECORD_FIELDS = (
    "ordinal",
    "sample",
    "attempt",
    "version",
    "n_prompt",
    "n_actions",
    "status",
    "verdict",
    "reason",
)
#: Metrics that another machine must reproduce within the tolerances.
LOSSES = ("loss", "grad_norm", "reward")
RELATIVE_TOLERANCE = 1e-4
ABSOLUTE_TOLERANCE = 1e-7
#: Versions that decide how numbers are computed.
LIBRARIES = ("torch", "numpy", "transformers", "safetensors", "scikit-learn")
#: What a CPU may have that makes a library choose other kernels.
CPU_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "sve",
)


@dataclass(frozen=True)
class Case:
    """One run that is recorded.

    recipe: stem of a file in recipes/.
    models: stems of the files whose functions make its models.
    overrides: settings beside ``COMMON``.
    drops_groups: its filter drops groups, so that rewards decide which ordinals are drawn.
    """

    recipe: str
    models: tuple[str, ...]
    overrides: tuple[str, ...]
    drops_groups: bool = False

    @property
    def settings(self) -> list[str]:
        return [*COMMON, *self.overrides]


_LANGUAGE = (
    "run.steps=8",
    "evaluation.every=4",
    "evaluation.prompts=64",
    "roles.policy.model.make.config.steps=200",
)
CASES = {
    "quickstart": Case("quickstart", ("arithmetic",), (*_LANGUAGE, "controller.shards=2")),
    "quickstart-one-controller": Case(
        "quickstart", ("arithmetic",), (*_LANGUAGE, "controller.shards=1")
    ),
    "quickstart-varied": Case(
        "quickstart",
        ("arithmetic",),
        (*_LANGUAGE, "controller.shards=2", "filter.use=core/varied"),
        drops_groups=True,
    ),
    "judge": Case(
        "judge",
        ("arithmetic", "judge"),
        (*_LANGUAGE, "cluster.devices=4", "roles.judge.model.make.config.steps=300"),
    ),
    "digits": Case(
        "digits",
        ("digits",),
        (
            "run.steps=6",
            "evaluation.every=3",
            "evaluation.prompts=20",
            "roles.policy.model.make.config.steps=60",
            "rewards.digit.config.config.steps=60",
            "rewards.judged.config.config.steps=60",
        ),
    ),
}
#: The number of controllers changes nothing: these end with the same weights, on every machine.
SAME_WEIGHTS = ("quickstart", "quickstart-one-controller")


# -- the machine -----------------------------------------------------------------------------------


def fingerprint() -> dict[str, Any]:
    """What decides the last bits of a result: the kind of CPU, torch's kernels, the libraries."""
    import torch

    cpu = _cpu()
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    return {
        "architecture": platform.machine(),
        "vendor": cpu.get("vendor_id", cpu.get("CPU implementer", "")),
        "model_name": cpu.get("model name", ""),
        "family": cpu.get("cpu family", ""),
        "model": cpu.get("model", ""),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
        **{library: importlib.metadata.version(library) for library in LIBRARIES},
    }


def _cpu() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {"vendor_id": platform.processor()}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


# -- running ---------------------------------------------------------------------------------------


def run(case: Case, directory: Path, models: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Runs a case: (what is recorded of it, seconds of its stages).

    directory: an empty folder for the run.
    models: a folder for the models that recipes make; one that is there already is not made again.

    Raises RuntimeError when the run fails, with the end of its output.
    """
    run_directory = directory / "run"
    recipe = RECIPES / f"{case.recipe}.yaml"
    settings = [*case.settings, f"run.dir={run_directory}"]
    command = [sys.executable, "-m", "gcore_core", "run", str(recipe), *settings]
    one_thread = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {
        **os.environ,
        **dict.fromkeys(one_thread, "1"),
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "G_CORE_CACHE": str(models),
    }
    began = time.time()
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    ended = time.time()
    if process.returncode != 0:
        words = " ".join(command)
        raise RuntimeError(f"{words}\nexit code {process.returncode}:\n{output[-4000:]}")
    rows = _json_lines(run_directory / "metrics.jsonl")
    first, last = rows[0]["time_unix_s"], rows[-1]["time_unix_s"]
    seconds = {
        "make and start": first - began,
        "steps": last - first,
        "end": ended - last,
        "all": ended - began,
    }
    return read(run_directory, _made(models / "models", case.models)), seconds


# -- reading a run ---------------------------------------------------------------------------------


def read(run_directory: Path, models: Mapping[str, Path]) -> dict[str, Any]:
    """What a golden holds of a run that has ended.

    models: name -> folder of each model that it began with.
    """
    position = json.loads((run_directory / "position.json").read_text())
    answers = _files(run_directory / "samples", "*.jsonl")
    return {
        "models_sha256": {
            f"{name}/{path.name}": hash_of_tensors([path])
            for name, folder in models.items()
            for path in _files(folder, "*.safetensors")
        },
        "steps": [_step(row) for row in _json_lines(run_directory / "metrics.jsonl")],
        "drawn": _drawn(run_directory / "trace"),
        "position": {key: position[key] for key in ("step", "next_ordinal")},
        "answers_sha256": {path.name: _hash_of_answers(path) for path in answers},
        "weights_sha256": hash_of_tensors(_files(run_directory / "weights", "*.safetensors")),
    }


def _step(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without what is measured."""
    metrics = row["metrics"].items()
    return {
        "step": row["step"],
        "version": row["version"],
        "metrics": {name: value for name, value in metrics if not name.startswith(MEASURED)},
        "evaluation": row["evaluation"],
    }


def _drawn(trace: Path) -> list[dict[str, Any]]:
    """Per step of the trace, over all controllers: its ordinals and what became of the records.

    ``records_sha256`` is over one line a record, sorted: ``RECORD_FIELDS`` as a JSON list.
    """
    steps: dict[int, list[dict[str, Any]]] = {}
    for path in _files(trace, "controller.*.jsonl"):
        for line in _json_lines(path):
            if line["what"] == "record":
                steps.setdefault(line.get("step", 0), []).append(line)
    return [_drawn_in(step, records) for step, records in sorted(steps.items())]


def _drawn_in(step: int, records: list[dict[str, Any]]) -> dict[str, Any]:
    lines = sorted(
        json.dumps([record.get(field, 0) for field in RECORD_FIELDS]) for record in records
    )
    trained = [record for record in records if record["verdict"] == "trained"]
    return {
        "step": step,
        "ordinals": _ranges(record["ordinal"] for record in records),
        "ordinals_trained": _ranges(record["ordinal"] for record in trained),
        "records": len(records),
        "records_trained": len(trained),
        "verdicts": dict(sorted(Counter(record["verdict"] for record in records).items())),
        "statuses": dict(sorted(Counter(record["status"] for record in records).items())),
        "records_sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
    }


def _ranges(ordinals: Iterable[int]) -> str:
    """Distinct numbers as text: 0, 1, 2, 5 is "0-2,5"."""
    ranges: list[list[int]] = []
    for ordinal in sorted(set(ordinals)):
        if ranges and ranges[-1][1] == ordinal - 1:
            ranges[-1][1] = ordinal
        else:
            ranges.append([ordinal, ordinal])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _made(models: Path, names: Iterable[str]) -> dict[str, Path]:
    """Name -> folder of each made model. Raises RuntimeError when there is none or a second one."""
    folders: dict[str, Path] = {}
    for name in names:
        present = [path for path in models.glob(f"{name}-*") if path.is_dir()]
        if len(present) != 1:
            raise RuntimeError(f"{models} holds {len(present)} models {name}: give an empty folder")
        folders[name] = present[0]
    return folders


def hash_of_tensors(files: Sequence[Path]) -> str:
    """SHA-256 over name, type, shape and bytes of every tensor, in the order of their names."""
    tensors: dict[str, tuple[str, bytes]] = {}
    for file in files:
        content = file.read_bytes()
        data_begins = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:data_begins])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            about = json.dumps([name, entry["dtype"], entry["shape"]])
            tensors[name] = (about, content[data_begins + first : data_begins + last])
    digest = hashlib.sha256()
    for _, (about, data) in sorted(tensors.items()):
        digest.update(about.encode())
        digest.update(data)
    return digest.hexdigest()


def _hash_of_answers(path: Path) -> str:
    """SHA-256 over the answers that an evaluation shows and their rewards, without pictures."""
    lines = [json.dumps({**line, "arrays": None}, sort_keys=True) for line in _json_lines(path)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _files(directory: Path, pattern: str) -> list[Path]:
    """Raises RuntimeError when there is none: a golden over no files would hold nothing."""
    files = sorted(directory.glob(pattern))
    if not files:
        raise RuntimeError(f"no {pattern} in {directory}")
    return files


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- goldens ---------------------------------------------------------------------------------------


def load_golden(name: str) -> dict[str, Any]:
    """{"settings", "recordings": [what ``read`` returns and "machine", one a machine]}."""
    return dict(json.loads((GOLDENS / f"{name}.json").read_text()))


def save_golden(name: str, recording: dict[str, Any]) -> None:
    """Replaces this machine's recording.

    Those of other machines stay, unless they were made with other settings.
    """
    settings = CASES[name].settings
    kept: list[dict[str, Any]] = []
    if (GOLDENS / f"{name}.json").exists():
        golden = load_golden(name)
        if golden["settings"] == settings:
            here = recording["machine"]
            kept = [other for other in golden["recordings"] if other["machine"] != here]
    text = json.dumps({"settings": settings, "recordings": [*kept, recording]}, indent=1)
    GOLDENS.mkdir(exist_ok=True)
    (GOLDENS / f"{name}.json").write_text(text + "\n")


def compare(name: str, recording: dict[str, Any]) -> tuple[list[str], str]:
    """(what differs from the golden, what could not be compared on this machine or "")."""
    golden = load_golden(name)
    if golden["settings"] != CASES[name].settings:
        return [f"goldens/{name}.json was recorded with other settings: record it anew"], ""
    for known in golden["recordings"]:
        if known["machine"] == recording["machine"]:
            return differences(known, recording), ""
    known = golden["recordings"][0]
    same_models = known["models_sha256"] == recording["models_sha256"]
    if not same_models and CASES[name].drops_groups:
        return [], "another machine with other models: nothing is compared"
    differing = differences(_counts(known), _counts(recording))
    if not same_models:
        return (
            differing,
            "another machine with other models: ordinals and counts alone are compared",
        )
    differing += differences(
        _losses(known), _losses(recording), RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE
    )
    return differing, "another machine: ordinals and counts are compared exactly, losses nearly"


def _counts(recording: Mapping[str, Any]) -> dict[str, Any]:
    """What every machine must reproduce exactly."""
    counted = ("step", "ordinals", "ordinals_trained", "records", "records_trained", "verdicts")
    steps = [
        {"version": step["version"], **_chosen(step["metrics"], ("groups/", "updates"))}
        for step in recording["steps"]
    ]
    drawn = [{key: row[key] for key in counted} for row in recording["drawn"]]
    return {"steps": steps, "drawn": drawn, "position": recording["position"]}


def _losses(recording: Mapping[str, Any]) -> dict[str, Any]:
    """What a machine that began with the same models must reproduce nearly."""
    return {f"step {step['step']}": _chosen(step["metrics"], LOSSES) for step in recording["steps"]}


def _chosen(metrics: Mapping[str, float], beginnings: tuple[str, ...]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(beginnings)}


def differences(
    golden: Any,
    now: Any,
    relative: float = 0.0,
    absolute: float = 0.0,
    where: str = "",
) -> list[str]:
    """A line for each value of ``golden`` that ``now`` lacks or has otherwise.

    What ``now`` has beside them is ignored, so that a new metric needs no new golden.
    """
    if isinstance(golden, Mapping) and isinstance(now, Mapping):
        return [
            line
            for key, value in golden.items()
            for line in differences(value, now.get(key), relative, absolute, f"{where}/{key}")
        ]
    if isinstance(golden, list) and isinstance(now, list) and len(golden) == len(now):
        return [
            line
            for index, (value, other) in enumerate(zip(golden, now, strict=True))
            for line in differences(value, other, relative, absolute, f"{where}[{index}]")
        ]
    if golden == now:
        return []
    numbers = isinstance(golden, int | float) and isinstance(now, int | float)
    if numbers and math.isclose(golden, now, rel_tol=relative, abs_tol=absolute):
        return []
    return [f"{where}: {_short(golden)} in the golden, {_short(now)} now"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


# -- the command -----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Records or checks; 1 when something differs from the goldens."""
    parser = argparse.ArgumentParser(description="Record what recipes do, or check it.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"cases (all): {', '.join(CASES)}")
    parser.add_argument("--check", action="store_true", help="compare with the goldens")
    parser.add_argument(
        "--models", type=Path, metavar="DIR", help="keep and reuse the models that recipes make"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs' directories")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(CASES)):
        parser.error(f"no such case: {', '.join(unknown)}")
    names = [name for name in CASES if name in options.names or not options.names]
    with tempfile.TemporaryDirectory(prefix="gcore-oracles-") as temporary:
        models = (options.models or Path(temporary) / "models").absolute()
        runs = (options.keep or Path(temporary) / "runs").absolute()
        return _run_all(names, models, runs, check=options.check)


def _run_all(names: Sequence[str], models: Path, runs: Path, *, check: bool) -> int:
    machine = fingerprint()
    weights: dict[str, str] = {}
    lines: list[str] = []
    for name in names:
        (runs / name).mkdir(parents=True)
        recording, seconds = run(CASES[name], runs / name, models)
        recording = {"machine": machine, **recording}
        weights[name] = recording["weights_sha256"]
        note = "recorded"
        if check:
            differing, not_compared = compare(name, recording)
            lines += [f"{name}{line}" for line in differing]
            note = "differs" if differing else "same"
            if not_compared:
                note += f" ({not_compared})"
        else:
            save_golden(name, recording)
        stages = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in seconds.items())
        print(f"{name}: {note}; weights {recording['weights_sha256'][:16]}; {stages}", flush=True)
    if len({weights[name] for name in SAME_WEIGHTS if name in weights}) > 1:
        lines.append(f"{' and '.join(SAME_WEIGHTS)} end with different weights")
    for line in lines[:40]:
        print(line)
    if len(lines) > 40:
        print(f"and {len(lines) - 40} more")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
