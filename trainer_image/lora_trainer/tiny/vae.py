"""The VAE of the tiny models: the real classes at width 8 to 16, trained to show what a picture is of.

Its weights come with the package (`vae.safetensors` with 16 latent channels, `vae4.safetensors` with 4, made by
`pretrain`), so that samples of a demonstration are pictures and not noise, and latents have the statistics that the
families' normalisation expects.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

LATENT_CHANNELS = 16


def vae_file(channels: int) -> Path:
    """The shipped weights of the VAE with so many latent channels, 16 or 4."""
    return Path(__file__).with_name("vae.safetensors" if channels == LATENT_CHANNELS else f"vae{channels}.safetensors")


def build_vae(cls: Any, *, channels: int = LATENT_CHANNELS, pretrained: bool = True) -> Any:
    """A VAE of `cls` (AutoencoderKL or AutoencoderKLFlux2) in eval mode.

    Args:
        cls: The class; what it normalises latents by (scale and shift, or batch-norm statistics) is set to the
            statistics of the shipped weights.
        channels: Of the latents: 16, or 4 as in Stable Diffusion, which scales latents but does not shift them.
        pretrained: False: random weights, and no statistics.
    """
    stored = load_file(vae_file(channels)) if pretrained else {}
    mean = stored.pop("latent_mean", torch.zeros(channels))
    variance = stored.pop("latent_variance", torch.ones(channels))
    options: dict[str, Any] = {}
    if cls.__name__ == "AutoencoderKL":
        centre = mean.mean() if channels == LATENT_CHANNELS else torch.zeros(())
        spread = (variance + (mean - centre) ** 2).mean().sqrt()
        options = {"scaling_factor": round(1 / float(spread), 4), "shift_factor": round(float(centre), 4) or None}
    vae = cls(
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=64,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **options,
    )
    if stored:
        own = {key: value for key, value in vae.state_dict().items() if key.startswith("bn.")}
        vae.load_state_dict({**own, **{key: value.float() for key, value in stored.items()}})
    if hasattr(vae, "bn"):  # four patches of each channel, in the order the pipeline folds them
        vae.bn.running_mean.copy_(mean.repeat_interleave(4))
        vae.bn.running_var.copy_(variance.repeat_interleave(4))
    return vae.eval()
