"""What every family offers to the trainer.

Families differ in how pixels become latents, how captions become conditions, how latents are corrupted, what the
denoiser predicts from them, and how it wants to be asked; `BaseModel` hides all of it. What several families share lies
beside this module: `flow` (flow matching), `unet` (DDPM with a UNet).

Shapes: B batch, C latent channels, h and w latent height and width, H and W pixels, L text tokens, D text width. Families
that make videos have F frames behind the channels: (B, 3, F, H, W) pixels and (B, C, f, h, w) latents.

References:
    `tests/trainer/test_wiring.py` and `test_wiring_classic.py` compare every family with what its diffusers pipeline
    computes.
"""

from __future__ import annotations

import contextlib
import gc
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from PIL import Image
from torch import Tensor, nn

from lora_trainer.families.evaluating import evaluating
from lora_trainer.families.folder import content_identity, load_part
from lora_trainer.families.noising import Noising
from lora_trainer.families.original import Original
from lora_trainer.families.parts import CLIP_LEAD, Part
from lora_trainer.memory.quantised import Format, quantise_blocks

if TYPE_CHECKING:
    from lora_trainer.networks.assistant import Assistant

Conditioning: TypeAlias = dict[str, Any]
"""A batch of conditions on the device, as `collate` built it; only the family that built it looks inside."""


@dataclass(frozen=True)
class Corrupted:
    """Latents with noise in them, and what the denoiser is asked for."""

    x_t: Tensor  # (B, C, h, w)
    time: Tensor  # (B,) sigma in (0, 1), or a whole step: what the family's `predict` takes
    target: Tensor  # (B, C, h, w)


class BaseModel(Noising, ABC):
    """A loaded base model: every weight frozen, in eval mode, encoders loaded when they are needed.

    Attributes:
        pipe: The diffusers pipeline around the components; its text encoder is None while it is not loaded.
        denoiser: The network that adapters are added to.
        assistant: A training adapter that is part of the denoiser's weights, but not of samples.
        forward_module: What `predict` calls: the denoiser, or a wrapper that the loop put around it (DDP).
        text_format: Quantised format of text encoders that are loaded from now on; None: `dtype`.
        trained_text: Components among `trainable_text_parts` that hold an adapter.
        folder: The model folder.
        dtype: Number format of denoiser and text encoder. The VAE is always fp32: it is small, and bf16 pictures band.
        device: Where everything runs.
    """

    makes_clips: ClassVar[bool] = False

    recipe: ClassVar[str] = "1"
    """Version of the family's encoding formulas; raise it when encode_pixels or encode_text change what they return."""

    max_text_tokens: ClassVar[int] = 512

    export_parts: ClassVar[dict[str, str]] = {"": "transformer"}
    """Adapter files by the ending of their name, with the pipeline component of the denoiser that each is for. More than
    one: the denoiser is a container with one child of that name for each."""

    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder",)
    """Components that encode captions."""

    trainable_text_parts: ClassVar[tuple[str, ...]] = ()
    """Those of them for which the pipeline's loader takes adapters. A family that names any writes `_embed_trained`."""

    def __init__(self, pipe: Any, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self.pipe = pipe
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.denoiser: nn.Module = getattr(pipe, next(iter(self.export_parts.values())))
        self.forward_module: nn.Module = self.denoiser
        self.assistant: Assistant | None = None
        self.trained_text: tuple[str, ...] = ()
        self.text_format: Format | None = None
        for module in (self.denoiser, pipe.vae):
            module.requires_grad_(requires_grad=False).eval()

    # ------------------------------------------------------------------ what a family writes
    @abstractmethod
    def normalise(self, z_BChw: Tensor) -> Tensor:
        """Latents as the denoiser knows them, (B, C, h, w), from what the VAE encoder returned."""

    @abstractmethod
    def denormalise(self, x_BChw: Tensor) -> Tensor:
        """What the VAE decoder takes: the inverse of `normalise`."""

    @abstractmethod
    def corrupt(self, x0_BChw: Tensor, noise_BChw: Tensor, u_B: Tensor) -> Corrupted:
        """Noisy latents, their times, and the target that `predict` is trained towards.

        Args:
            x0_BChw: Normalised latents, fp32.
            noise_BChw: Standard normal noise.
            u_B: In (0, 1), drawn from `density` or what the configuration chose: where between picture and noise.
        """

    @abstractmethod
    def predict(self, x_t_BChw: Tensor, time_B: Tensor, conditioning: Conditioning) -> Tensor:
        """The model's prediction of the target at `x_t`, fp32, shaped like `x_t`.

        Args:
            x_t_BChw: Noisy normalised latents, any float format.
            time_B: As in `Corrupted`.
            conditioning: What `collate` returned, for B captions.
        """

    @abstractmethod
    def default_targets(self) -> list[str]:
        """Full dotted names, inside the denoiser, of the layers that adapters change unless told otherwise."""

    def original_layer(self, layer: str) -> Original:
        """Where a layer of a denoiser lies in the model as it was first published; by default the names agree.

        Args:
            layer: Its name inside its component.
        """
        return Original(layer)

    def comfyui_layer(self, layer: str) -> Original:
        """The same as ComfyUI's adapter files name it."""
        return self.original_layer(layer)

    @abstractmethod
    def _embed_caption(self, caption: str) -> dict[str, Tensor]:
        """The condition of one caption, without batch dimension; the text encoder is loaded."""

    def _embed_trained(self, captions: list[str]) -> Conditioning:
        """The entries of the conditioning that `trainable_text_parts` compute, for a batch, with gradients."""
        raise NotImplementedError(f"{type(self).__name__} names trainable text encoders, but does not embed with them")

    @abstractmethod
    def _draw_latents(self, embeds: Conditioning, negative: Conditioning | None, **options: Any) -> Tensor:
        """Denoised latents (1, C, h, w), normalised, from the real pipeline called with `options`."""

    def collate(self, conditions: list[dict[str, Tensor]]) -> Conditioning:
        """A batch of what `encode_text` returned, on the device, in the denoiser's number format."""
        return {
            name: torch.stack([each[name] for each in conditions]).to(self.device, self.dtype) for name in conditions[0]
        }

    def text_targets(self, part: str) -> list[str]:
        """Names, inside a text encoder, of the layers that adapters change: the attention projections."""
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        modules = self.text_encoder(part).named_modules()
        return [n for n, m in modules if isinstance(m, nn.Linear) and n.rpartition(".")[2] in names]

    # ------------------------------------------------------------------ encoding
    def _vae_pixels(self, pixels: Tensor) -> Tensor:
        """The pixels as the VAE takes them: as they are, where it is one for pictures."""
        return pixels

    @torch.no_grad()
    def encode_pixels(self, pixels_1CHW: Tensor) -> Tensor:
        """Normalised latents (C, h, w) of one picture: fp32, on the CPU, the same at every call.

        The mode of the posterior is taken, not a sample, and one picture at a time: convolutions of a batch differ in
        their last bits, and the bytes of a cache must not depend on what was encoded together.

        Args:
            pixels_1CHW: One RGB picture (1, 3, H, W) in [-1, 1]; H and W multiples of the family's `size_multiple`. Or a
                clip (1, 3, F, H, W), for a family with a `frame_step`.
        """
        assert pixels_1CHW.ndim in (4, 5), f"one picture (1, 3, H, W), not {tuple(pixels_1CHW.shape)}"
        assert len(pixels_1CHW) == 1, f"one picture (1, 3, H, W), not {tuple(pixels_1CHW.shape)}"
        vae = self._vae_with_encoder()
        with self._without_autocast():
            z_BChw = vae.encode(self._vae_pixels(pixels_1CHW.to(self.device, torch.float32))).latent_dist.mode()
            return self.normalise(z_BChw)[0].float().cpu().contiguous()

    @torch.no_grad()
    def encode_text(self, caption: str) -> dict[str, Tensor]:
        """The condition of one caption: named tensors without batch dimension, on the CPU, in the encoder's format.

        Loads the text encoders when they are not in memory; `free_encoders` lets them go again.
        """
        for part in self.text_parts:
            self.text_encoder(part)
        with self._without_autocast():
            return {name: tensor.cpu().contiguous() for name, tensor in self._embed_caption(caption).items()}

    def free_encoders(self) -> None:
        """Lets go of the text encoders and the VAE's encoder; its decoder stays, samples need it."""
        self.pipe.vae.encoder = None
        self.free_text_encoders()

    def free_text_encoders(self) -> None:
        """Lets go of the text encoders alone: a thread may be encoding pictures."""
        assert not self.trained_text, "a text encoder with an adapter can't be loaded again"
        for part in self.text_parts:
            setattr(self.pipe, part, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def text_encoder(self, part: str) -> nn.Module:
        """A text encoder of the pipeline, frozen; loaded when it is not in memory."""
        if getattr(self.pipe, part) is None:
            setattr(self.pipe, part, self._load_text_encoder(part))
        encoder: nn.Module = getattr(self.pipe, part)
        return encoder

    def _load_text_encoder(self, part: str) -> nn.Module:
        import transformers

        library, name = self._index[part]
        cls = getattr(transformers, name, None) if library == "transformers" else None
        if cls is None:
            cls = transformers.AutoModel
        encoder = load_part(self.folder, cls, part, dtype=self.dtype, use_safetensors=True)
        encoder.requires_grad_(False).eval()
        if self.text_format is not None:
            quantise_blocks([encoder], self.text_format, self.device)
        return encoder.to(self.device)  # type: ignore[no-any-return]

    def _vae_with_encoder(self) -> Any:
        vae = self.pipe.vae
        if vae.encoder is None:
            fresh = load_part(self.folder, type(vae), "vae", dtype=torch.float32, use_safetensors=True)
            vae.encoder = fresh.encoder.requires_grad_(requires_grad=False).eval().to(self.device)
        return vae

    @cached_property
    def _index(self) -> dict[str, Any]:
        index: dict[str, Any] = json.loads((self.folder / "model_index.json").read_text(encoding="utf-8"))
        return index

    @cached_property
    def text_tokens(self) -> int:
        """Longest caption in tokens, the chat template included; what is beyond is cut."""
        return min(self.max_text_tokens, int(self.pipe.tokenizer.model_max_length))

    @cached_property
    def latents_identity(self) -> str:
        """Names what `encode_pixels` computes: the VAE's content and the version of the formulas. For cache keys."""
        return content_identity(self.folder / "vae", salt=f"{type(self).__name__}:latents:{self.recipe}")

    @cached_property
    def denoiser_identity(self) -> str:
        """Names the denoiser's weights. For the records of an adapter."""
        return content_identity(*(self.folder / name for name in self.export_parts.values()), salt="")

    @cached_property
    def text_identity(self) -> str:
        """Names what `encode_text` computes: text encoders, tokenizers, length and number format. For cache keys."""
        salt = f"{type(self).__name__}:text:{self.recipe}:{self.text_tokens}:{self.dtype}"
        salt += "" if self.text_format is None else f":{self.text_format}"
        names = [name for part in self.text_parts for name in (part, part.replace("text_encoder", "tokenizer"))]
        return content_identity(*(self.folder / name for name in names), salt=salt)

    # ------------------------------------------------------------------ training
    def parts(self, *, denoiser: bool = True, text_encoders: bool = False) -> list[Part]:
        """The components that can be trained, loaded; asked before they hold adapters, whose layers are no targets."""
        parts = self._denoiser_parts() if denoiser else []
        for name in self.trainable_text_parts if text_encoders else ():
            encoder = self.text_encoder(name)
            lead = CLIP_LEAD if type(encoder).__name__.startswith("CLIPText") else ""
            parts.append(Part(name, encoder, tuple(self.text_targets(name)), prefix=f"{name}.", lead=lead))
        return parts

    def _denoiser_parts(self) -> list[Part]:
        targets, several = self.default_targets(), len(self.export_parts) > 1
        parts = []
        for ending, name in self.export_parts.items():
            prefix = f"{name}." if several else ""
            mine = tuple(target.removeprefix(prefix) for target in targets if target.startswith(prefix))
            parts.append(Part(name, getattr(self.pipe, name), mine, prefix, ending))
        return parts

    @property
    def trainable_denoiser(self) -> nn.Module:
        """What `predict` calls."""
        return self.forward_module

    def conditioned(self, conditioning: Conditioning, captions: Sequence[str]) -> Conditioning:
        """The conditioning of a batch as the text encoders stand now, with gradients; as it is where none is trained.

        Args:
            conditioning: What `collate` returned; what frozen encoders computed is taken from it.
            captions: Of the batch.
        """
        return {**conditioning, **self._embed_trained(list(captions))} if self.trained_text else conditioning

    @torch.no_grad()
    def refreshed(self, condition: dict[str, Tensor], caption: str) -> dict[str, Tensor]:
        """The condition of one caption as the text encoders stand now, as `encode_text` returns it."""
        if not self.trained_text:
            return condition
        encoders = nn.ModuleList(self.text_encoder(part) for part in self.trained_text)
        with self._without_autocast(), evaluating(encoders):
            fresh = self._embed_trained([caption])
        return {**condition, **{name: tensor[0].cpu().contiguous() for name, tensor in fresh.items()}}

    def enable_gradient_checkpointing(self, call: Callable[..., Any] | None = None) -> None:
        """Recomputes activations in the backward pass; loss and gradients stay the same to the bit.

        `call` calls a block, its first argument, and decides how; None: every block is recomputed.
        """
        self.denoiser.enable_gradient_checkpointing(*(() if call is None else (call,)))  # type: ignore[operator]

    # ------------------------------------------------------------------ samples
    @torch.no_grad()
    def sample(
        self,
        condition: dict[str, Tensor],
        negative_condition: dict[str, Tensor] | None,
        *,
        width: int,
        height: int,
        steps: int,
        guidance_scale: float,
        seed: int,
    ) -> Image.Image:
        """One picture drawn by the family's own diffusers pipeline; arguments as in `sample_frames`."""
        return self.sample_frames(
            condition, negative_condition, width=width, height=height, steps=steps, guidance_scale=guidance_scale,
            seed=seed,
        )[0]  # fmt: skip

    @torch.no_grad()
    def sample_frames(
        self,
        condition: dict[str, Tensor],
        negative_condition: dict[str, Tensor] | None,
        *,
        width: int,
        height: int,
        steps: int,
        guidance_scale: float,
        seed: int,
        num_frames: int = 1,
    ) -> list[Image.Image]:
        """The frames of a sample, one for families of pictures; the same seed gives the same noise on any device.

        Args:
            condition: What `encode_text` returned for the prompt.
            negative_condition: The same for the negative prompt; None where guidance is off.
            width: In pixels, a multiple of 16.
            height: In pixels, a multiple of 16.
            steps: Denoising steps, at least 1.
            guidance_scale: Handed to the pipeline in its own convention (see the family's module).
            seed: Of the noise.
            num_frames: Asked of families with a `frame_step`; plays no part elsewhere.

        Raises:
            ValueError: The size is no multiple of 16.
        """
        if width % 16 or height % 16:
            raise ValueError(f"sample size {width} x {height}: both must be multiples of 16 pixels")
        embeds = self.collate([condition])
        negative = None if negative_condition is None else self.collate([negative_condition])
        options = {"num_frames": num_frames} if self.makes_clips else {}
        with self._without_autocast(), evaluating(self.denoiser), self.plain_weights():
            x_BChw = self._draw_latents(
                embeds,
                negative,
                **options,
                width=width,
                height=height,
                num_inference_steps=steps,
                guidance_scale=guidance_scale,
                generator=torch.Generator("cpu").manual_seed(seed),
                output_type="latent",
            )
            pixels_BCHW = self.pipe.vae.decode(self.denormalise(x_BChw.float()), return_dict=False)[0]
        return self._frames(pixels_BCHW)

    def _frames(self, pixels_BCHW: Tensor) -> list[Image.Image]:
        """What the VAE decoded, as pictures."""
        frames: list[Image.Image] = self.pipe.image_processor.postprocess(pixels_BCHW, output_type="pil")
        return frames

    def plain_weights(self) -> contextlib.AbstractContextManager[None]:
        """The weights that the exported adapter will meet, inside: without the training adapter."""
        return contextlib.nullcontext() if self.assistant is None else self.assistant.taken_out()

    def _without_autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, enabled=False)
