"""Tiny models of families whose text encoder is a whole vision-language model."""

from __future__ import annotations

from typing import Any

from lora_trainer.tiny.tokenizer import build_tokenizer
from lora_trainer.tiny.vae import LATENT_CHANNELS, build_vae
from lora_trainer.tiny.wan import build_video_vae

MISTRAL_TEXT_LAYERS = 31  # the pipeline reads hidden states 10, 20 and 30
INSTRUCTION_TOKENS = 192  # the small vocabulary needs more tokens for the text that both pipelines put before a caption

MISTRAL_TEMPLATE = (
    "{% for message in messages %}{{ '[SYSTEM_PROMPT]' if message['role'] == 'system' else '[INST]' }}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
    "{{ '[/SYSTEM_PROMPT]' if message['role'] == 'system' else '[/INST]' }}{% endfor %}"
)


def build_qwen_image() -> Any:
    """A `QwenImagePipeline`."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer, width = build_tokenizer(max_tokens=64 + INSTRUCTION_TOKENS), 32
    text = _text_config(len(tokenizer), width, layers=2)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": width,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=1.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            max_image_seq_len=8192,
            shift_terminal=0.02,
            time_shift_type="exponential",
        ),
        vae=build_video_vae(AutoencoderKLQwenImage),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4 * LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=width,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def build_flux2_dev() -> Any:
    """A `Flux2Pipeline`."""
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Pipeline, Flux2Transformer2DModel
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    processor, width = _pixtral_processor(), 16
    text = _text_config(len(processor.tokenizer), width, MISTRAL_TEXT_LAYERS) | {"model_type": "mistral"}
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    config = Mistral3Config(text_config=text, vision_config=vision)
    return Flux2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, time_shift_type="exponential"
        ),
        vae=build_vae(AutoencoderKLFlux2),
        text_encoder=Mistral3ForConditionalGeneration(config).eval(),
        tokenizer=processor,
        transformer=Flux2Transformer2DModel(
            patch_size=1,
            in_channels=4 * LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=3 * width,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=True,
        ),
    )


def _pixtral_processor() -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    tokenizer = build_tokenizer(max_tokens=64 + INSTRUCTION_TOKENS)
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
                *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
            ]
        }
    )
    tokenizer.padding_side = "left"
    tokenizer.chat_template = None
    return PixtralProcessor(
        image_processor=PixtralImageProcessor(), tokenizer=tokenizer, patch_size=8, chat_template=MISTRAL_TEMPLATE
    )


def _text_config(vocabulary: int, width: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": width // 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
