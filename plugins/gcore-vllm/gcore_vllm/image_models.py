"""Registers vLLM's models of Qwen2-VL's kind on machines without torchvision.

Builds of torchvision fail beside a torch for CPUs. vLLM and transformers import it to open images
and videos, which this plugin does not let them do: the engine gets patches. What vLLM still asks,
how many tokens there may be, is answered here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from transformers.utils import is_torchvision_available


def _stand_in() -> None:
    """Puts empty modules in torchvision's place, unless torchvision is there."""
    # transformers remembers the answer, so it leaves the empty modules alone.
    if is_torchvision_available():
        return
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
    functional = "torchvision.transforms.v2.functional"
    sys.modules[functional] = ModuleType(functional)
    vars(sys.modules["torchvision.transforms.v2"])["functional"] = sys.modules[functional]


_stand_in()

from vllm.model_executor.models import qwen2_5_vl, qwen2_vl  # noqa: E402
from vllm.multimodal import MULTIMODAL_REGISTRY  # noqa: E402

#: Steps' worth of image tokens that may be read in one step. More than one, because of an image
#: that the prefix cache holds in part all tokens are read again; vLLM would else divide a prompt,
#: which fails on CPUs.
_STEPS = 4


class _Sizes(qwen2_vl.Qwen2VLProcessingInfo):
    """How large images may be; nothing is processed."""

    def get_hf_config(self) -> Any:
        return self.ctx.get_hf_config()

    def get_hf_processor(self, **_: object) -> NoReturn:
        raise NotImplementedError("images are given to this engine as patches")

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Returns the most tokens of an image: as many as ``_STEPS`` steps may read."""
        return {"image": _STEPS * seq_len}


class _NoProcessor(qwen2_vl.Qwen2VLMultiModalProcessor):
    """Stands for vLLM's processor, and processes nothing."""

    requires_tokenizer = False


_register = MULTIMODAL_REGISTRY.register_processor(
    _NoProcessor, info=_Sizes, dummy_inputs=qwen2_vl.Qwen2VLDummyInputsBuilder
)


@_register
class Qwen2VL(qwen2_vl.Qwen2VLForConditionalGeneration):
    pass


@_register
class Qwen25VL(qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    pass
