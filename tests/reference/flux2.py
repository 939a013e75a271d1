"""FLUX.2: what Klein and dev share. Flow matching with a transformer of double and single streams.

From the model cards of black-forest-labs/FLUX.2-klein-base-4B and FLUX.2-dev, diffusers' `pipelines/flux2`; Lipman et
al. 2023, section 4 (path and target). Noise levels are logit-normal and not shifted: the scheduler's shift depends on the
size of the picture and belongs to drawing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel

from tests.reference.common import Recipe, Update, add_adapter, frozen, named_linears, pixels_of, read_folder, steps_of


def losses(
    folder: Path, data: Path, recipe: Recipe, embed: Callable[[str], torch.Tensor], guidance: torch.Tensor | None
) -> list[float]:
    vae = frozen(AutoencoderKLFlux2.from_pretrained(folder / "vae"))
    transformer = frozen(Flux2Transformer2DModel.from_pretrained(folder / "transformer"))

    # pictures to latents: 2 x 2 neighbours become channels, which the VAE's batch norm standardises
    mean = vae.bn.running_mean[:, None, None]
    std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()[:, None, None]
    examples = read_folder(data, recipe.trigger)
    latents = []
    for each in examples:
        with torch.no_grad():
            z = vae.encode(pixels_of(each.file)[None]).latent_dist.mode()[0]
        folded = torch.stack([z[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], dim=1).flatten(0, 1)
        latents.append((folded - mean) / std)

    # train
    blocks = named_linears(transformer, "transformer_blocks.", "single_transformer_blocks.")
    update = Update(add_adapter(blocks, recipe, torch.Generator().manual_seed(recipe.seed)), recipe)
    found = []
    for shown in steps_of(examples, latents, recipe, density="logit_normal"):
        step_loss = 0.0
        for each in shown:
            x0, n, sigma = latents[each.number], each.noise, each.u
            x_t = (1 - sigma) * x0 + sigma * n
            channels, height, width = x_t.shape
            text = embed(each.caption)[None]
            # positions are (time, row, column, place in the text)
            picture_ids = torch.tensor([[0, row, column, 0] for row in range(height) for column in range(width)])
            text_ids = torch.tensor([[0, 0, 0, place] for place in range(text.shape[1])])
            output = transformer(
                hidden_states=x_t.reshape(channels, -1).T[None],
                timestep=sigma[None],
                guidance=guidance,
                encoder_hidden_states=text,
                txt_ids=text_ids[None],
                img_ids=picture_ids[None],
                return_dict=False,
            )[0]
            velocity = output[0].T.reshape(channels, height, width)
            loss = (velocity - (n - x0)).square().mean() / recipe.samples_per_step
            loss.backward()
            step_loss += loss.item()
        update()
        found.append(step_loss)
    return found
