"""The released models of every family, as far as memory goes: for models that are not at hand as a folder.

A denoiser is its blocks, each with the layers it has, and a number for all the rest. Numbers follow from the
configurations that the model cards publish; tests/trainer/test_memory_estimate.py builds the real classes from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lora_api.archs import Arch
from lora_api.memory.shapes import TEXT_ENCODERS, VAE, Component, ModelShapes, Shape
from lora_api.memory.unet import SD15, SDXL, Layer

REST = "rest.weight"
"""Stands for all tensors that are not listed one by one."""


@dataclass(frozen=True)
class Blocks:
    """A list of blocks that are all alike.

    Attributes:
        name: Of the list.
        count: Its length.
        layers: Linear layers of each, as (outputs, inputs).
    """

    name: str
    count: int
    layers: Mapping[str, tuple[int, int]]

    def all(self) -> Iterable[Layer]:
        """The layers of all blocks."""
        return ((f"{self.name}.{n}.{layer}", size) for n in range(self.count) for layer, size in self.layers.items())


@dataclass(frozen=True)
class Released:
    """One released model.

    Attributes:
        name: On the Hugging Face hub.
        parameters: Of one denoiser.
        layers: Of one denoiser.
        text_encoders: Parameters of each, in the order of the components.
        text_layers: Layers of the first ones, where adapters may be added to them.
        vae: Parameters of the VAE's encoder and of the rest of it.
        denoisers: Names of the components.
    """

    name: str
    parameters: int
    layers: tuple[Layer, ...]
    text_encoders: tuple[int, ...]
    vae: tuple[int, int]
    denoisers: tuple[str, ...] = ("transformer",)
    text_layers: tuple[tuple[Layer, ...], ...] = field(default=())

    def shapes(self) -> ModelShapes:
        """As if its folder had been read."""
        components: dict[str, Component] = dict.fromkeys(self.denoisers, _component(self.parameters, self.layers))
        for number, (name, total) in enumerate(zip(TEXT_ENCODERS, self.text_encoders, strict=False)):
            layers = self.text_layers[number] if number < len(self.text_layers) else ()
            components[name] = _component(total, layers)
        encoder, rest = self.vae
        components[VAE] = {"encoder.weight": Shape((encoder,)), "decoder.weight": Shape((rest,))}
        return ModelShapes(components, f"the published configuration of {self.name}")


def _component(total: int, layers: Iterable[Layer]) -> dict[str, Shape]:
    found = {f"{name}.weight": Shape(size) for name, size in layers}
    return found | {REST: Shape((total - sum(shape.count for shape in found.values()),))}


def _flux2(width: int, double: int, single: int) -> tuple[Layer, ...]:
    square, up, down = (width, width), (6 * width, width), (width, 3 * width)
    names = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    mlp = {f"{ff}.linear_{way}": size for ff in ("ff", "ff_context") for way, size in (("in", up), ("out", down))}
    blocks = Blocks("transformer_blocks", double, {f"attn.{name}": square for name in names} | mlp)
    fused = {"attn.to_qkv_mlp_proj": (9 * width, width), "attn.to_out": (width, 4 * width)}
    return (*blocks.all(), *Blocks("single_transformer_blocks", single, fused).all())


def _flux1() -> tuple[Layer, ...]:
    w = 3072
    names = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    double = {"norm1.linear": (6 * w, w), "norm1_context.linear": (6 * w, w)}
    double |= {f"attn.{name}": (w, w) for name in names}
    for ff in ("ff", "ff_context"):
        double |= {f"{ff}.net.0.proj": (4 * w, w), f"{ff}.net.2": (w, 4 * w)}
    single = {"norm.linear": (3 * w, w), "proj_mlp": (4 * w, w), "proj_out": (w, 5 * w)}
    single |= {f"attn.{name}": (w, w) for name in ("to_q", "to_k", "to_v")}
    return (
        *Blocks("transformer_blocks", 19, double).all(),
        *Blocks("single_transformer_blocks", 38, single).all(),
    )


def _zimage() -> tuple[Layer, ...]:
    w, inner = 3840, 10240
    layers = {f"attention.{name}": (w, w) for name in ("to_q", "to_k", "to_v", "to_out.0")}
    layers |= {"feed_forward.w1": (inner, w), "feed_forward.w2": (w, inner), "feed_forward.w3": (inner, w)}
    modulated = layers | {"adaLN_modulation.0": (4 * w, 256)}
    lists = Blocks("noise_refiner", 2, modulated), Blocks("context_refiner", 2, layers), Blocks("layers", 30, modulated)
    return tuple(layer for blocks in lists for layer in blocks.all())


def _qwen_image() -> tuple[Layer, ...]:
    w = 3072
    names = ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "add_q_proj", "to_out.0", "to_add_out")
    layers = {f"attn.{name}": (w, w) for name in names}
    for stream in ("img", "txt"):
        layers |= {f"{stream}_mod.1": (6 * w, w), f"{stream}_mlp.net.0.proj": (4 * w, w)}
        layers |= {f"{stream}_mlp.net.2": (w, 4 * w)}
    return tuple(Blocks("transformer_blocks", 60, layers).all())


def _wan(width: int, inner: int, count: int) -> tuple[Layer, ...]:
    names = ("to_q", "to_k", "to_v", "to_out.0")
    layers = {f"{attention}.{name}": (width, width) for attention in ("attn1", "attn2") for name in names}
    layers |= {"ffn.net.0.proj": (inner, width), "ffn.net.2": (width, inner)}
    return tuple(Blocks("blocks", count, layers).all())


def _clip(width: int, count: int) -> tuple[Layer, ...]:
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    return tuple(Blocks("text_model.encoder.layers", count, {f"self_attn.{n}": (width, width) for n in names}).all())


_KL, _FLUX2_VAE, _VIDEO_VAE = (34_274_208, 49_545_475), (34_421_696, 49_624_419), (53_595_872, 73_296_659)
_CLIP_L, _CLIP_G, _T5, _UMT5 = 123_060_480, 694_659_840, 4_762_310_656, 5_680_910_336
_QWEN3_4B, _QWEN3_8B, _QWEN_VL, _MISTRAL = 4_022_468_096, 8_190_735_360, 8_292_166_656, 24_011_361_280
_Z_IMAGE = (6_154_908_736, _zimage(), (_QWEN3_4B,), _KL)
_WAN_14B = (14_288_491_584, _wan(5120, 13824, 40), (_UMT5,), _VIDEO_VAE)

RELEASED: Mapping[str, Released] = {
    Arch.FLUX1: Released(
        "black-forest-labs/FLUX.1-dev", 11_901_408_320, _flux1(), (_CLIP_L, _T5), _KL, text_layers=(_clip(768, 12),)
    ),
    Arch.FLUX2_KLEIN_4B: Released(
        "black-forest-labs/FLUX.2-klein-base-4B", 3_875_544_576, _flux2(3072, 5, 20), (_QWEN3_4B,), _FLUX2_VAE
    ),
    Arch.FLUX2_KLEIN_9B: Released(
        "black-forest-labs/FLUX.2-klein-base-9B", 9_078_581_248, _flux2(4096, 8, 24), (_QWEN3_8B,), _FLUX2_VAE
    ),
    Arch.FLUX2_DEV: Released(
        "black-forest-labs/FLUX.2-dev", 32_223_281_152, _flux2(6144, 8, 48), (_MISTRAL,), _FLUX2_VAE
    ),
    Arch.SD15: Released(
        "stable-diffusion-v1-5/stable-diffusion-v1-5", 859_520_964, tuple(SD15.layers()), (_CLIP_L,),
        (34_163_592, 49_490_271), ("unet",), (_clip(768, 12),),
    ),
    Arch.SDXL: Released(
        "stabilityai/stable-diffusion-xl-base-1.0", 2_567_463_684, tuple(SDXL.layers()), (_CLIP_L, _CLIP_G),
        (34_163_592, 49_490_271), ("unet",), (_clip(768, 12), _clip(1280, 32)),
    ),
    Arch.ZIMAGE: Released("Tongyi-MAI/Z-Image", *_Z_IMAGE),
    Arch.ZIMAGE_TURBO: Released("Tongyi-MAI/Z-Image-Turbo", *_Z_IMAGE),
    Arch.QWEN_IMAGE: Released("Qwen/Qwen-Image", 20_430_401_088, _qwen_image(), (_QWEN_VL,), _VIDEO_VAE),
    Arch.WAN21: Released("Wan-AI/Wan2.1-T2V-14B-Diffusers", *_WAN_14B),
    Arch.WAN22: Released("Wan-AI/Wan2.2-T2V-A14B-Diffusers", *_WAN_14B, ("transformer", "transformer_2")),
}  # fmt: skip
"""By family. Wan 2.1 is the one of 14 billion parameters; its smaller sister needs its folder to be told apart."""

SMALLER = {
    (Arch.WAN21, "1.3B"): Released(
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 1_418_996_800, _wan(1536, 8960, 30), (_UMT5,), _VIDEO_VAE
    )
}
"""Other released sizes, by a part of their name."""


def released_shapes(arch: str, name_or_path: str = "") -> ModelShapes | None:
    """The released model of a family; None for families that other packages add."""
    for (family, part), model in SMALLER.items():
        if family == arch and part.lower() in name_or_path.lower():
            return model.shapes()
    model_of_family = RELEASED.get(arch)
    return None if model_of_family is None else model_of_family.shapes()
