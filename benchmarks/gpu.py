"""Seconds per step, model FLOPs utilisation and peak memory on one GPU, for every way to save memory or time.

The denoisers have the shapes of released models and random weights, so nothing is downloaded. The floor is what the same
device reaches in one large matrix product, measured here: utilisation is the share of that. FLOPs are those of forward
and backward without recomputation, so what checkpointing recomputes counts as loss.

Without CUDA, tiny shapes in fp32 run through the same code.

Run: benchmarks/gpu.sh
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.flop_counter import FlopCounterMode

from lora_api.config import TrainerConfig
from lora_api.training import Precision
from lora_trainer.data.sampler import BatchOrder
from lora_trainer.data.stream import Batches, BatchMaker, Share, batches_ahead
from lora_trainer.families import family_for
from lora_trainer.loop import Loop
from lora_trainer.memory.placing import checkpointing
from lora_trainer.networks import add_adapter
from lora_trainer.objective import Objective
from lora_trainer.optimizers import build_optimizer
from lora_trainer.reporting import Reporter
from lora_trainer.runtime import TORCH_DTYPE, Group, autocast, device_for, synchronise
from lora_trainer.settings import Settings
from lora_trainer.state import TrainState
from lora_trainer.stopping import StopRequest
from lora_trainer.tiny import make_tiny

WARM_STEPS, MATMUL_SIDE, RANK = 3, 8192, 32


@dataclass(frozen=True)
class ShapeOf:
    """A denoiser's shape and what it is fed.

    Attributes:
        arch: Its family.
        config: Changed in the tiny model's configuration.
        latents: (C, h, w) of one picture.
        text: (L, D) of one caption.
    """

    arch: str
    config: dict[str, Any]
    latents: tuple[int, int, int]
    text: tuple[int, int]


_KLEIN = {
    "in_channels": 128, "num_layers": 5, "num_single_layers": 20, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 7680, "axes_dims_rope": (32, 32, 32, 32),
}  # fmt: skip
_Z_IMAGE = {
    "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30, "cap_feat_dim": 2560,
    "axes_dims": (32, 48, 48), "axes_lens": (1536, 512, 512),
}  # fmt: skip
SHAPES = {
    "klein-4b": ShapeOf("flux2_klein_4b", _KLEIN, (128, 64, 64), (512, 7680)),
    "z-image": ShapeOf("zimage", _Z_IMAGE, (16, 128, 128), (160, 2560)),
    "tiny-klein": ShapeOf("flux2_klein_4b", {}, (64, 8, 8), (32, 48)),
    "tiny-z-image": ShapeOf("zimage", {}, (16, 16, 16), (24, 32)),
}
"""The released models at 1024 px, and the tiny ones of the tests."""


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    checkpointing_every: int = 0  # 0: nothing is recomputed
    compile: bool = False

    @property
    def name(self) -> str:
        """As the table calls it."""
        recomputed = {0: "none", 1: "full", 2: "every 2nd block"}[self.checkpointing_every]
        return f"checkpointing {recomputed}{', compiled' if self.compile else ''}"


VARIANTS = (Variant(), Variant(2), Variant(1), Variant(compile=True), Variant(1, compile=True))


@dataclass(frozen=True)
class Figures:
    """What one variant reached."""

    shape: str
    variant: str
    seconds_per_step: float
    utilisation: float  # of the matrix product's rate
    peak_gib: float
    loop_over_bare: float | None  # only of the first variant


class MadeUp:
    """Stands for the cache: latents and captions of noise."""

    masked = False

    def __init__(self, shape: ShapeOf, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self._latents = [torch.randn(shape.latents, generator=generator) for _ in range(4)]
        self._condition = {"embeds": torch.randn(shape.text, generator=generator).to(dtype)}

    def latents(self, number: int) -> Tensor:
        return self._latents[number]

    def condition(self, number: int, drop: float) -> dict[str, Tensor]:
        del number, drop
        return self._condition


class Subject:
    """A base model of a shape, with the trainer's own adapter, optimizer and loop around it."""

    def __init__(self, name: str, folder: Path, device: torch.device) -> None:
        self.shape, self.device = SHAPES[name], device
        self.config = TrainerConfig.model_validate(
            {
                "model": {"arch": self.shape.arch, "name_or_path": str(folder)},
                "network": {"type": "lora", "linear": RANK, "linear_alpha": RANK},
                "datasets": [{"folder_path": "/made-up"}],
                "train": {"dtype": "bf16" if device.type == "cuda" else "fp32"},
            }
        )
        self.precision = Precision(self.config.train.dtype)
        dtype = TORCH_DTYPE[self.precision]
        self.model = family_for(self.shape.arch).load(make_tiny(self.shape.arch, folder), dtype=dtype, device=device)
        self.model.free_encoders()
        if self.shape.config:
            self.model.denoiser = self.model.forward_module = _random(
                self.model.denoiser, self.shape.config, dtype, device
            )
            self.model.pipe.register_modules(transformer=self.model.denoiser)
        self.adapter = add_adapter(self.model, self.config.network, seed=0)
        self.optimizer = build_optimizer(self.adapter.parameters(), self.config.train)
        order = BatchOrder(["one"] * 4, 1, 42)
        objective = Objective.of(self.config.train, self.model)
        self.maker = BatchMaker(MadeUp(self.shape, dtype), order, self.model, Share(1, 1), objective)
        self.parameters = sum(parameter.numel() for parameter in self.model.denoiser.parameters())

    def forward_backward(self) -> None:
        """What the floor and the FLOP count are taken of."""
        batch = self.maker.make(0, 0)
        with autocast(self.device, self.precision):
            loss = mse_loss(self.model.predict(batch.x_t, batch.time, batch.conditioning).float(), batch.target)
        loss.backward()

    def bare(self) -> None:
        """One step without a loop."""
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def loop(self) -> Iterator[Callable[[int], None]]:
        """Makes so many steps of the real loop."""
        batches = Batches(self.maker.make, 0, 1, batches_ahead(self.device))
        loop = Loop(
            config=self.config, settings=Settings.of(self.config), state=TrainState(), model=self.model,
            optimizer=self.optimizer, batches=batches, group=Group(0, 1, self.device), stop=StopRequest(),
            reporter=Reporter(None, 1, 1),
        )  # fmt: skip

        def steps(count: int) -> None:
            loop.settings = replace(loop.settings, steps=loop.state.step + count)
            loop.run()

        try:
            yield steps
        finally:
            batches.close()

    @contextmanager
    def variant(self, variant: Variant) -> Iterator[None]:
        """The model trained this way, inside."""
        blocks = [block for name, block in self.model.denoiser.named_modules() if _is_block(self.model.denoiser, name)]
        if variant.checkpointing_every:
            changed = {"gradient_checkpointing": True, "gradient_checkpointing_every": variant.checkpointing_every}
            self.model.enable_gradient_checkpointing(*checkpointing(self.config.train.model_copy(update=changed)))
        if variant.compile:
            for block in blocks:
                block.compile()
        try:
            yield
        finally:
            self.model.denoiser.disable_gradient_checkpointing()
            for block in blocks:
                block._compiled_call_impl = None  # noqa: SLF001 torch has no way back from Module.compile
            torch.compiler.reset()


def _is_block(denoiser: nn.Module, name: str) -> bool:
    head, _, last = name.rpartition(".")
    return last.isdigit() and isinstance(denoiser.get_submodule(head), nn.ModuleList) and "." not in head


def _random(tiny: nn.Module, changes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A denoiser of the tiny one's class in another shape, with random weights made on the device."""
    config = {name: value for name, value in dict(tiny.config).items() if not name.startswith("_")} | changes
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            made = type(tiny)(**config)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in made.named_parameters():
        if "pad_token" in name:
            nn.init.normal_(parameter, 0, 0.02)
    return made.to(device, dtype).requires_grad_(requires_grad=False).eval()


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one large matrix product: the best of five."""
    side = MATMUL_SIDE if device.type == "cuda" else 1024
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    seconds = [timed(device, lambda: a @ b) for _ in range(6)]
    return 2 * side**3 / min(seconds[1:])


def timed(device: torch.device, work: Callable[[], Any]) -> float:
    """Seconds, until the device is done."""
    synchronise(device)
    begin = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - begin


def measure(
    name: str, steps: int, device: torch.device, floor: float, variants: tuple[Variant, ...] = VARIANTS
) -> Iterator[Figures]:
    """The figures of every variant of one shape."""
    with tempfile.TemporaryDirectory() as scratch:
        subject = Subject(name, Path(scratch) / "model", device)
    with FlopCounterMode(display=False) as counter:
        subject.forward_backward()
    subject.optimizer.zero_grad()
    flops = counter.get_total_flops()
    print(f"{name}: {subject.parameters / 1e9:.3f} billion parameters, {flops / 1e12:.3f} TFLOP a step", flush=True)
    for number, variant in enumerate(variants):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        with subject.variant(variant), subject.loop() as run:
            run(WARM_STEPS)
            seconds, ratios = [], []
            for _ in range(steps):
                seconds.append(timed(device, lambda: run(1)))
                if number == 0:
                    ratios.append(seconds[-1] / timed(device, subject.bare))
        mid = statistics.median(seconds)
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
        ratio = statistics.median(ratios) if ratios else None
        yield Figures(name, variant.name, mid, flops / mid / floor, peak, ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, help="default: the released ones with CUDA, else the tiny ones"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled variants out")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each variant (default 8)")
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    arguments = parser.parse_args()
    device = device_for("auto", 0)
    cuda = device.type == "cuda"
    if not cuda:
        torch.set_num_threads(1)
    floor = matmul_flops(device, torch.bfloat16 if cuda else torch.float32)
    name = torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU, one thread"
    print(f"{name}, torch {torch.__version__}: a matrix product reaches {floor / 1e12:.3f} TFLOP/s", flush=True)
    shapes = arguments.shapes or (["klein-4b", "z-image"] if cuda else ["tiny-klein", "tiny-z-image"])
    variants = tuple(each for each in VARIANTS if not (each.compile and arguments.no_compile))
    rows = []
    for shape in shapes:
        for row in measure(shape, arguments.steps, device, floor, variants):
            rows.append(row)
            ratio = f", loop/bare {row.loop_over_bare:.3f}" if row.loop_over_bare else ""
            print(
                f"{row.shape:<12} {row.variant:<36} {row.seconds_per_step:8.4f} s/step  utilisation {row.utilisation:6.1%}  "
                f"peak {row.peak_gib:6.2f} GiB{ratio}",
                flush=True,
            )
    if arguments.out is not None:
        document = {
            "device": name,
            "torch": torch.__version__,
            "matmul_flops": floor,
            "rows": [asdict(row) for row in rows],
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
