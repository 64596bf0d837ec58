"""Four pipelines of diffusers and a CLIP with tiny random weights, made from configs alone.

They are saved as a user would find the originals. Their images have 32 x 32 pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

_CORPUS = [
    "a red circle on a white background",
    "a blue square",
    "two green triangles",
    "a photo of a cat",
]


#: Side of the images, in pixels.
SIDE = 32


def save(name: str, directory: Path) -> None:
    """Writes a pipeline; name: one of ``MAKERS``."""
    torch.manual_seed(0)
    MAKERS[name]().save_pretrained(directory)


def save_clip(directory: Path) -> None:
    """Writes a CLIP with its tokenizer and image processor."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2}
    text = {**_clip().to_dict(), "projection_dim": 16}
    vision = {**sizes, "num_attention_heads": 4, "image_size": SIDE, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    CLIPModel(config).save_pretrained(directory)
    _tokenizer(77).save_pretrained(directory)
    side = {"height": SIDE, "width": SIDE}
    CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=side).save_pretrained(directory)


def _tokenizer(longest: int) -> PreTrainedTokenizerFast:
    """Byte pairs learned from four sentences."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=longest,
    )


def _clip() -> CLIPTextConfig:
    return CLIPTextConfig(
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        hidden_size=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=1000,
        projection_dim=32,
        max_position_embeddings=77,
    )


def _t5() -> T5EncoderModel:
    config = T5Config(
        vocab_size=1000,
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return T5EncoderModel(config)


def _vae() -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        sample_size=32,
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )


def _sd3() -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(),
        text_encoder=CLIPTextModelWithProjection(_clip()),
        text_encoder_2=CLIPTextModelWithProjection(_clip()),
        text_encoder_3=_t5(),
        tokenizer=_tokenizer(77),
        tokenizer_2=_tokenizer(77),
        tokenizer_3=_tokenizer(77),
    )


def _flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=True,
    )
    return diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(),
        text_encoder=CLIPTextModel(_clip()),
        text_encoder_2=_t5(),
        tokenizer=_tokenizer(77),
        tokenizer_2=_tokenizer(77),
    )


def _sana() -> Any:
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=32,
    )
    blocks = {
        "block_types": ("ResBlock", "EfficientViTBlock"),
        "block_out_channels": (8, 8),
        "layers_per_block": (1, 1),
    }
    coders = {
        f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in blocks.items()
    }
    vae = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
        **coders,
    )
    config = Gemma2Config(
        head_dim=16,
        hidden_size=8,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=1,
        num_key_value_heads=2,
        vocab_size=1000,
        attn_implementation="eager",
        pad_token_id=0,
    )
    return diffusers.SanaPipeline(
        tokenizer=_tokenizer(64),
        text_encoder=Gemma2Model(config),
        vae=vae,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def _qwen() -> Any:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": rope,
        "rope_theta": 1e6,
        "vocab_size": 1000,
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
    }
    return diffusers.QwenImagePipeline(
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        text_encoder=Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        ),
        tokenizer=_tokenizer(1024),
    )


MAKERS: dict[str, Callable[[], Any]] = {"sd3": _sd3, "flux": _flux, "sana": _sana, "qwen": _qwen}
#: Class of a pipeline -> name in ``MAKERS``.
CLASSES = {
    "StableDiffusion3Pipeline": "sd3",
    "FluxPipeline": "flux",
    "SanaPipeline": "sana",
    "QwenImagePipeline": "qwen",
}
