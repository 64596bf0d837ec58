"""Runs SGLang's server in a process of its own: ``python -m gcore_sglang.child``.

``gcore_sglang.server`` starts it. Standard input brings one line, the spec as JSON, so that the key
stands neither among the arguments nor in the environment, which others may read. Then it stays
open. When it ends the worker is gone, and this process ends with all that it has started: it leads
a process group of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from gcore_core.contract.errors import DataError
from gcore_sglang.all_parts import wait_for_all_parts
from gcore_sglang.arguments import EXIT_REFUSED, EXIT_WRONG_WEIGHTS, KNOWN, WRONG_WEIGHTS
from gcore_sglang.cpu import pin_nothing, process_nothing, stand_in
from gcore_sglang.input_temperatures import divide_input_logits
from gcore_sglang.invariant import allow_torch_attention, compute_rows_alone
from gcore_sglang.never import leave_out, tell

#: Start of the names of what SGLang leaves in shared memory when it is killed.
_LEFT_BEHIND = "/dev/shm/sglang_loads_"
#: Python's process that removes the semaphores of those that are gone, and then ends by itself.
_TRACKER = "multiprocessing.resource_tracker"
_ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "lora_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "max_total_tokens": 16_384,
}

# SGLang's own processes import this module again before anything else, so what is done here holds
# for them too.
os.environ["SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"] = "gcore_sglang.processors"
os.environ["SGLANG_VLM_CACHE_SIZE_MB"] = "0"  # it would keep what the old weights made of an image
if not torch.cuda.is_available():
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # Otherwise SGLang compiles small functions with the C++ compiler, which takes longer than they.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    stand_in()
if __name__ != "__main__":  # there, what takes seconds must wait until the worker is watched
    if not torch.cuda.is_available():
        process_nothing()
        pin_nothing()
        compute_rows_alone()
    divide_input_logits()
    wait_for_all_parts()
    leave_out()


def main() -> None:
    """Reads the spec from standard input and runs the server until it ends.

    Writes the known arguments to a file and exits with EXIT_REFUSED when the spec has an unknown
    one; see also ``_check_weights``.
    """
    spec = json.loads(sys.stdin.buffer.readline())
    private = Path(spec["private"])
    threading.Thread(target=_end_with_the_worker, args=(private,), daemon=True).start()
    if not torch.cuda.is_available():
        process_nothing()
        allow_torch_attention()

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    known_arguments = set(ServerArgs.__struct_fields__)
    if not set(spec["arguments"]) <= known_arguments:
        (private / KNOWN).write_text(json.dumps(sorted(known_arguments)), encoding="utf-8")
        sys.exit(EXIT_REFUSED)
    _check_weights(spec["arguments"], private)
    tell(spec["never"], private)
    defaults = {} if torch.cuda.is_available() else _ON_CPU
    run_server(ServerArgs(**{**defaults, **spec["arguments"]}))


def _check_weights(arguments: dict[str, Any], private: Path) -> None:
    """Writes what is wrong with the model's weights to a file and exits with EXIT_WRONG_WEIGHTS.

    SGLang fills in what the files lack, and leaves out what it has no place for, without a word.
    """
    from gcore_language.pretrained import check_for_engine

    trust = bool(arguments.get("trust_remote_code"))
    try:
        check_for_engine(Path(arguments["model_path"]), trust_remote_code=trust)
    except DataError as error:
        told = {"what": error.what, "where": error.where, "why": error.why, "todo": error.todo}
        (private / WRONG_WEIGHTS).write_text(json.dumps(told), encoding="utf-8")
        sys.exit(EXIT_WRONG_WEIGHTS)


def _end_with_the_worker(private: Path) -> None:
    """Waits until standard input ends, then ends all processes and removes the private
    directory.
    """
    while os.read(sys.stdin.fileno(), 1024):
        pass
    try:
        _end_processes()
        shutil.rmtree(private, ignore_errors=True)
    finally:
        os.kill(
            os.getpid(), signal.SIGKILL
        )  # SGLang's processes end with this one, if they have not yet


def _end_processes() -> None:
    """Ends the processes that this one started, and removes what they leave in shared memory."""
    import psutil

    processes = psutil.Process().children(recursive=True)
    files: set[str] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            files.update(mapping.path for mapping in process.memory_maps())
            if _TRACKER not in " ".join(process.cmdline()):
                process.kill()
    for file in filter(lambda path: path.startswith(_LEFT_BEHIND), files):
        Path(file).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
