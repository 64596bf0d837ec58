"""What benchmarks/gpu.py consists of."""

from __future__ import annotations

#: Modules that it imports from its own folder, and itself.
MODULES = (
    "gpu",
    "gpu_large",
    "gpu_real",
    "figures",
    "report",
    "sleeping_model",
    "engine_overhead",
    "engine_pairs",
)
PARTS = (
    "notes",
    "published",
    "learns",
    "bfloat16",
    "ipc",
    "sleep",
    "busy",
    "tokens",
    "vllm",
    "step",
    "lora",
    "step_64k",
    "lora_64k",
    "decode",
    "decode_compiled",
    "naps",
    "save",
    "repeat",
    "offload",
)
