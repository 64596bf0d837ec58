"""What benchmarks/gpu.py consists of."""

from __future__ import annotations

#: Modules that it imports from its own folder, and itself.
MODULES = (
    "gpu",
    "gpu_large",
    "figures",
    "report",
    "sleeping_model",
    "engine_overhead",
    "engine_pairs",
)
PARTS = (
    "learns",
    "bfloat16",
    "ipc",
    "sleep",
    "busy",
    "tokens",
    "vllm",
    "step",
    "step_64k",
    "lora",
    "lora_64k",
    "decode",
    "decode_compiled",
    "naps",
    "save",
    "repeat",
    "offload",
)
