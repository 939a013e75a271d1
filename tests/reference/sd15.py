"""Stable Diffusion 1.5: DDPM with a UNet that predicts the noise; its text encoder can be trained too.

From the model card of stable-diffusion-v1-5/stable-diffusion-v1-5 and diffusers'
`pipelines/stable_diffusion/pipeline_stable_diffusion.py`; Ho et al. 2020, equations 4 and 14. Steps are uniform.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer

from tests.reference.common import Recipe, Update, add_adapter, frozen, pixels_of, read_folder, steps_of

CONVOLUTIONS = ("conv1", "conv2", "conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv", "proj_in", "proj_out")


def alphas_of(folder: Path) -> torch.Tensor:
    """Cumulative products of 1 - beta; the square roots of beta rise linearly ("scaled linear")."""
    config = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    assert config["beta_schedule"] == "scaled_linear"
    assert config["prediction_type"] == "epsilon"
    first, last = config["beta_start"] ** 0.5, config["beta_end"] ** 0.5
    betas = torch.linspace(first, last, config["num_train_timesteps"], dtype=torch.float64) ** 2
    return (1 - betas).cumprod(0)


def unet_layers(unet: torch.nn.Module, recipe: Recipe) -> dict[str, torch.nn.Module]:
    """The linear layers of attention blocks, and convolutions when they are asked for."""
    layers = {n: m for n, m in unet.named_modules() if isinstance(m, torch.nn.Linear) and ".attentions." in n}
    if recipe.conv:
        layers |= {n: m for n, m in unet.named_modules() if isinstance(m, torch.nn.Conv2d) and n.endswith(CONVOLUTIONS)}
    return layers


def losses(folder: Path, data: Path, recipe: Recipe) -> list[float]:
    vae = frozen(AutoencoderKL.from_pretrained(folder / "vae"))
    text_encoder = frozen(CLIPTextModel.from_pretrained(folder / "text_encoder"))
    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    unet = frozen(UNet2DConditionModel.from_pretrained(folder / "unet"))
    alphas = alphas_of(folder)

    # pictures to latents
    examples = read_folder(data, recipe.trigger)
    with torch.no_grad():
        latents = [vae.encode(pixels_of(each.file)[None]).latent_dist.mode()[0] for each in examples]
    latents = [z * vae.config.scaling_factor for z in latents]

    # captions to the last hidden states of CLIP, always 77 tokens
    def embed(caption: str) -> torch.Tensor:
        ids = tokenizer(caption, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        return text_encoder(ids).last_hidden_state

    # train
    start = torch.Generator().manual_seed(recipe.seed)
    lora = add_adapter(unet_layers(unet, recipe), recipe, start)
    if recipe.train_text_encoder:
        ends = ("q_proj", "k_proj", "v_proj", "out_proj")
        lora += add_adapter({n: m for n, m in text_encoder.named_modules() if n.endswith(ends)}, recipe, start)
    update = Update(lora, recipe)
    found = []
    for shown in steps_of(examples, latents, recipe, density="uniform"):
        step_loss = 0.0
        for each in shown:
            x0, n = latents[each.number], each.noise
            t = int(each.u * len(alphas))
            x_t = alphas[t].sqrt().float() * x0 + (1 - alphas[t]).sqrt().float() * n
            predicted = unet(x_t[None], torch.tensor([t]), embed(each.caption), return_dict=False)[0][0]
            loss = (predicted - n).square().mean() / recipe.samples_per_step
            loss.backward()
            step_loss += loss.item()
        update()
        found.append(step_loss)
    return found
