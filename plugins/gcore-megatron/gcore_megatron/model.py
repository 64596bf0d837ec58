"""Builds Llama, Mistral, Qwen2, Qwen3 and mixtures of experts from Megatron-Core's own layers.

Legend of shapes:

    B   rows
    S   positions of a row that this context-parallel rank holds
    D   hidden size
    H   query heads
    K   key-value heads
    E   head size
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from gcore_language.experts import ExpertNames, expert_names
from torch import Tensor

from gcore_core.contract.errors import ConfigError, DataError
from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.library import (
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    parallel_state,
    tensor_parallel,
)
from gcore_megatron.routers import ExpertLayer, Router
from gcore_megatron.split_checks import problems_of_model, sparse_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
#: Rotary embeddings whose angles are positions times constants.
_ROTARY = ("default", "linear", "llama3")
#: The rows of embedding and output layer are padded to a multiple of this and of tensor_parallel.
#: So a checkpoint has the same shape for every tensor_parallel that is a power of two up to this.
_VOCABULARY_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The layers of experts of a model.

    count: experts of a layer.
    top_k: how many of them compute a token.
    channels: feed-forward channels of an expert.
    normalises: whether the weights of a token's experts add up to 1.
    layers: numbers of the layers that have experts, in order.
    names: how the family's checkpoints name their matrices.
    """

    count: int
    top_k: int
    channels: int
    normalises: bool
    layers: tuple[int, ...]
    names: ExpertNames


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes and switches of a model, read from its Hugging Face config.

    rotary: float32[E / 2], inverse frequencies of the rotary embedding.
    qkv_bias: whether query, key and value projections have biases.
    head_norm: whether queries and keys are normalised (Qwen3).
    tied: whether the output layer has the embedding's weights.
    experts: None for a model without experts.
    values: whether there is a value head in the place of the output layer.
    """

    layers: int
    hidden: int
    feed_forward: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int
    norm_eps: float
    rotary: Tensor
    qkv_bias: bool
    head_norm: bool
    tied: bool
    experts: Experts | None = None
    values: bool = False

    def rows(self, tensor_parallel_size: int) -> int:
        """Returns the vocabulary's size with the padding that makes it divisible over ranks."""
        multiple = math.lcm(_VOCABULARY_MULTIPLE, tensor_parallel_size)
        return -(-self.vocabulary // multiple) * multiple

    def sparse_layers(self) -> tuple[int, ...]:
        """Returns the numbers of the layers that have experts."""
        return () if self.experts is None else self.experts.layers


def architecture(config: PreTrainedConfig, path: str) -> Architecture:
    """Reads a config of transformers.

    Raises DataError for a model that this module cannot build.
    """

    def refuse(holds: bool, what: str, why: str = "") -> None:
        if holds:
            raise DataError(
                what,
                where=path,
                why=why
                or f"Built here: {', '.join(FAMILIES)}, with plain causal attention and SwiGLU.",
                todo="Train this model with use: torch.",
            )

    kind = config.model_type
    refuse(kind not in FAMILIES, f"megatron has no model for the family {kind!r}.")
    sliding = (
        getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True)
        else None
    )
    refuse(bool(sliding), f"megatron has no sliding window, this model's is {sliding}.")
    refuse(config.hidden_act != "silu", f"megatron has no activation {config.hidden_act!r} here.")
    refuse(
        bool(getattr(config, "mlp_bias", False)),
        "megatron has no biases in the feed-forward layers here.",
    )
    refuse(
        kind != "qwen2" and bool(getattr(config, "attention_bias", False)),
        "megatron has no bias in the attention's output projection here.",
    )
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Architecture(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        feed_forward=config.intermediate_size,
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rotary=_rotary(config, size, refuse),
        qkv_bias=kind == "qwen2",
        head_norm=kind in ("qwen3", "qwen3_moe"),
        tied=bool(config.tie_word_embeddings),
        experts=_experts(config, refuse),
    )


def _experts(config: PreTrainedConfig, refuse: Callable[[bool, str, str], None]) -> Experts | None:
    """Returns the layers of experts of a Mixtral or Qwen3-MoE; None for another family."""
    names = expert_names(config)
    if names is None:
        return None
    layers = sparse_layers(config)
    why = "Its config says mlp_only_layers and decoder_sparse_step."
    refuse(not layers, "this mixture of experts has no layer with experts.", why)
    jitter = getattr(config, "router_jitter_noise", 0.0)
    why = "Log-probs must repeat, and noise is drawn in every pass."
    refuse(bool(jitter), f"megatron's routers have no noise here, this model's is {jitter}.", why)
    if config.model_type == "mixtral":
        return Experts(
            count=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            channels=config.intermediate_size,
            normalises=True,
            layers=layers,
            names=names,
        )
    return Experts(
        count=config.num_experts,
        top_k=config.num_experts_per_tok,
        channels=config.moe_intermediate_size,
        normalises=bool(config.norm_topk_prob),
        layers=layers,
        names=names,
    )


def _rotary(
    config: PreTrainedConfig, size: int, refuse: Callable[[bool, str, str], None]
) -> Tensor:
    """Returns base^(-2 i / E) (Su et al. 2021, eq. 15), scaled where the config says so."""
    rotary = config.rope_parameters
    kind = rotary.get("rope_type", "default")
    part = rotary.get("partial_rotary_factor") or 1.0
    why = f"Angles here are positions times constants: {', '.join(_ROTARY)}."
    refuse(kind not in _ROTARY, f"megatron has no rotary embedding of type {kind!r} here.", why)
    refuse(
        part != 1.0,
        f"megatron applies rotary embeddings to whole heads, this model to a part of {part}.",
        why,
    )
    if kind == "default":
        return 1.0 / rotary["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float()


def check_split(model: Architecture, config: MegatronTrainerConfig, role: str) -> None:
    """Raises ConfigError when Megatron-Core cannot split the model over these parallel sizes."""
    counted = [
        ("tensor_parallel", model.query_heads, "attention heads"),
        ("tensor_parallel", model.kv_heads, "key-value heads"),
        ("pipeline_parallel", model.layers, "layers"),
    ]
    if len(model.sparse_layers()) < model.layers:
        counted.append(("tensor_parallel", model.feed_forward, "feed-forward channels"))
    for name, count, what in counted:
        size = getattr(config, name)
        if count % size:
            raise ConfigError(
                f"the model has {count} {what}, which cannot be divided evenly among {size} slots.",
                where=f"roles.{role}.config.{name}",
                todo=f"Choose a divisor of {count}.",
            )
    experts = 0 if model.experts is None else model.experts.count
    for name, why in problems_of_model(config, experts, model.sparse_layers(), model.layers):
        raise ConfigError(f"{why}.", where=f"roles.{role}.config.{name}")


class Norm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked for Megatron-Core.

    Rejected: Megatron-Core's own wrapper, which refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel


class FusedAttention(torch.nn.Module):
    """Attention by torch's fused kernels.

    A context-parallel rank has the queries of its own positions and gathers the keys and values of
    all positions. Megatron-Core itself leaves context parallelism to Transformer Engine.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Returns the attention's output, [S, B, H E].

        query: [S, B, H, E].
        key, value: [S, B, K, E].
        attention_mask: bool, true where a query sees a key; None for causal attention.
        """
        if self._group.size() > 1:
            key, value = (
                tensor_parallel.gather_from_sequence_parallel_region(
                    x.contiguous(), group=self._group
                )
                for x in (key, value)
            )
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=self._scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


class PolicyModel(GPTModel):
    """One pipeline stage of the model.

    The last stage returns hidden states, not logits, because only those that predict actions go
    through the output layer; see ``logits``.
    """

    def __init__(
        self, config: TransformerConfig, spec: TransformerBlockSubmodules, model: Architecture
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=model.rows(config.tensor_model_parallel_size),
            max_sequence_length=model.positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            parallel_output=True,
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="rope",
        )
        self._rotary = model.rotary

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        uses: Tensor | None = None,
        routing: Tensor | None = None,
    ) -> Tensor:
        """Returns hidden states [S, B, D]; with sequence parallelism this rank's part of S.

        ids: int64[B, S].
        positions: int64[B or 1, S].
        mask: as in ``FusedAttention``.
        uses, routing: as in ``gcore_megatron.routers.ExpertLayer``.
        """
        hidden = self.embedding(input_ids=ids, position_ids=positions) if self.pre_process else None
        self._rotary = self._rotary.to(ids.device)
        angles = positions.t()[..., None].float() * self._rotary
        angles = torch.cat([angles, angles], -1)[:, :, None]
        return self.decoder(
            hidden_states=hidden,
            attention_mask=mask,
            context=routing,
            context_mask=uses,
            rotary_pos_emb=angles,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns this rank's part of the logits, [A, V / tensor_parallel].

        hidden: [A, D], whole hidden states.
        """
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else None
        )
        return self.output_layer(hidden, weight=weight)[0]


class ValueModel(PolicyModel):
    """The same with a value head, which the last stage has in the place of the output layer.

    Every tensor-parallel rank has the whole head and computes it of the same hidden states, so that
    its gradient is whole on each. Rejected: to split one row of D numbers.
    """

    def __init__(
        self, config: TransformerConfig, spec: TransformerBlockSubmodules, model: Architecture
    ) -> None:
        super().__init__(config, spec, model)
        if self.post_process:
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            self.output_layer = torch.nn.Linear(
                model.hidden, 1, bias=False, dtype=config.params_dtype, device=device
            )

    def values(self, hidden: Tensor) -> Tensor:
        """Returns the values of hidden states, float32[A], from [A, D].

        In float32 whatever the trunk computes in: bfloat16 has two digits, a value has more.
        """
        return F.linear(hidden.float(), self.output_layer.weight.float()).squeeze(-1)

    def sharded_state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """As Megatron-Core has it, but the head has no rows of padding that could be left out.

        So the state of a policy is refused here, in place of read in part.
        """
        state: dict[str, Any] = super().sharded_state_dict(*arguments, **options)
        for name, shard in state.items():
            if name.endswith("output_layer.weight"):
                shard.allow_shape_mismatch = False
        return state


def build(
    model: Architecture,
    config: MegatronTrainerConfig,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> PolicyModel:
    """Builds this rank's part of the model, with undefined weights.

    Megatron-Core's parallel groups must exist.

    deterministic: whether Megatron-Core chooses operations that repeat bit for bit.
    """
    transformer = _transformer_config(model, config, device, deterministic)
    of_stage = get_num_layers_to_build(transformer)
    first = parallel_state.get_pipeline_model_parallel_rank() * of_stage
    own = range(first, first + of_stage)
    dense = _layer_spec(model, 0)
    sparse = dense if model.experts is None else _layer_spec(model, model.experts.count)
    spec = TransformerBlockSubmodules(
        layer_specs=[sparse if layer in model.sparse_layers() else dense for layer in own],
        layer_norm=Norm,
    )
    kind = ValueModel if model.values else PolicyModel
    built = kind(transformer, spec, model)
    if built.post_process and not model.values:
        # With sequence parallelism the layers before split the positions, but the output layer is
        # given whole hidden states of a few positions.
        built.output_layer.sequence_parallel = False
        built.output_layer.allreduce_dgrad = config.tensor_parallel > 1
    _mark_shards(built)
    if model.experts is not None:
        for name, parameter in built.named_parameters():
            if is_of_expert(name):
                # Also where each slot has all experts: then a saved state has one form, and there
                # may be other replicas of an expert than of the rest.
                parameter.allreduce = False
    built.train()  # recomputation requires it; there is no dropout
    return built


def _layer_spec(model: Architecture, experts: int) -> Any:
    """Returns how Megatron-Core builds a layer.

    experts: how many it has; 0 for a dense layer.
    """
    layer = get_gpt_layer_local_spec(
        num_experts=experts or None, normalization="RMSNorm", qk_layernorm=model.head_norm
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = FusedAttention
    if model.head_norm:
        attention.q_layernorm = attention.k_layernorm = HeadNorm
    if model.experts is not None:
        layer.module = ExpertLayer
    if experts:
        parts.mlp.submodules.router = Router
    return layer


def is_of_expert(name: str) -> bool:
    """Returns whether this is the name of a parameter of an expert."""
    return ".local_experts." in name


class HeadNorm(Norm):
    """The norm of queries and keys.

    Each tensor-parallel rank sees all positions of its heads, so positions are not split here.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.weight.sequence_parallel = False


def _mark_shards(model: PolicyModel) -> None:
    """Marks the parameters that are shards, which the gradient's norm needs to know.

    Megatron-Core itself does this only when it draws initial weights.
    """
    for module in model.modules():
        dimension = 1 if isinstance(module, tensor_parallel.RowParallelLinear) else 0
        kinds = (
            tensor_parallel.ColumnParallelLinear,
            tensor_parallel.RowParallelLinear,
            tensor_parallel.VocabParallelEmbedding,
        )
        if isinstance(module, kinds) and module.weight is not None:
            tensor_parallel.set_tensor_model_parallel_attributes(module.weight, True, dimension, 1)


def _transformer_config(
    model: Architecture, config: MegatronTrainerConfig, device: torch.device, deterministic: bool
) -> TransformerConfig:
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    recompute: dict[str, Any] = {}
    if config.gradient_checkpointing:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    experts: dict[str, Any] = {}
    if model.experts is not None:
        mixed = len(model.experts.layers) < model.layers
        frequency = [int(layer in model.experts.layers) for layer in range(model.layers)]
        experts = {
            "num_moe_experts": model.experts.count,
            "moe_router_topk": model.experts.top_k,
            "moe_ffn_hidden_size": model.experts.channels,
            "moe_layer_freq": frequency if mixed else 1,
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": True,  # ``Router`` has a rule of its own
            "expert_model_parallel_size": config.expert_parallel,
            "expert_tensor_parallel_size": 1,
        }
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.feed_forward,
        num_attention_heads=model.query_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.head_norm,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        context_parallel_size=config.context_parallel,
        sequence_parallel=config.sequence_parallel,
        variable_seq_lengths=config.pipeline_parallel > 1,
        # also without experts, since the default dispatcher refuses variable lengths
        moe_token_dispatcher_type="alltoall",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.dtype == "bfloat16",
        deterministic_mode=deterministic,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        # the loss is already normalised: gradients are summed, never averaged
        calculate_per_token_loss=True,
        # fusions of Transformer Engine and Apex
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **recompute,
        **experts,
    )
