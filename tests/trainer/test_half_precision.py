"""The families of large models in bf16, as they are trained: base in bf16, adapter in fp32, forward pass under autocast."""

from __future__ import annotations

import pytest
import torch

from lora_api.network import NetworkConfig
from lora_trainer.networks import add_adapter


@pytest.mark.parametrize("arch", ["wan21", "wan22", "qwen_image", "flux2_dev", "zimage:turbo"])
def test_a_bf16_base_answers_about_like_the_fp32_one_and_trains_an_fp32_adapter(arch, load_tiny):
    answers = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = load_tiny(arch, dtype)
        adapter = add_adapter(model, NetworkConfig(linear=2), seed=0)
        x0 = torch.stack([model.encode_pixels(torch.zeros(1, 3, 64, 64))] * 2)
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
        conditioning = model.collate(
            [model.encode_text(caption) for caption in ("a red cube", "a green ball on grass")]
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            v = model.velocity(noise, torch.tensor([0.4, 0.95]), conditioning)
        assert v.dtype == torch.float32
        v.pow(2).mean().backward()
        assert (
            {p.dtype for p in adapter.parameters()} == {p.grad.dtype for p in adapter.parameters()} == {torch.float32}
        )
        answers[dtype] = v.detach()
    difference = (answers[torch.bfloat16] - answers[torch.float32]).pow(2).mean().sqrt()
    assert difference < 0.05 * answers[torch.float32].pow(2).mean().sqrt()
