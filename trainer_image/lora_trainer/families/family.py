"""A model family: from a folder to a loaded base model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch

from lora_trainer.families.base import BaseModel
from lora_trainer.families.folder import load_part, load_single_files


class Family(ABC):
    """One model family: turns a folder into a `BaseModel`.

    Third parties add one with an entry point in the group `lora_trainer.families` that names their subclass.

    Attributes:
        arch: Values of `model.arch` that this family answers to.
        size_multiple: Pixels that picture sides must be multiples of.
        distilled_advice: What to do where the base model is distilled and has no training adapter; None where it isn't.
        frame_step: Frames that the VAE folds into one after the first; None for families of pictures.
        name: The value of `model.arch` that was asked for.
    """

    arch: ClassVar[tuple[str, ...]]
    size_multiple: ClassVar[int] = 16
    frame_step: ClassVar[int | None] = None
    distilled_advice: ClassVar[str | None] = None

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.arch[0]

    @abstractmethod
    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> BaseModel:
        """The base model in a folder, frozen and in eval mode, on the device; nothing is downloaded.

        Args:
            folder: Folder of a diffusers pipeline.
            dtype: bf16, fp16 or fp32; of denoiser and text encoder.
            device: Where it runs.

        Raises:
            ModelError: The folder does not hold a model of this family.
        """

    def distilled(self, model: BaseModel) -> str | None:
        """What to do instead, when `model` is distilled and would lose that by being trained as it is."""
        del model
        return self.distilled_advice


def load_pipeline(
    cls: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    without: tuple[str, ...] = ("text_encoder",),
    **options: Any,
) -> Any:
    """A diffusers pipeline without its text encoders, on the device: denoiser in `dtype`, VAE in fp32.

    Args:
        cls: Class of the pipeline.
        folder: The model folder.
        dtype: Of all but the VAE.
        device: Where it runs.
        without: Components that are not loaded: the family's `text_parts`, and what training has no use for.
        options: Handed to the pipeline.
    """
    pipe = load_part(
        folder,
        cls,
        "",
        **dict.fromkeys(without),
        dtype={"default": dtype, "vae": torch.float32},
        use_safetensors=True,
        **load_single_files(folder, dtype=dtype),
        **options,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)
