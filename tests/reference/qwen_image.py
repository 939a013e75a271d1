"""Qwen-Image: flow matching with a dual-stream transformer, text from a vision-language model, latents of a video VAE.

From the model card of Qwen/Qwen-Image and diffusers' `pipelines/qwenimage/pipeline_qwenimage.py`; Lipman et al. 2023,
section 4 (path and target). Noise levels are logit-normal and not shifted: the scheduler's shift depends on the size of
the picture and belongs to drawing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from tests.reference.common import Recipe, Update, add_adapter, frozen, named_linears, pixels_of, read_folder, steps_of

BEFORE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n"
TOKENS_BEFORE = 34  # what is cut off: BEFORE, in tokens of the real model


def losses(folder: Path, data: Path, recipe: Recipe) -> list[float]:
    vae = frozen(AutoencoderKLQwenImage.from_pretrained(folder / "vae"))
    text_encoder = frozen(Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    transformer = frozen(QwenImageTransformer2DModel.from_pretrained(folder / "transformer"))

    # pictures, as clips of one frame, to latents with each channel standardised
    mean, std = (torch.tensor(vae.config[name])[:, None, None] for name in ("latents_mean", "latents_std"))
    examples = read_folder(data, recipe.trigger)
    with torch.no_grad():
        latents = [vae.encode(pixels_of(each.file)[None, :, None]).latent_dist.mode()[0, :, 0] for each in examples]
    latents = [(z - mean) / std for z in latents]

    # captions to the last hidden states after the instruction
    @cache
    def embed(caption: str) -> torch.Tensor:
        ids = tokenizer(BEFORE + caption + AFTER, return_tensors="pt").input_ids
        with torch.no_grad():
            hidden = text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        return hidden[:, TOKENS_BEFORE:]

    # train: not the modulations, and not what the last block does to its text, which nobody reads
    last = f"transformer_blocks.{transformer.config.num_layers - 1}."
    unread = tuple(last + name for name in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp."))
    layers = named_linears(transformer, "transformer_blocks.")
    layers = {n: m for n, m in layers.items() if "_mod." not in n and not n.startswith(unread)}
    update = Update(add_adapter(layers, recipe, torch.Generator().manual_seed(recipe.seed)), recipe)
    found = []
    for shown in steps_of(examples, latents, recipe, density="logit_normal"):
        step_loss = 0.0
        for each in shown:
            x0, n, sigma = latents[each.number], each.noise, each.u
            x_t = (1 - sigma) * x0 + sigma * n
            _, height, width = x_t.shape
            text = embed(each.caption)
            # a token is 2 x 2 latents, all four of the first channel first
            tokens = torch.stack([x_t[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], dim=1).flatten(0, 1)
            output = transformer(
                hidden_states=tokens.flatten(1).T[None],
                timestep=sigma[None],
                encoder_hidden_states=text,
                encoder_hidden_states_mask=torch.ones(text.shape[:2], dtype=torch.long),
                img_shapes=[[(1, height // 2, width // 2)]],
                return_dict=False,
            )[0]
            velocity = torch.nn.functional.pixel_shuffle(output[0].T.reshape(-1, height // 2, width // 2), 2)
            loss = (velocity - (n - x0)).square().mean() / recipe.samples_per_step
            loss.backward()
            step_loss += loss.item()
        update()
        found.append(step_loss)
    return found
