"""All of Megatron-Core that this plugin uses, imported once the shim is in place; other modules
import it from here.
"""

# ruff: noqa: E402
from __future__ import annotations

from gcore_megatron import shim

shim.install()

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

__all__ = [
    "CheckpointingException",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "FileSystemWriterAsync",
    "GPTModel",
    "MoELayer",
    "OptimizerConfig",
    "TopKRouter",
    "TorchCommonSaveStrategy",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "clip_grad_by_total_norm_fp32",
    "dist_checkpointing",
    "filesystem_async",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "serialization",
    "tensor_parallel",
]
