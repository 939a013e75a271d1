"""The VAE of the tiny models: the real classes at width 8 to 16, trained to show what a picture is of.

Its weights come with the package (`vae.safetensors`, made by `pretrain`), so that samples of a demonstration are
pictures and not noise, and latents have the statistics that the families' normalisation expects.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

LATENT_CHANNELS = 16
VAE_FILE = Path(__file__).with_name("vae.safetensors")


def build_vae(cls: Any, *, pretrained: bool = True) -> Any:
    """A VAE of `cls` (AutoencoderKL or AutoencoderKLFlux2) in eval mode.

    Args:
        cls: The class; what it normalises latents by (scale and shift, or batch-norm statistics) is set to the
            statistics of the shipped weights.
        pretrained: False: random weights, and no statistics.
    """
    stored = load_file(VAE_FILE) if pretrained else {}
    mean = stored.pop("latent_mean", torch.zeros(LATENT_CHANNELS))
    variance = stored.pop("latent_variance", torch.ones(LATENT_CHANNELS))
    options: dict[str, Any] = {}
    if cls.__name__ == "AutoencoderKL":
        spread = (variance + (mean - mean.mean()) ** 2).mean().sqrt()
        options = {"scaling_factor": round(1 / float(spread), 4), "shift_factor": round(float(mean.mean()), 4)}
    vae = cls(
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=LATENT_CHANNELS,
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
