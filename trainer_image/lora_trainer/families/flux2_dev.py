"""FLUX.2 dev: the wiring of FLUX.2 Klein with another text encoder, and guidance distilled into the denoiser.

- Text: hidden states 10, 20 and 30 of Mistral Small 3 side by side, always padded to 512 tokens, padding attended to.
- Denoiser: as Klein's, with the guidance scale as an input. Training asks at scale 1: what is learned is the velocity
  of the data, which is what the model says without guidance.
- Guidance in samples: the scale is that input; there is no negative prompt.

References:
    diffusers 0.42: `pipelines/flux2/pipeline_flux2.py`, `examples/dreambooth/train_dreambooth_lora_flux2.py`.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_trainer.families.base import Conditioning
from lora_trainer.families.family import Family, load_pipeline
from lora_trainer.families.flux2 import Flux2KleinModel
from lora_trainer.families.folder import Layout, ModelError, check_folder

LAYOUT = Layout(pipelines=("Flux2Pipeline",))
TRAINING_GUIDANCE = 1.0


class Flux2DevModel(Flux2KleinModel):
    """A loaded FLUX.2 dev."""

    @cached_property
    def text_tokens(self) -> int:
        """See `BaseModel.text_tokens`; this pipeline's tokenizer is a processor around one."""
        return min(self.max_text_tokens, int(self.pipe.tokenizer.tokenizer.model_max_length))

    def _guidance(self, count: int) -> Tensor | None:
        return torch.full((count,), TRAINING_GUIDANCE, device=self.device, dtype=torch.float32)

    def _draw_latents(self, embeds: Conditioning, negative: Conditioning | None, **options: Any) -> Tensor:
        del negative  # guidance is distilled into the denoiser
        x_BSC = self.pipe(prompt_embeds=embeds["embeds"], **options).images
        side = 2 * self.pipe.vae_scale_factor  # pixels of a token
        return x_BSC.permute(0, 2, 1).reshape(1, -1, options["height"] // side, options["width"] // side)  # type: ignore[no-any-return]


class Flux2Dev(Family):
    """FLUX.2 dev."""

    arch = ("flux2_dev",)

    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> Flux2DevModel:
        """See `Family.load`."""
        from diffusers import Flux2Pipeline

        check_folder(folder, self.name, LAYOUT)
        pipe = load_pipeline(Flux2Pipeline, folder, dtype=dtype, device=device)
        if not pipe.transformer.config.guidance_embeds:
            raise ModelError(
                f"model folder {folder}: found a denoiser without guidance embedding, expected one ({self.name})"
            )
        return Flux2DevModel(pipe, folder, dtype=dtype, device=device)
