"""The memory that one process of a run needs on its device.

Weights, adapter, gradients and optimizer are counted, from shapes and number formats; activations and the VAE's working
memory are estimated. What the libraries and the CUDA context take for themselves comes on top.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from lora_api.archs import UNET_ARCHS
from lora_api.config import TrainerConfig
from lora_api.memory.activations import ERROR, Batch, activation_bytes
from lora_api.memory.released import REST, released_shapes
from lora_api.memory.shapes import Component, ModelShapes, Shape, read_folder
from lora_api.memory.trained import Trained, layers_in_blocks, trainable_text_encoders, trained_parameters
from lora_api.optimization import STATE_BYTES
from lora_api.order import StageConfig
from lora_api.parallelism import is_sharded
from lora_api.training import Precision

MIB, GIB = 1 << 20, 1 << 30
CONTEXT_GIB = 0.6
"""What CUDA's context and its libraries take beside what torch counts."""

ITEM_BYTES = {Precision.FP32: 4, Precision.BF16: 2, Precision.FP16: 2}
_FP32 = 4

NF4_BLOCK = 64
"""Weights that share a scale in nf4."""
_ROUNDING = 1e-9  # 10 x 0.3 is three
_LISTED_BLOCK = re.compile(r"\w+\.\d+\.")
_UNET_BLOCK = re.compile(r".*?\.transformer_blocks\.\d+\.")
_STEP_BYTES = 4  # AdamW counts the steps of each tensor in a number of its own

KEPT_IN_FP32 = {
    "wan21": ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"),
    "wan22": ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"),
}
"""Parts of names of tensors that diffusers loads in fp32 whatever is asked for."""

_ENCODER, _ENCODER_ENTRY = "encoder.", "encoder.conv_in.weight"
_VAE_WIDTH = 128  # channels at full size, where the VAE is not at hand
_FRAMES_AT_A_TIME = 4  # that video VAEs work on


@dataclass(frozen=True)
class Estimate:
    """Bytes on the device of one process, by what they are for.

    Attributes:
        weights: Denoiser and VAE while training; text encoders too, where they are trained.
        adapter: The trained parameters, fp32; 0 for full fine-tuning, whose parameters are the weights.
        gradients: Of what is trained.
        optimizer: Its state.
        activations: Kept from the forward pass for the backward pass.
        text_encoders: Loaded while captions are encoded, and let go afterwards unless they are trained.
        caching: While pictures and captions are encoded: the denoiser, the VAE whole, and what encoding needs.
        sampling: While a sample is decoded; 0 without prompts.
        source: Where the model's shapes are known from.
    """

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    text_encoders: int
    caching: int
    sampling: int
    source: str

    @property
    def training(self) -> int:
        """Needed at once while training."""
        return self.weights + self.adapter + self.gradients + self.optimizer + self.activations

    @property
    def total(self) -> int:
        """The most that is needed at any time."""
        return max(self.training, self.caching, self.sampling)

    @property
    def error(self) -> int:
        """By how much `total` may be off, either way: what is counted is exact, activations are not."""
        rough = self.total - self.weights if self.total != self.training else self.activations
        return round(ERROR * rough)

    def gib(self) -> dict[str, float]:
        """All figures in GiB, for records."""
        names = ("weights", "adapter", "gradients", "optimizer", "activations", "text_encoders", "caching", "sampling")
        figures = {name: getattr(self, name) for name in names} | {"total": self.total, "error": self.error}
        return {name: round(value / GIB, 3) for name, value in figures.items()}


def shapes_for(config: TrainerConfig, folder: Path | None = None) -> ModelShapes | None:
    """The base model's shapes: from its folder where that can be read, else of the family's released model.

    Args:
        config: Whose `model.name_or_path` is looked at where it is a local path.
        folder: Where the model lies, when it is known.
    """
    location = config.model.name_or_path
    place = folder if folder is not None else Path(location) if "://" not in location else None
    found = read_folder(place) if place is not None else None
    return found or released_shapes(config.model.arch, location)


def estimate_of(config: TrainerConfig, shapes: ModelShapes, *, precision: Precision, processes: int = 1) -> Estimate:
    """What a run needs on each device.

    Args:
        config: Of the run.
        shapes: Of its base model; from `shapes_for`.
        precision: Number format of base model and forward pass, the one that `train.dtype` comes to on the device.
        processes: Of the run, over all nodes: where they share the denoiser, each has its part of it and one block whole.
    """
    shares = processes if is_sharded(config, processes) else 1
    trained = trained_parameters(config, shapes)
    full = config.network.type == "full"
    item = ITEM_BYTES[precision]
    denoiser = _held_bytes(config, shapes, _FP32 if full else item, shares)
    own = shares if full else 1  # adapters are whole on every device
    encoder = _bytes({n: s for n, s in shapes.vae.items() if n.startswith(_ENCODER)}, _FP32)
    vae = _bytes(shapes.vae, _FP32)
    texts = {name: _text_bytes(config, tensors, item) for name, tensors in shapes.text_encoders.items()}
    stay = trainable_text_encoders(config.model.arch, shapes) if config.train.train_text_encoder else {}
    away = offloaded_bytes(config, shapes, item)
    weights = denoiser - away + vae - encoder + sum(texts[name] for name in stay)
    optimizer = optimizer_bytes(config, trained) // own
    held = weights + (0 if full else trained.parameters * _FP32) + optimizer
    loaded = denoiser - away + vae if not full else _held_bytes(config, shapes, item, shares) + vae
    return Estimate(
        weights=weights,
        adapter=0 if full else trained.parameters * _FP32,
        gradients=trained.parameters * _FP32 // own,
        optimizer=optimizer,
        activations=_activations(config, shapes, item),
        text_encoders=sum(texts.values()),
        caching=loaded + max(sum(texts.values()), _encoding_bytes(config, shapes.vae)),
        sampling=held + _decoding_bytes(config, shapes.vae) if config.sample.prompts else 0,
        source=shapes.source,
    )


def optimizer_bytes(config: TrainerConfig, trained: Trained) -> int:
    """The optimizer's state for what is trained, and a moving average of it."""
    average = _FP32 if config.train.ema_config.use_ema else 0
    state = trained.parameters * (STATE_BYTES[config.train.optimizer] + average)
    return round(state) + trained.tensors * _STEP_BYTES


def denoiser_bytes(config: TrainerConfig, shapes: ModelShapes, item: int) -> int:
    """Weights of all denoisers, in `item` bytes for a number or as `model.quantize` keeps them."""
    return sum(_denoiser_bytes(config, tensors, item) for tensors in shapes.denoisers.values())


def _held_bytes(config: TrainerConfig, shapes: ModelShapes, item: int, shares: int) -> int:
    """Of the denoisers' weights, what each device holds at a time: all, or its share and the largest block."""
    whole = denoiser_bytes(config, shapes, item)
    return whole if shares == 1 else -(-whole // shares) + max(_block_bytes(config, shapes, item), default=0)


def _denoiser_bytes(config: TrainerConfig, tensors: Component, item: int) -> int:
    in_fp32, kind, arch = KEPT_IN_FP32.get(config.model.arch, ()), config.model.quantize, config.model.arch
    quantised = {} if kind is None else {f"{name}.weight": sizes for name, sizes in layers_in_blocks(arch, tensors)}
    plain = _bytes({name: shape for name, shape in tensors.items() if name not in quantised}, item, in_fp32)
    return plain + sum(quantised_bytes(sizes, kind or "", item) for sizes in quantised.values())


def offloaded_bytes(config: TrainerConfig, shapes: ModelShapes, item: int) -> int:
    """What is not on the device at any time: the resting blocks but for three, the one at work and its neighbours."""
    if not config.model.offload_blocks:
        return 0
    sizes = _block_bytes(config, shapes, item)
    resting = [sizes[place] for place in spread(len(sizes), config.model.offload_blocks)]
    return max(0, sum(resting) - 3 * max(resting, default=0))


def _block_bytes(config: TrainerConfig, shapes: ModelShapes, item: int) -> list[int]:
    """Weights of each block of the denoisers."""
    pattern = _UNET_BLOCK if config.model.arch in UNET_ARCHS else _LISTED_BLOCK
    blocks: dict[str, dict[str, Shape]] = {}
    for component, tensors in shapes.denoisers.items():
        for name, shape in tensors.items():
            if found := pattern.match(name):
                blocks.setdefault(f"{component}.{found[0]}", {})[name] = shape
    return [_denoiser_bytes(config, tensors, item) for tensors in blocks.values()]


def spread(count: int, share: float) -> list[int]:
    """Places of a share of `count` blocks, spread evenly, so that those in between hide the copying of the others."""
    return [n for n in range(count) if int((n + 1) * share + _ROUNDING) > int(n * share + _ROUNDING)]


def quantised_bytes(sizes: tuple[int, ...], format_name: str, item: int) -> int:
    """A weight in a quantised format: its codes and its scales."""
    outputs, count = sizes[0], prod(sizes)
    if format_name == "nf4":
        return -(-count // 2) + -(-count // NF4_BLOCK) * _FP32
    return count + outputs * item


def _text_bytes(config: TrainerConfig, tensors: Component, item: int) -> int:
    """A text encoder; quantised, its embeddings keep their format, which is left out of the account of unknown layers."""
    if config.model.quantize_te is None:
        return _bytes(tensors, item)
    total = 0
    for name, shape in tensors.items():
        linear = len(shape.sizes) == 2 and name.endswith(".weight") and "embed" not in name and "shared" not in name
        linear = linear or name == REST
        sizes = shape.sizes if len(shape.sizes) > 1 else (1, *shape.sizes)
        total += quantised_bytes(sizes, config.model.quantize_te, item) if linear else _bytes({name: shape}, item)
    return total


def _bytes(tensors: Component, item: int, in_fp32: tuple[str, ...] = ()) -> int:
    total = 0
    for name, shape in tensors.items():
        as_float = _FP32 if any(part in name.split(".") for part in in_fp32) else item
        total += shape.count * (as_float if shape.item_bytes is None else shape.item_bytes)
    return total


def batch_of(config: TrainerConfig) -> Batch:
    """The largest batch that a run sees, in any of its stages."""
    frames = max(each.num_frames for each in config.datasets)
    found = [
        Batch(stage.batch_size or config.train.batch_size, max(_sides(config, stage)), frames)
        for stage in _stages(config)
    ]
    return max(found, key=lambda batch: batch.size * batch.pixels**2)


def _stages(config: TrainerConfig) -> tuple[StageConfig, ...]:
    return config.train.stages or (StageConfig(),)


def _sides(config: TrainerConfig, stage: StageConfig) -> list[int]:
    return [side for each in config.datasets for side in stage.resolution or each.resolution]


def _activations(config: TrainerConfig, shapes: ModelShapes, item: int) -> int:
    every = config.train.gradient_checkpointing_every if config.train.gradient_checkpointing else None
    batch = batch_of(config)
    arch, denoisers = config.model.arch, shapes.denoisers.values()
    found = [activation_bytes(arch, each, batch, item_bytes=item, every=every) for each in denoisers]
    whole = config.network.type == "full" and item < _FP32  # autocast keeps a cast copy of every weight that is trained
    return max(found, default=0) + (sum(_bytes(each, item) for each in denoisers) if whole else 0)


def _encoding_bytes(config: TrainerConfig, vae: Component) -> int:
    """The VAE's encoder at work: three tensors of its first channels at full size, fp32."""
    batch = batch_of(config)
    pixels = max(side for stage in _stages(config) for side in _sides(config, stage))
    return 3 * _vae_width(vae) * pixels**2 * min(batch.frames, _FRAMES_AT_A_TIME) * _FP32


def _decoding_bytes(config: TrainerConfig, vae: Component) -> int:
    """The VAE's decoder at work: three tensors of twice these channels at full size, fp32."""
    sample = config.sample
    pixels = sample.width * sample.height * min(sample.num_frames, _FRAMES_AT_A_TIME)
    return 3 * 2 * _vae_width(vae) * pixels * _FP32


def _vae_width(vae: Component) -> int:
    entry = vae.get(_ENCODER_ENTRY)
    return _VAE_WIDTH if entry is None else entry.sizes[0]
