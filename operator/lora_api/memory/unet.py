"""Names and shapes of the layers of the released UNets, which repeat too irregularly for a table.

References:
    diffusers 0.42: `models/unets/unet_2d_condition.py`. Checked against the real class in
    tests/trainer/test_memory_estimate.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Layer = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class UNet:
    """A UNet with three resizings or two.

    Attributes:
        channels: Of each level.
        depths: Transformer blocks in each attention of a level; 0: the level has no attention.
        text_width: Of the captions.
        linear_projection: Whether the projections around attention are linear layers; else 1 x 1 convolutions.
        resnets: Residual blocks of a level on the way down; one more on the way up.
    """

    channels: tuple[int, ...]
    depths: tuple[int, ...]
    text_width: int
    linear_projection: bool
    resnets: int = 2

    def layers(self) -> Iterator[Layer]:
        """Linear and convolution layers of all blocks, with the shapes of their weights."""
        last, time = len(self.channels) - 1, 4 * self.channels[0]
        skips = [self.channels[0]]
        before = self.channels[0]
        for level, width in enumerate(self.channels):
            block = f"down_blocks.{level}"
            for number in range(self.resnets):
                yield from _resnet(f"{block}.resnets.{number}", before, width, time)
                yield from self._attention(f"{block}.attentions.{number}", level)
                before = width
                skips.append(width)
            if level < last:
                yield f"{block}.downsamplers.0.conv", (width, width, 3, 3)
                skips.append(width)
        for number in range(2):
            yield from _resnet(f"mid_block.resnets.{number}", before, before, time)
        yield from self._attention("mid_block.attentions.0", last, at_least=1)
        for level in reversed(range(len(self.channels))):
            block, width = f"up_blocks.{last - level}", self.channels[level]
            for number in range(self.resnets + 1):
                yield from _resnet(f"{block}.resnets.{number}", before + skips.pop(), width, time)
                yield from self._attention(f"{block}.attentions.{number}", level)
                before = width
            if level > 0:
                yield f"{block}.upsamplers.0.conv", (width, width, 3, 3)

    def _attention(self, name: str, level: int, at_least: int = 0) -> Iterator[Layer]:
        width, depth = self.channels[level], max(self.depths[level], at_least)
        if depth == 0:
            return
        ones = () if self.linear_projection else (1, 1)
        for projection in ("proj_in", "proj_out"):
            yield f"{name}.{projection}", (width, width, *ones)
        for number in range(depth):
            block = f"{name}.transformer_blocks.{number}"
            for attention, source in (("attn1", width), ("attn2", self.text_width)):
                yield f"{block}.{attention}.to_q", (width, width)
                yield f"{block}.{attention}.to_k", (width, source)
                yield f"{block}.{attention}.to_v", (width, source)
                yield f"{block}.{attention}.to_out.0", (width, width)
            yield f"{block}.ff.net.0.proj", (8 * width, width)
            yield f"{block}.ff.net.2", (width, 4 * width)


def _resnet(name: str, before: int, width: int, time: int) -> Iterator[Layer]:
    yield f"{name}.conv1", (width, before, 3, 3)
    yield f"{name}.time_emb_proj", (width, time)
    yield f"{name}.conv2", (width, width, 3, 3)
    if before != width:
        yield f"{name}.conv_shortcut", (width, before, 1, 1)


SD15 = UNet((320, 640, 1280, 1280), (1, 1, 1, 0), 768, linear_projection=False)
SDXL = UNet((320, 640, 1280), (0, 2, 10), 2048, linear_projection=True)
