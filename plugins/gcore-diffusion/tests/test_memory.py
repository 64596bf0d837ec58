"""What is said of memory before a run: sizes are those of diffusers' models, bounds are bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")

import diffusers  # noqa: E402
from gcore_diffusion import tiny_pipelines  # noqa: E402
from gcore_diffusion.config import (  # noqa: E402
    DiffusionGeneratorConfig,
    DiffusionTrainerConfig,
    LoraSettings,
)
from gcore_diffusion.memory import SAVED_BY_BLOCK, generator_memory, trainer_memory  # noqa: E402
from gcore_diffusion.sizes import PUBLISHED, read_sizes  # noqa: E402
from torch import nn  # noqa: E402

from gcore_core.contract.memory import MemoryNeed, WorkerShape  # noqa: E402

#: The transformers' configs on the hub.
_SD35_MEDIUM: dict[str, Any] = {
    "attention_head_dim": 64,
    "caption_projection_dim": 1536,
    "dual_attention_layers": tuple(range(13)),
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 24,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
    "sample_size": 128,
}
_FLUX_DEV: dict[str, Any] = {
    "attention_head_dim": 128,
    "guidance_embeds": True,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 19,
    "num_single_layers": 38,
    "patch_size": 1,
    "pooled_projection_dim": 768,
}
_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 16,
    "layers_per_block": 2,
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}


def numbers(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.state_dict().values())


def clip(hidden: int, layers: int, heads: int, kind: Any) -> nn.Module:
    from transformers import CLIPTextConfig

    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    config = CLIPTextConfig(
        **sizes, num_attention_heads=heads, vocab_size=49408, projection_dim=hidden
    )
    module: nn.Module = kind(config)
    return module


def test_published_sizes_are_those_that_diffusers_builds() -> None:
    """On the meta device, from the configs on the hub; a T5's tied embedding counts once."""
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    t5 = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64}
    with torch.device("meta"):
        sd3 = diffusers.SD3Transformer2DModel(**_SD35_MEDIUM)
        flux = diffusers.FluxTransformer2DModel(**_FLUX_DEV)
        vae = numbers(diffusers.AutoencoderKL(**_VAE))
        xxl = T5EncoderModel(T5Config(**t5, vocab_size=32128, feed_forward_proj="gated-gelu"))
        large = clip(768, 12, 12, CLIPTextModelWithProjection)
        bare = clip(768, 12, 12, CLIPTextModel)
        giant = clip(1280, 32, 20, CLIPTextModelWithProjection)
    encoder = sum(parameter.numel() for parameter in xxl.parameters())
    own = PUBLISHED["stabilityai/stable-diffusion-3.5-medium"]
    assert own.transformer == numbers(sd3)
    assert own.fixed == sd3.pos_embed.pos_embed.numel()
    assert own.others == numbers(large) + numbers(giant) + encoder + vae
    own = PUBLISHED["black-forest-labs/FLUX.1-dev"]
    assert own.transformer == numbers(flux)
    assert own.others == numbers(bare) + encoder + vae


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_sizes_of_a_directory_are_those_of_its_files(name: str, tmp_path: Path) -> None:
    tiny_pipelines.save(name, tmp_path)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(tmp_path))
    own = read_sizes({"path": str(tmp_path)})
    assert own.transformer == numbers(pipeline.transformer)
    parts = [part for key, part in pipeline.components.items() if isinstance(part, nn.Module)]
    whole = sum(parameter.numel() for part in parts for parameter in part.parameters())
    assert own.transformer - own.fixed + own.others == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_block_saves_at_most_what_is_said(dtype: str, adapters: bool) -> None:
    """Counted by autograd's own hooks on a block that attends twice, at two numbers of rows.

    What grows with the rows is activations; the rest are weights that autocast has cast.
    """
    torch.manual_seed(0)
    sizes = {**_SD35_MEDIUM, "num_attention_heads": 4, "caption_projection_dim": 256}
    sizes |= {"joint_attention_dim": 64, "pooled_projection_dim": 64, "pos_embed_max_size": 16}
    saved = {}
    for layers in (2, 3):
        model = diffusers.SD3Transformer2DModel(**{**sizes, "num_layers": layers})
        if adapters:
            from gcore_diffusion.pipelines import add_adapter

            add_adapter(model, LoraSettings(rank=4))
        for rows in (1, 2):
            saved[layers, rows] = _saved(model, rows, dtype)
    of_block = [saved[3, rows] - saved[2, rows] for rows in (1, 2)]
    tokens = (16 // 2) ** 2 + 20
    measured = (of_block[1] - of_block[0]) / tokens / 256
    assert SAVED_BY_BLOCK[dtype] / 2 < measured <= SAVED_BY_BLOCK[dtype]


def _saved(model: Any, rows: int, dtype: str) -> int:
    """Returns the bytes that a backward pass would read, without the model's own weights."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    bf16 = dtype == "bfloat16"
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        model(
            hidden_states=torch.randn(rows, 16, 16, 16),
            timestep=torch.zeros(rows),
            encoder_hidden_states=torch.randn(rows, 20, 64),
            pooled_projections=torch.randn(rows, 64),
        )
    return sum(storage.nbytes() for storage in storages.values())


def held(needs: Any, phase: str) -> dict[str, MemoryNeed]:
    return {need.what: need for need in needs if need.phase == phase}


def test_adapters_need_no_moments_of_the_whole_and_no_second_model() -> None:
    worker = WorkerShape(role="policy", model={"path": "black-forest-labs/FLUX.1-dev"})
    whole = held(trainer_memory(DiffusionTrainerConfig(), worker), "training")
    lora = LoraSettings(rank=32)
    less = held(trainer_memory(DiffusionTrainerConfig(lora=lora), worker), "training")
    parameters = PUBLISHED["black-forest-labs/FLUX.1-dev"].transformer
    assert whole["optimizer"].nbytes == 8 * parameters
    assert whole["reference"].nbytes == 4 * parameters
    assert "reference" not in less
    assert (less["optimizer"].nbytes or 0) < (whole["optimizer"].nbytes or 0) / 50


def test_guidance_doubles_the_rows_of_sd3_and_not_of_flux() -> None:
    for name, ratio in zip(PUBLISHED, (2, 1), strict=True):
        worker = WorkerShape(role="rollout", model={"path": name})
        once, twice = (
            held(generator_memory(DiffusionGeneratorConfig(guidance=w), worker), "rollout")
            for w in (1.0, 4.0)
        )
        assert twice["activations"].nbytes == ratio * (once["activations"].nbytes or 0)


def test_what_is_not_known_is_said_and_never_counted_as_nothing() -> None:
    worker = WorkerShape(role="policy", model={"make": {"path": "digits.py"}})
    needs = list(trainer_memory(DiffusionTrainerConfig(), worker))
    assert all(need.nbytes is None for need in needs)
    assert {need.note for need in needs} == {"the run makes this model first"}
