"""What may be set under ``config:`` of a role or reward that uses this plugin."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from gcore_language.context.settings import ContextSettings
from gcore_language.lora_settings import LoraTrainerSettings
from gcore_language.settings import AUTO, GeneratorSettings, check_threads, require
from gcore_language.shared_settings import ValueHeadSettings

from gcore_core.contract.traits import Traits
from gcore_torch.offload_settings import OffloadSettings
from gcore_torch.sharding_settings import ShardingSettings


@dataclass(frozen=True, kw_only=True)
class TorchTrainerConfig(LoraTrainerSettings):
    """Settings of ``roles.<trainer>.config``."""

    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention of transformers: auto is its own choice for the model; flash_attention_2 goes only
    with packing: padded.
    """
    context: ContextSettings = field(default_factory=ContextSettings)
    """Slots that share each micro-batch, for long contexts; ``context: {ulysses: 2, ring: 4}`` has
    eight of them share it. ``budget_tokens`` is then the tokens of one slot.
    """
    compile: Literal["never", "auto"] = "never"
    """Whether torch.compile makes kernels for the layers: auto does on CUDA. A step of a large
    model is then faster and takes less memory; the first one takes some 20 seconds more.
    """
    offload: OffloadSettings = field(default_factory=OffloadSettings)
    """What lies in host memory: ``offload: {state: true, activations: true}``."""
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    """How slots share the model: ``sharding: {replicas: 2}`` has two groups of them hold it,
    ``sharding: {tensor: 2}`` has two split every layer, ``sharding: {experts: 2}`` spreads experts
    over two.
    """
    router_replay: Literal["auto", "always", "never"] = "auto"
    """Whether a mixture of experts takes the experts by which a record was sampled, in place of
    those that its own routers choose: auto where records have them; always refuses a generator that
    does not give them; never leaves the choice to the routers.
    """
    router_aux_loss: float = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts, at least 0; 0 adds none. The
    loss is 1 where all experts of a layer get equally many tokens.
    """

    value_head: ValueHeadSettings = field(default_factory=ValueHeadSettings)
    """A critic on the policy's own trunk, for advantages of values; ``value_head: {coefficient:
    0.5}``. What a new head begins with, ``value_head_std`` says. Not for adapters, images, or a
    mixture of experts.
    """

    def traits(self) -> Traits:
        # The values before and after each action.
        values = {"values", "next_values"} if self.value_head.on else set()
        return replace(
            super().traits(),
            replica_slots=self.context.degree * self.sharding.tensor,
            own_columns=frozenset(values),
            needs_routing=self.router_replay == "always",
            adapters=True,
            device_weights=True,
            images=True,
            saves_in_background=True,
            sharding_over_nodes=True,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context.degree > 1:
            _check_shared(self)
        if self.sharding.tensor > 1:
            _check_split(self)
        if self.sharding.experts > 1:
            _check_spread(self)
        for name, is_on in (
            ("context", self.context.degree > 1),
            ("sharding", self.sharding != ShardingSettings()),
            ("offload", self.offload.on),
        ):
            require(
                self.compile == "never" or not is_on,
                "compile",
                f"auto does not go with {name}: that has not been tested; set it to never",
            )
        require(
            not (self.value_head.on and self.lora.on),
            "value_head",
            "does not go with lora, since a new head is trained as a whole",
        )
        require(
            self.gradient_checkpointing or not self.offload.activations,
            "offload.activations",
            "needs gradient_checkpointing: true: what is kept on the host are the layers' inputs",
        )
        require(
            0 <= self.router_aux_loss < math.inf,
            "router_aux_loss",
            f"must not be negative, is {self.router_aux_loss}",
        )
        require(
            self.attn_implementation != "flash_attention_2" or self.packing == "padded",
            "attn_implementation",
            "flash_attention_2 takes no mask, so it needs packing: padded",
        )


def _check_shared(config: TorchTrainerConfig) -> None:
    """Raises ConfigError for what has not been tested with slots that share a micro-batch."""
    require(
        config.packing == "auto",
        "packing",
        f"must be auto with context: slots share whole records in one row, is {config.packing}",
    )
    require(
        config.attn_implementation == "auto",
        "attn_implementation",
        f"must be auto with context, which has an attention of its own, is "
        f"{config.attn_implementation}",
    )
    for name in ("tensor", "experts"):
        require(
            getattr(config.sharding, name) == 1,
            f"sharding.{name}",
            "does not go with context: slots that share records have not been tested with it; set "
            "it to 1 (sharding.replicas goes with context)",
        )


def _check_split(config: TorchTrainerConfig) -> None:
    """Raises ConfigError for what has not been tested with slots that split the layers."""
    why = "does not go with sharding.tensor"
    require(not config.lora.on, "lora", f"{why}: adapters are not tested there")
    require(not config.offload.on, "offload", f"{why}: nothing was kept on the host there")
    require(
        config.dtype == "float32",
        "dtype",
        f"{config.dtype} {why}: gradients have not been compared",
    )
    require(
        config.attn_implementation == "auto",
        "attn_implementation",
        f"{config.attn_implementation} {why}: not tested there",
    )


def _check_spread(config: TorchTrainerConfig) -> None:
    """Raises ConfigError for what has not been tested with slots that experts are spread over."""
    why = "does not go with sharding.experts"
    require(not config.lora.on, "lora", f"{why}: adapters are not tested there")
    require(
        config.attn_implementation == "auto",
        "attn_implementation",
        f"{config.attn_implementation} {why}: not tested there",
    )


@dataclass(frozen=True, kw_only=True)
class TorchGeneratorConfig(GeneratorSettings):
    """Settings of ``roles.<generator>.config``."""

    compile: Literal["never", "auto"] = "never"
    """Whether torch.compile makes kernels for the fused decoder: auto does on CUDA. Tokens then
    come faster; the first ones come some 20 seconds later.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of weights and cache; auto: cuda where there is one, else cpu."""
    decoder: Literal["auto", "fused", "transformers"] = "auto"
    """How tokens are computed. fused: this plugin's decoder (Llama, Mistral, Qwen2, Qwen3).
    transformers: the model's own forward pass. auto: fused where its logits are the model's,
    else transformers.
    """
    sleep: Literal["keep", "discard"] = "keep"
    """What a sleep does with the weights: keep moves them from an accelerator to host memory;
    discard drops them, on a CPU too, and after the wake a push must bring them.
    """

    routing: Literal["auto", "never"] = "auto"
    """Whether records of a mixture of experts say which experts computed each token: auto says it,
    one or two bytes for each token, layer and expert of the token; never leaves it out, and then no
    trainer can replay it.
    """

    def traits(self) -> Traits:
        keeps_base = self.sleep == "keep"
        return replace(
            super().traits(),
            adapters=keeps_base,
            routing=self.routing == "auto",
            abort=True,
            determinism=True,
            device_weights=True,
            fingerprints=True,
            images=True,
            midway_weights=True,
            receives_weights=True,
            scores_logprobs=True,
            sleeps=True,
            tokens=True,
        )


@dataclass(frozen=True, kw_only=True)
class TorchRewardConfig:
    """Settings of ``rewards.<name>.config``."""

    path: str
    """Directory of the reward model, or its name on the hub; it must be given."""
    budget_tokens: int = 16384
    """Most tokens, padding included, of one forward pass, at least 1; a longer record is passed
    alone.
    """
    context_length: int | None = None
    """Most tokens of prompt and completion, at least 1; empty: the model's limit. A longer record
    gets no reward; it is not cut.
    """
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which the weights are held and the reward is computed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto: cuda where there is one, else cpu."""
    threads: int | str = AUTO
    """Number of CPU threads, at least 1; auto: as in a generator."""
    trust_remote_code: bool = False
    """Whether to run Python code that lies in the model directory."""

    def __post_init__(self) -> None:
        check_threads(self.threads)
        require(bool(self.path), "path", "no directory of a reward model is given")
        require(
            self.budget_tokens > 0, "budget_tokens", f"must be positive, is {self.budget_tokens}"
        )
        length = self.context_length
        require(length is None or length > 0, "context_length", f"must be positive, is {length}")
