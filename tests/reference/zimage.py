"""Z-Image: flow matching with a single-stream transformer. Also Z-Image-Turbo, which is trained with a training adapter.

From the model card of Tongyi-MAI/Z-Image and diffusers' `pipelines/z_image/pipeline_z_image.py`; Lipman et al. 2023,
section 4 (path and target); Esser et al. 2024, equation 23 (shift of noise levels).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3Model

from tests.reference.common import Recipe, Update, add_adapter, frozen, named_linears, pixels_of, read_folder, steps_of


def losses(folder: Path, data: Path, recipe: Recipe) -> list[float]:
    vae = frozen(AutoencoderKL.from_pretrained(folder / "vae"))
    text_encoder = frozen(Qwen3Model.from_pretrained(folder / "text_encoder"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    transformer = frozen(ZImageTransformer2DModel.from_pretrained(folder / "transformer"))
    shift = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler").config.shift

    # Turbo: W + B A in place of W, for as long as it is trained
    if recipe.assistant is not None:
        file = load_file(recipe.assistant)
        for key in file:
            if key.endswith(".lora_A.weight"):
                layer = transformer.get_submodule(key.removeprefix("diffusion_model.").removesuffix(".lora_A.weight"))
                layer.weight += file[key.replace("lora_A", "lora_B")] @ file[key]

    # pictures to latents
    examples = read_folder(data, recipe.trigger)
    with torch.no_grad():
        latents = [vae.encode(pixels_of(each.file)[None]).latent_dist.mode()[0] for each in examples]
    latents = [(z - vae.config.shift_factor) * vae.config.scaling_factor for z in latents]

    # captions to the last but one hidden states of their own tokens
    @cache
    def embed(caption: str) -> torch.Tensor:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": caption}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        ids = tokenizer(chat, return_tensors="pt").input_ids
        with torch.no_grad():
            return text_encoder(ids, output_hidden_states=True).hidden_states[-2][0]

    # train
    layers = named_linears(transformer, "layers.")
    update = Update(add_adapter(layers, recipe, torch.Generator().manual_seed(recipe.seed)), recipe)
    found = []
    for shown in steps_of(examples, latents, recipe, density="logit_normal"):
        step_loss = 0.0
        for each in shown:
            x0, n = latents[each.number], each.noise
            sigma = shift * each.u / (1 + (shift - 1) * each.u)
            x_t = (1 - sigma) * x0 + sigma * n
            # the model is told 1 - sigma and points from noise to picture
            output = transformer([x_t[:, None]], (1 - sigma)[None], [embed(each.caption)], return_dict=False)[0][0]
            velocity = -output[:, 0]
            loss = (velocity - (n - x0)).square().mean() / recipe.samples_per_step
            loss.backward()
            step_loss += loss.item()
        update()
        found.append(step_loss)
    return found
