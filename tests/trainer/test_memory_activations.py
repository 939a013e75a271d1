"""The formula of activations against the tensors that autograd really saves, on blocks of usable width."""

from __future__ import annotations

import math

import pytest
import torch

from lora_api.archs import Arch
from lora_api.memory.activations import ERROR, Batch, activation_bytes
from lora_api.memory.shapes import Shape

WIDTH, HEADS, SIDE = 256, 2, 512  # pixels: 1,024 tokens


def saved_bytes(run, parameters) -> int:
    """Bytes of the storages that autograd saved and that are no parameter."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(size for size, _ in held.values())


def flux2(dtype):
    import diffusers as d

    model = d.Flux2Transformer2DModel(
        patch_size=1, in_channels=64, num_layers=1, num_single_layers=2, attention_head_dim=128,
        num_attention_heads=HEADS, joint_attention_dim=64, guidance_embeds=False,
    )  # fmt: skip
    tokens, text = (SIDE // 16) ** 2, 512
    return model, lambda: model(
        hidden_states=torch.randn(1, tokens, 64, dtype=dtype), timestep=torch.tensor([0.5], dtype=dtype), guidance=None,
        encoder_hidden_states=torch.randn(1, text, 64, dtype=dtype), txt_ids=torch.zeros(text, 4),
        img_ids=torch.zeros(tokens, 4),
    )  # fmt: skip


def zimage(dtype):
    import diffusers as d

    model = d.ZImageTransformer2DModel(
        in_channels=16, dim=WIDTH, n_layers=3, n_refiner_layers=0, n_heads=HEADS, n_kv_heads=HEADS, cap_feat_dim=64
    )
    picture, text = torch.randn(16, 1, SIDE // 8, SIDE // 8, dtype=dtype), torch.randn(128, 64, dtype=dtype)
    return model, lambda: model([picture], torch.tensor([0.5], dtype=dtype), [text])


def wan(dtype):
    import diffusers as d

    model = d.WanTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=128, ffn_dim=704, num_layers=3, text_dim=64
    )
    clip = torch.randn(1, 16, 1, SIDE // 8, SIDE // 8, dtype=dtype)
    return model, lambda: model(
        hidden_states=clip, timestep=torch.tensor([500.0]), encoder_hidden_states=torch.randn(1, 512, 64, dtype=dtype)
    )


def unet(dtype):
    import diffusers as d

    model = d.UNet2DConditionModel(cross_attention_dim=64, attention_head_dim=8, block_out_channels=[64, 128, 256, 256])
    latents = torch.randn(1, 4, SIDE // 8, SIDE // 8, dtype=dtype)
    return model, lambda: model(latents, torch.tensor([5]), encoder_hidden_states=torch.randn(1, 77, 64, dtype=dtype))


CASES = {"flux2_klein_4b": flux2, "zimage": zimage, "wan21": wan, "sd15": unet}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("arch", CASES)
def test_the_estimate_of_activations_is_as_near_as_it_says(arch, dtype):
    from peft import LoraConfig, inject_adapter_in_model

    from lora_api.memory.trained import denoiser_targets

    torch.manual_seed(0)
    model, run = CASES[arch](dtype)
    model.to(dtype).requires_grad_(requires_grad=False)
    shapes = {name: Shape(tuple(p.shape)) for name, p in model.named_parameters()}
    targets = [name for name, sizes in denoiser_targets(Arch(arch), shapes) if len(sizes) == 2]
    inject_adapter_in_model(LoraConfig(r=4, target_modules=targets), model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        measured = saved_bytes(run, model.parameters())
    item = torch.empty((), dtype=dtype).element_size()
    estimated = activation_bytes(arch, shapes, Batch(1, SIDE), item_bytes=item, every=None)
    assert abs(math.log(estimated / measured)) < math.log(1 + ERROR)
