"""Says where a 16-bit dtype brings nothing, for ``gcore_check_files``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gcore_core.contract.looking import Note

#: Flags of CPUs that have instructions for products of this dtype, of x86 and of Arm.
_FLAGS = {
    "bfloat16": {"amx_bf16", "avx512_bf16", "bf16"},
    "float16": {"amx_fp16", "avx512_fp16", "asimdhp"},
}


def notes(arguments: Mapping[str, Any]) -> Iterator[Note]:
    """Yields a note where only a CPU is here, and it has no instructions for that dtype.

    arguments: ``dtype``; ``cpu``, the file in which the system describes its processors.
    """
    dtype, cpu = arguments["dtype"], Path(arguments["cpu"])
    if torch.cuda.is_available() or not cpu.is_file():
        return
    flags = cpu.read_text(encoding="utf-8", errors="replace").split()
    if not _FLAGS[dtype] & set(flags):
        yield Note(
            f"{dtype} is not faster on this CPU, takes more memory in training, and makes "
            "log-probs of generator and trainer differ by more; leave it out for float32."
        )
