"""What the reference implementations have in common: the recipe, the data, the random numbers, the adapter, the update.

Nothing here or beside it may import the trainer. What is right or wrong (paths from picture to noise, targets, encoders,
wiring) is written from papers, model cards and diffusers' pipelines, and stands in the file of its family. What is
merely a choice of the trainer, because any seed is as good as another, is restated from its documentation:

- A seed for a purpose is BLAKE2b over the numbers that it depends on, as little-endian 64-bit integers, without its
  last bit. Purposes are 1 order of batches, 2 order of samples, 3 what a sample draws.
- A sample draws, from the generator of (seed, 3, iteration, slot): whether its caption is dropped, where between picture
  and noise it is shown, and the noise; slots number the samples of an iteration.
- Each bucket is an endless stream of its samples, shuffled anew in each epoch; a batch is the next samples of one
  bucket; an epoch holds as many batches of each bucket as have become full by its end, shuffled.
- Factors of an adapter start in the order of their names, Kaiming-uniform (a^2 = 5) or zero.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import conv2d


@dataclass(frozen=True)
class Recipe:
    """What a configuration says, with the trainer's defaults; all of it is stated again in the tests' configuration."""

    steps: int = 20
    batch_size: int = 2
    accumulation: int = 1
    lr: float = 2e-3
    kind: str = "lora"  # or lokr, with both Kronecker factors whole
    rank: int = 4
    alpha: float = 6.0
    conv: int = 0  # rank and alpha of adapters in convolutions; 0: none
    seed: int = 7
    trigger: str = "mascotxyz"
    caption_dropout: float = 0.3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    train_text_encoder: bool = False
    assistant: Path | None = None  # a training adapter, merged for training

    @property
    def samples_per_step(self) -> int:
        return self.batch_size * self.accumulation


# ---------------------------------------------------------------------- data
@dataclass(frozen=True)
class Example:
    """A picture or clip with its caption."""

    file: Path
    size: tuple[int, ...]
    caption: str


def read_folder(folder: Path, trigger: str) -> list[Example]:
    """All pictures and clips in the order of their names.

    The test makes them at sizes that need neither scaling nor cutting, so that each is trained as it is. `[trigger]` in
    a caption stands for the trigger word, and a caption without it gets it in front.
    """
    found = []
    for file in sorted(folder.iterdir()):
        if file.suffix in (".png", ".mkv"):
            caption = file.with_suffix(".txt").read_text().strip().replace("[trigger]", trigger)
            if trigger not in caption:
                caption = f"{trigger}, {caption}"
            found.append(Example(file, tuple(pixels_of(file).shape), caption))
    return found


def pixels_of(file: Path) -> Tensor:
    """(3, H, W) of a picture, (3, F, H, W) of a clip: 0..255 becomes -1..1."""
    if file.suffix == ".mkv":
        import av

        with av.open(str(file)) as clip:
            frames = [frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]
        values = torch.from_numpy(np.stack(frames)).permute(3, 0, 1, 2)
    else:
        values = torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1)
    return values.float() / 127.5 - 1


# ---------------------------------------------------------------------- random numbers
def seed_of(*numbers: int) -> int:
    raw = hashlib.blake2b(b"".join(struct.pack("<q", number) for number in numbers), digest_size=8).digest()
    return int.from_bytes(raw, "little") // 2


def shuffled(items: Iterable[int], *numbers: int) -> list[int]:
    result = list(items)
    random.Random(seed_of(*numbers)).shuffle(result)
    return result


def batches_of(examples: list[Example], recipe: Recipe) -> Iterator[list[int]]:
    """Numbers of the examples in each batch, for ever."""
    buckets: dict[tuple[int, ...], list[int]] = {}
    for number, example in enumerate(examples):
        buckets.setdefault(example.size, []).append(number)
    queues: list[list[int]] = [[] for _ in buckets]
    for epoch in itertools.count():
        for bucket, members in enumerate(buckets.values()):
            queues[bucket] += shuffled(members, recipe.seed, 2, bucket, epoch)
        turns = [bucket for bucket, queue in enumerate(queues) for _ in range(len(queue) // recipe.batch_size)]
        for bucket in shuffled(turns, recipe.seed, 1, epoch):
            yield [queues[bucket].pop(0) for _ in range(recipe.batch_size)]


@dataclass(frozen=True)
class Shown:
    """One sample of a step.

    Attributes:
        number: Of the example.
        caption: Its own, or nothing but the trigger word when it was dropped.
        u: Where between picture and noise, in (0, 1).
        noise: Standard normal, shaped like the latents.
    """

    number: int
    caption: str
    u: Tensor
    noise: Tensor


def steps_of(examples: list[Example], latents: list[Tensor], recipe: Recipe, *, density: str) -> Iterator[list[Shown]]:
    """For each step the samples that it averages over.

    Args:
        examples: All of them.
        latents: Of each, for their shapes.
        recipe: Of the run.
        density: Of u: `uniform`, or `logit_normal` (Esser et al. 2024, section 3.1: the sigmoid of a standard normal).
    """
    batches = batches_of(examples, recipe)
    for step in range(recipe.steps):
        shown = []
        for slot, number in enumerate(itertools.chain(*(next(batches) for _ in range(recipe.accumulation)))):
            generator = torch.Generator().manual_seed(seed_of(recipe.seed, 3, step, slot))
            dropped = torch.rand((), generator=generator, dtype=torch.float64).item() < recipe.caption_dropout
            u = (
                torch.rand((), generator=generator)
                if density == "uniform"
                else torch.sigmoid(torch.randn((), generator=generator))
            )
            noise = torch.randn(latents[number].shape, generator=generator)
            shown.append(Shown(number, recipe.trigger if dropped else examples[number].caption, u, noise))
        yield shown


# ---------------------------------------------------------------------- the adapter
def named_linears(model: nn.Module, *starts: str) -> dict[str, nn.Module]:
    """The linear layers whose names begin with one of these."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(starts)}


def add_adapter(layers: Mapping[str, nn.Module], recipe: Recipe, generator: torch.Generator) -> list[nn.Parameter]:
    """Changes every layer; returns what is trained, sorted by name."""
    add = add_lora if recipe.kind == "lora" else add_lokr
    return [
        factor
        for name in sorted(layers, key=lambda name: f"{name}.")
        for factor in add(layers[name], recipe, generator)
    ]


def add_lora(layer: nn.Module, recipe: Recipe, generator: torch.Generator) -> list[nn.Parameter]:
    """W x becomes W x + (alpha / r) B A x (Hu et al. 2021, section 4.1); of a convolution A has the kernel, B is 1 x 1."""
    is_conv = isinstance(layer, nn.Conv2d)
    rank, scale = (recipe.conv, 1.0) if is_conv else (recipe.rank, recipe.alpha / recipe.rank)
    a = uniform((rank, *layer.weight.shape[1:]), generator)
    b = nn.Parameter(torch.zeros(layer.weight.shape[0], rank, *(1,) * (layer.weight.ndim - 2)))

    def changed(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if is_conv:
            return output + scale * conv2d(conv2d(inputs[0], a, None, layer.stride, layer.padding), b)
        return output + scale * (inputs[0] @ a.T) @ b.T

    layer.register_forward_hook(changed)
    return [a, b]


def add_lokr(layer: nn.Module, recipe: Recipe, generator: torch.Generator) -> list[nn.Parameter]:
    """W becomes W + W1 (x) W2 (Yeh et al. 2023, section 3.2), each side of W split into its two nearest factors."""
    (out_1, out_2), (in_1, in_2) = (nearest_factors(side) for side in layer.weight.shape)
    w1, w2 = uniform((out_1, in_1), generator), nn.Parameter(torch.zeros(out_2, in_2))
    layer.register_forward_hook(lambda layer, inputs, output: output + inputs[0] @ torch.kron(w1, w2).T)
    return [w1, w2]


def nearest_factors(number: int) -> tuple[int, int]:
    """12 = 3 x 4: the pair of factors with the smallest sum, the smaller one first."""
    smaller = next(n for n in range(math.isqrt(number), 0, -1) if number % n == 0)
    return smaller, number // smaller


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> nn.Parameter:
    """He et al. 2015 with a^2 = 5, which is uniform within 1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))


# ---------------------------------------------------------------------- the update
class Update:
    """Clipped AdamW: the gradients' norm over all parameters together is limited, then Loshchilov & Hutter 2019."""

    def __init__(self, parameters: list[nn.Parameter], recipe: Recipe) -> None:
        self.parameters, self.limit = parameters, recipe.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            parameters, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.epsilon,
            weight_decay=recipe.weight_decay, foreach=False,
        )  # fmt: skip
        for parameter in parameters:  # a parameter that no sample of a step asks has the gradient zero, not none
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, self.limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def frozen(part: nn.Module) -> nn.Module:
    """A part of a pipeline as it is used: nothing in it learns, dropout is off."""
    return part.requires_grad_(False).eval()
