"""FLUX.1: flow matching with a transformer of double and single streams.

From the model card of black-forest-labs/FLUX.1-dev and diffusers' `pipelines/flux/pipeline_flux.py`; Lipman et al. 2023,
section 4 (path and target). Noise levels are logit-normal and not shifted: the scheduler's shift depends on the size of
the picture and belongs to drawing. The guidance that is trained at is 1: the data as they are.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from tests.reference.common import Recipe, Update, add_adapter, frozen, named_linears, pixels_of, read_folder, steps_of


def losses(folder: Path, data: Path, recipe: Recipe) -> list[float]:
    vae = frozen(AutoencoderKL.from_pretrained(folder / "vae"))
    clip = frozen(CLIPTextModel.from_pretrained(folder / "text_encoder"))
    clip_tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    t5 = frozen(T5EncoderModel.from_pretrained(folder / "text_encoder_2"))
    t5_tokenizer = T5Tokenizer.from_pretrained(folder / "tokenizer_2")
    transformer = frozen(FluxTransformer2DModel.from_pretrained(folder / "transformer"))

    # pictures to latents
    examples = read_folder(data, recipe.trigger)
    with torch.no_grad():
        latents = [vae.encode(pixels_of(each.file)[None]).latent_dist.mode()[0] for each in examples]
    latents = [(z - vae.config.shift_factor) * vae.config.scaling_factor for z in latents]

    # captions to the states of T5, padding among them and no mask, and the pooled output of CLIP
    @cache
    @torch.no_grad()
    def embed(caption: str) -> tuple[torch.Tensor, torch.Tensor]:
        length = min(512, t5_tokenizer.model_max_length)
        ids = t5_tokenizer(
            caption, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        short = clip_tokenizer(caption, padding="max_length", max_length=77, truncation=True, return_tensors="pt")
        return t5(ids).last_hidden_state, clip(short.input_ids).pooler_output

    # train
    blocks = named_linears(transformer, "transformer_blocks.", "single_transformer_blocks.")
    update = Update(add_adapter(blocks, recipe, torch.Generator().manual_seed(recipe.seed)), recipe)
    found = []
    for shown in steps_of(examples, latents, recipe, density="logit_normal"):
        step_loss = 0.0
        for each in shown:
            x0, n, sigma = latents[each.number], each.noise, each.u
            x_t = (1 - sigma) * x0 + sigma * n
            _, height, width = x_t.shape
            states, pooled = embed(each.caption)
            # a token is 2 x 2 latents, all four of the first channel first; positions are (0, row, column)
            tokens = torch.stack([x_t[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], dim=1).flatten(0, 1)
            ids = [[0.0, row, column] for row in range(height // 2) for column in range(width // 2)]
            output = transformer(
                hidden_states=tokens.flatten(1).T[None],
                timestep=sigma[None],
                guidance=torch.tensor([1.0]),
                pooled_projections=pooled,
                encoder_hidden_states=states,
                txt_ids=torch.zeros(states.shape[1], 3),
                img_ids=torch.tensor(ids),
                return_dict=False,
            )[0]
            velocity = torch.nn.functional.pixel_shuffle(output[0].T.reshape(-1, height // 2, width // 2), 2)
            loss = (velocity - (n - x0)).square().mean() / recipe.samples_per_step
            loss.backward()
            step_loss += loss.item()
        update()
        found.append(step_loss)
    return found
