"""Wan 2.1 and Wan 2.2, text to video: flow matching with one transformer, or with one for each range of noise levels.

From Wan Team 2025, sections 4.1 and 4.2, the model cards of Wan-AI/Wan2.1-T2V-14B-Diffusers and
Wan-AI/Wan2.2-T2V-A14B-Diffusers and diffusers' `pipelines/wan/pipeline_wan.py`; Lipman et al. 2023, section 4 (path and
target); Esser et al. 2024, equation 23 (shift of noise levels).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import AutoTokenizer, UMT5EncoderModel

from tests.reference.common import Recipe, Update, add_adapter, frozen, pixels_of, read_folder, steps_of


def losses(folder: Path, data: Path, recipe: Recipe) -> list[float]:
    vae = frozen(AutoencoderKLWan.from_pretrained(folder / "vae"))
    text_encoder = frozen(UMT5EncoderModel.from_pretrained(folder / "text_encoder"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    shift = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())["flow_shift"]
    boundary = json.loads((folder / "model_index.json").read_text()).get("boundary_ratio")
    names = ["transformer"] if boundary is None else ["transformer", "transformer_2"]
    experts = [frozen(WanTransformer3DModel.from_pretrained(folder / name)) for name in names]

    # clips to latents with each channel standardised; a picture is a clip of one frame
    mean, std = (torch.tensor(vae.config[name])[:, None, None, None] for name in ("latents_mean", "latents_std"))
    examples = read_folder(data, recipe.trigger)
    latents = []
    for each in examples:
        pixels = pixels_of(each.file)
        with torch.no_grad():
            z = vae.encode((pixels if pixels.ndim == 4 else pixels[:, None])[None]).latent_dist.mode()[0]
        latents.append((z - mean) / std)

    # captions to the last hidden states of UMT5, followed by zeros up to the full length
    @cache
    def embed(caption: str) -> torch.Tensor:
        length = min(512, tokenizer.model_max_length)
        ids = tokenizer(caption, max_length=length, truncation=True, return_tensors="pt").input_ids
        with torch.no_grad():
            states = text_encoder(ids).last_hidden_state
        return torch.nn.functional.pad(states, (0, 0, 0, length - states.shape[1]))

    # train
    start = torch.Generator().manual_seed(recipe.seed)
    lora = []
    for expert in experts:
        linears = {
            n: m for n, m in expert.named_modules() if isinstance(m, torch.nn.Linear) and n.startswith("blocks.")
        }
        lora += add_adapter(linears, recipe, start)
    update = Update(lora, recipe)
    found = []
    for shown in steps_of(examples, latents, recipe, density="logit_normal"):
        step_loss = 0.0
        for each in shown:
            x0, n = latents[each.number], each.noise
            sigma = shift * each.u / (1 + (shift - 1) * each.u)
            x_t = (1 - sigma) * x0 + sigma * n
            # the first expert is for much noise
            expert = experts[0] if boundary is None or sigma >= boundary else experts[1]
            velocity = expert(x_t[None], 1000 * sigma[None], embed(each.caption), return_dict=False)[0][0]
            loss = (velocity - (n - x0)).square().mean() / recipe.samples_per_step
            loss.backward()
            step_loss += loss.item()
        update()
        found.append(step_loss)
    return found
