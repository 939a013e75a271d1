"""Trains the VAEs of the tiny models once; their weights are shipped beside this file.

    python -m lora_trainer.tiny.pretrain 16
    python -m lora_trainer.tiny.pretrain 4

The pictures are computed: clouds of 1/f noise with correlated colours, gradients and sharp-edged shapes. That is close
enough to photographs for a factor-8 autoencoder of 70 thousand parameters to show what a sample is a picture of.

References:
    Ruderman 1994, "The statistics of natural images" (the 1/f amplitude spectrum).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_trainer.tiny.vae import build_vae, vae_file

logger = logging.getLogger(__name__)

STEPS = 1500
BATCH = 12
SIDE = 64


def synthetic_pictures(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Pictures (count, 3, side, side) in [-1, 1]."""
    pictures = _clouds(count, side, generator)
    grid_1S = torch.linspace(-1, 1, side)
    for index in range(count):
        slope = torch.randn(3, 2, generator=generator) * 0.4
        pictures[index] += slope[:, :1, None] * grid_1S + slope[:, 1:, None] * grid_1S[:, None]
        for _ in range(int(torch.randint(0, 5, (1,), generator=generator))):
            _paint_shape(pictures[index], grid_1S, generator)
    return pictures.clamp(-1, 1)


def _clouds(count: int, side: int, generator: torch.Generator) -> Tensor:
    frequency = (torch.fft.fftfreq(side)[:, None] ** 2 + torch.fft.rfftfreq(side)[None] ** 2).sqrt()
    frequency[0, 0] = 1 / side
    power = 1.0 + torch.rand(count, 1, 1, 1, generator=generator)  # from rough to smooth
    white = torch.randn(count, 3, side, side, generator=generator)
    shaped = torch.fft.irfft2(torch.fft.rfft2(white) / frequency**power, s=(side, side))
    shaped = shaped / shaped.flatten(1).std(1).view(-1, 1, 1, 1)
    grey = shaped.mean(1, keepdim=True) * 1.7
    level = torch.randn(count, 3, 1, 1, generator=generator) * 0.45
    strength = 0.15 + 0.45 * torch.rand(count, 1, 1, 1, generator=generator)
    result: Tensor = level + strength * (0.65 * grey + 0.75 * shaped)
    return result


def _paint_shape(picture: Tensor, grid_1S: Tensor, generator: torch.Generator) -> None:
    x, y, wide, high, kind, turn = torch.rand(6, generator=generator).tolist()
    along = grid_1S[None] - (2 * x - 1)
    down = grid_1S[:, None] - (2 * y - 1)
    along, down = along + (turn - 0.5) * down, down - (turn - 0.5) * along
    along, down = along / (0.1 + 0.7 * wide), down / (0.1 + 0.7 * high)
    inside = (along**2 + down**2 < 1) if kind < 0.5 else ((along.abs() < 1) & (down.abs() < 1))
    colour = torch.rand(3, generator=generator) * 2 - 1
    picture[:, inside] = 0.85 * colour[:, None] + 0.15 * picture[:, inside]


def train_vae(channels: int, steps: int = STEPS, seed: int = 0) -> nn.Module:
    """The trained VAE with so many latent channels; a few minutes on one core."""
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    vae: nn.Module = build_vae(AutoencoderKL, channels=channels, pretrained=False).train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=4e-3, weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        pictures = synthetic_pictures(BATCH, SIDE, generator)
        posterior = vae.encode(pictures).latent_dist  # type: ignore[operator]
        again = vae.decode(posterior.sample(generator)).sample  # type: ignore[operator]
        difference = again - pictures
        loss = difference.abs().mean() + difference.pow(2).mean()
        loss = loss + 4 * nn.functional.avg_pool2d(difference, 8).pow(2).mean()  # colours of surfaces before edges
        loss = loss + 1e-4 * posterior.kl().mean() / posterior.mean[0].numel()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            logger.info("step %d loss %.4f", step + 1, loss.item())
    return vae.eval()


@torch.no_grad()
def save_vae(vae: nn.Module, path: Path) -> None:
    """Writes the weights in fp16, with mean and variance of each latent channel."""
    pictures = synthetic_pictures(256, SIDE, torch.Generator().manual_seed(1))
    latents = torch.cat([vae.encode(part).latent_dist.mode() for part in torch.tensor_split(pictures, 16)])  # type: ignore[operator]
    tensors = {key: value.half().contiguous() for key, value in vae.state_dict().items()}
    tensors["latent_mean"] = latents.mean((0, 2, 3))
    tensors["latent_variance"] = latents.var((0, 2, 3))
    save_file(tensors, path)
    path.chmod(0o644)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    for argument in sys.argv[1:]:
        save_vae(train_vae(int(argument)), vae_file(int(argument)))
