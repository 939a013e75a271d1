"""Stable Diffusion XL: DDPM with a UNet that predicts the noise and is told sizes.

From Podell et al. 2023, section 2.2, the model card of stabilityai/stable-diffusion-xl-base-1.0 and diffusers'
`pipelines/stable_diffusion_xl/pipeline_stable_diffusion_xl.py`; Ho et al. 2020, equations 4 and 14. Steps are uniform.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from tests.reference.common import Recipe, Update, add_adapter, frozen, pixels_of, read_folder, steps_of
from tests.reference.sd15 import alphas_of, unet_layers


def losses(folder: Path, data: Path, recipe: Recipe) -> list[float]:
    vae = frozen(AutoencoderKL.from_pretrained(folder / "vae"))
    encoder_1 = frozen(CLIPTextModel.from_pretrained(folder / "text_encoder"))
    encoder_2 = frozen(CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2"))
    tokenizer_1 = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer_2 = CLIPTokenizer.from_pretrained(folder / "tokenizer_2")
    unet = frozen(UNet2DConditionModel.from_pretrained(folder / "unet"))
    alphas = alphas_of(folder)

    # pictures to latents
    examples = read_folder(data, recipe.trigger)
    with torch.no_grad():
        latents = [vae.encode(pixels_of(each.file)[None]).latent_dist.mode()[0] for each in examples]
    latents = [z * vae.config.scaling_factor for z in latents]

    # captions to the last but one states of both encoders side by side, and the projected output of the second;
    # a caption without a word is zeros
    @cache
    @torch.no_grad()
    def embed(caption: str) -> tuple[torch.Tensor, torch.Tensor]:
        states = []
        for tokenizer, encoder in ((tokenizer_1, encoder_1), (tokenizer_2, encoder_2)):
            tokens = tokenizer(caption, padding="max_length", max_length=77, truncation=True, return_tensors="pt")
            output = encoder(tokens.input_ids, output_hidden_states=True)
            states.append(output.hidden_states[-2])
        both, pooled = torch.cat(states, dim=-1), output.text_embeds
        return (both, pooled) if caption else (both * 0, pooled * 0)

    # train
    lora = add_adapter(unet_layers(unet, recipe), recipe, torch.Generator().manual_seed(recipe.seed))
    update = Update(lora, recipe)
    found = []
    for shown in steps_of(examples, latents, recipe, density="uniform"):
        step_loss = 0.0
        for each in shown:
            x0, n = latents[each.number], each.noise
            t = int(each.u * len(alphas))
            x_t = alphas[t].sqrt().float() * x0 + (1 - alphas[t]).sqrt().float() * n
            states, pooled = embed(each.caption)
            _, height, width = examples[each.number].size
            sizes = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float32)  # original, crop, target
            predicted = unet(
                x_t[None], torch.tensor([t]), states,
                added_cond_kwargs={"text_embeds": pooled, "time_ids": sizes}, return_dict=False,
            )[0][0]  # fmt: skip
            loss = (predicted - n).square().mean() / recipe.samples_per_step
            loss.backward()
            step_loss += loss.item()
        update()
        found.append(step_loss)
    return found
