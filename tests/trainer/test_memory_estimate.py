"""The memory estimate against the tensors that are really there, for every family."""

from __future__ import annotations

import gc

import pytest
import torch

from lora_api.archs import Arch
from lora_api.config import TrainerConfig
from lora_api.memory import estimate_of
from lora_api.memory.estimate import shapes_for
from lora_api.memory.released import RELEASED, SMALLER
from lora_api.memory.shapes import ModelShapes
from lora_api.memory.trained import denoiser_targets, layers_of, trained_parameters
from lora_api.training import Precision
from lora_trainer.networks import add_adapter, train_all
from lora_trainer.optimizers import build_optimizer
from lora_trainer.runtime import TORCH_DTYPE


def config(arch: str, folder: object = "/nowhere", **blocks: object) -> TrainerConfig:
    document = {"model": {"arch": arch, "name_or_path": str(folder)}, "datasets": [{"folder_path": "/d"}]}
    return TrainerConfig.model_validate(document | blocks)


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def resident(model) -> int:
    """Bytes of denoiser, VAE and whatever text encoders are loaded."""
    parts = [model.denoiser, model.pipe.vae, *(getattr(model.pipe, name) for name in model.text_parts)]
    modules = [part for part in parts if part is not None]
    return sum(bytes_of([*m.parameters(), *(b for n, b in m.named_buffers() if n in m.state_dict())]) for m in modules)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("arch", [arch for arch in Arch if arch != "flux2_klein_9b"])
def test_weights_adapter_and_optimizer_are_counted_to_the_byte(arch, precision, load_tiny, tiny_model_folder):
    described = config(arch, tiny_model_folder(arch), network={"type": "lora", "linear": 3})
    estimate = estimate_of(described, shapes_for(described), precision=precision)
    model = load_tiny(arch, TORCH_DTYPE[precision])
    assert estimate.source == str(tiny_model_folder(arch))
    model.free_encoders()
    gc.collect()
    assert estimate.weights == resident(model)
    adapter = add_adapter(model, described.network, seed=0)
    assert estimate.adapter == bytes_of(adapter.parameters()) == estimate.gradients
    optimizer = build_optimizer(adapter.parameters(), described.train)
    for parameter in adapter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    assert estimate.optimizer == bytes_of(state)


@pytest.mark.parametrize("arch", [arch for arch in Arch if arch != "flux2_klein_9b"])
def test_text_encoders_are_counted_to_the_byte(arch, load_tiny, tiny_model_folder):
    described = config(arch, tiny_model_folder(arch))
    estimate = estimate_of(described, shapes_for(described), precision=Precision.FP32)
    model = load_tiny(arch)
    before = resident(model)
    model.encode_text("a red cube")
    assert estimate.text_encoders == resident(model) - before
    assert estimate.caching >= resident(model)


NETWORKS = {
    "dora": {"type": "dora", "linear": 3},
    "loha": {"type": "loha", "linear": 3},
    "whole lokr": {"type": "lokr", "linear": 3},
    "lokr with a factor": {"type": "lokr", "linear": 3, "lokr_factor": 4},
    "lokr in two factors": {"type": "lokr", "linear": 2, "lokr_full_rank": False},
    "lokr of high rank": {"type": "lokr", "linear": 64, "lokr_full_rank": False},
    "some layers": {"type": "lora", "linear": 3, "only_if_contains": ["attn"], "ignore_if_contains": ["to_v"]},
    "rules": {
        "type": "lora",
        "linear": 3,
        "modules": [{"match": "*to_q", "freeze": True}, {"match": "*to_k", "type": "loha", "linear": 2}],
    },
}


@pytest.mark.parametrize("arch", ["flux2_klein_4b", "sdxl", "wan22"])
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_adapters_of_every_type_are_counted_to_the_byte(network, arch, load_tiny, tiny_model_folder):
    described = config(arch, tiny_model_folder(arch), network=network)
    adapter = add_adapter(load_tiny(arch), described.network, seed=0)
    trained = trained_parameters(described, shapes_for(described))
    assert trained.parameters * 4 == bytes_of(adapter.parameters())
    assert trained.tensors == len(adapter.parameters())
    assert len(trained.layers) == adapter.module_count


@pytest.mark.parametrize("kind", ["lora", "lokr", "loha", "dora"])
def test_adapters_of_convolutions_are_counted_to_the_byte(kind, load_tiny, tiny_model_folder):
    network = {"type": kind, "linear": 3, "conv": 2, "lokr_full_rank": False}
    described = config("sd15", tiny_model_folder("sd15"), network=network)
    adapter = add_adapter(load_tiny("sd15"), described.network, seed=0)
    assert trained_parameters(described, shapes_for(described)).parameters * 4 == bytes_of(adapter.parameters())


@pytest.mark.parametrize("arch", ["flux1", "sd15", "sdxl"])
def test_trained_text_encoders_are_counted_to_the_byte(arch, load_tiny, tiny_model_folder):
    described = config(arch, tiny_model_folder(arch), train={"train_text_encoder": True})
    estimate = estimate_of(described, shapes_for(described), precision=Precision.FP32)
    model = load_tiny(arch)
    adapter = add_adapter(model, described.network, seed=0, text_encoders=True)
    assert estimate.adapter == bytes_of(adapter.parameters())
    model.pipe.vae.encoder = None
    assert estimate.weights + estimate.adapter == resident(model)


@pytest.mark.parametrize("arch", ["zimage", "sd15"])
def test_full_fine_tuning_is_counted_to_the_byte(arch, load_tiny, tiny_model_folder):
    described = config(arch, tiny_model_folder(arch), network={"type": "full", "ignore_if_contains": ["norm"]})
    estimate = estimate_of(described, shapes_for(described), precision=Precision.BF16)
    model = load_tiny(arch, torch.bfloat16)
    model.free_encoders()
    trained = train_all(model, described.network)
    assert (estimate.weights, estimate.adapter) == (resident(model), 0)
    assert estimate.gradients == bytes_of(trained.parameters())


# ---------------------------------------------------------------------- the released models
def real_denoiser(name: str):
    """The real class with the released configuration, without memory."""
    import diffusers as d

    builders = {
        "black-forest-labs/FLUX.1-dev": lambda: d.FluxTransformer2DModel(guidance_embeds=True),
        "black-forest-labs/FLUX.2-klein-base-4B": lambda: flux2(5, 20, 24, 7680, guidance=False),
        "black-forest-labs/FLUX.2-klein-base-9B": lambda: flux2(8, 24, 32, 12288, guidance=False),
        "black-forest-labs/FLUX.2-dev": lambda: flux2(8, 48, 48, 15360, guidance=True),
        "stable-diffusion-v1-5/stable-diffusion-v1-5": lambda: d.UNet2DConditionModel(
            cross_attention_dim=768, attention_head_dim=8
        ),
        "stabilityai/stable-diffusion-xl-base-1.0": lambda: d.UNet2DConditionModel(
            down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            block_out_channels=[320, 640, 1280], cross_attention_dim=2048, transformer_layers_per_block=[1, 2, 10],
            attention_head_dim=[5, 10, 20], use_linear_projection=True, addition_embed_type="text_time",
            addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        ),
        "Qwen/Qwen-Image": lambda: d.QwenImageTransformer2DModel(
            num_layers=60, attention_head_dim=128, num_attention_heads=24, joint_attention_dim=3584, in_channels=64,
            out_channels=16,
        ),
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": lambda: d.WanTransformer3DModel(
            num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=30
        ),
    }  # fmt: skip
    if name.startswith("Tongyi-MAI"):
        build = lambda: d.ZImageTransformer2DModel(  # noqa: E731 one of many
            in_channels=16, dim=3840, n_layers=30, n_refiner_layers=2, n_heads=30, n_kv_heads=30, cap_feat_dim=2560
        )
    elif name in builders:
        build = builders[name]
    else:
        build = lambda: d.WanTransformer3DModel(  # noqa: E731 as above
            num_attention_heads=40, attention_head_dim=128, ffn_dim=13824, num_layers=40
        )
    with torch.device("meta"):
        return build()


def flux2(double, single, heads, joint, *, guidance):
    import diffusers as d

    return d.Flux2Transformer2DModel(
        patch_size=1, in_channels=128, num_layers=double, num_single_layers=single, attention_head_dim=128,
        num_attention_heads=heads, joint_attention_dim=joint, guidance_embeds=guidance,
    )  # fmt: skip


MODELS = {m.name: (arch, m) for arch, m in RELEASED.items()} | {m.name: (arch, m) for (arch, _), m in SMALLER.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_released_models_is_what_the_real_classes_have(name):
    arch, released = MODELS[name]
    real = {key: tuple(p.shape) for key, p in real_denoiser(name).named_parameters()}
    tensors = next(iter(released.shapes().denoisers.values()))
    assert sum(shape.count for shape in tensors.values()) == sum(torch.Size(size).numel() for size in real.values())
    assert {key: tensors[key].sizes for key in tensors if key in real} == {
        key: real[key] for key in tensors if key in real
    }
    listed = dict(denoiser_targets(arch, tensors))
    from lora_api.memory.shapes import Shape

    expected = dict(denoiser_targets(arch, {key: Shape(size) for key, size in real.items()}))
    assert listed == expected
    assert listed
    assert dict(layers_of(tensors)).keys() >= listed.keys()


# ---------------------------------------------------------------------- what is not counted to the byte
def activations(arch: str, shapes: ModelShapes, **changes) -> int:
    blocks = {"train": {"dtype": "bf16"} | changes.pop("train", {})}
    if changes:
        blocks["datasets"] = [{"folder_path": "/d", "resolution": [1024]} | changes]
    return estimate_of(config(arch, **blocks), shapes, precision=Precision.BF16).activations


@pytest.mark.parametrize("arch", list(Arch))
def test_activations_grow_with_batch_and_resolution_and_shrink_with_checkpointing(arch):
    shapes = RELEASED[arch].shapes()
    plain = activations(arch, shapes)
    assert plain > 0
    assert activations(arch, shapes, train={"batch_size": 2}) == pytest.approx(2 * plain, rel=1e-6)
    assert activations(arch, shapes, resolution=[1024]) > 1.5 * plain
    assert activations(arch, shapes, train={"gradient_checkpointing": True}) < 0.4 * plain


def test_clips_need_more_than_pictures():
    shapes = RELEASED[Arch.WAN21].shapes()
    assert activations("wan21", shapes, num_frames=17) > 3 * activations("wan21", shapes, num_frames=1)


def test_samples_count_only_where_there_are_prompts():
    shapes = RELEASED[Arch.ZIMAGE].shapes()
    assert estimate_of(config("zimage"), shapes, precision=Precision.BF16).sampling == 0
    small, large = (
        estimate_of(
            config("zimage", sample={"prompts": ["a cube"], "width": side, "height": side}),
            shapes,
            precision=Precision.BF16,
        ).sampling
        for side in (512, 2048)
    )
    assert 0 < small < large


def weights(arch: str, **model) -> int:
    described = config(arch)
    described = described.model_copy(update={"model": described.model.model_copy(update=model)})
    return estimate_of(described, RELEASED[Arch(arch)].shapes(), precision=Precision.BF16).weights


@pytest.mark.parametrize("arch", list(Arch))
def test_resting_blocks_are_not_counted_but_for_three(arch):
    whole = weights(arch)
    some, none = weights(arch, offload_blocks=0.5), weights(arch, offload_blocks=1.0)
    assert none < some < whole
    assert weights(arch, offload_blocks=1.0, quantize="nf4") < none


def test_the_largest_batch_of_all_stages_counts():
    shapes = RELEASED[Arch.ZIMAGE].shapes()
    plain = activations("zimage", shapes, train={"batch_size": 4})
    stages = [{"steps": 5, "batch_size": 4}, {"steps": 5, "batch_size": 1, "resolution": [512]}]
    assert activations("zimage", shapes, train={"stages": stages}) == plain
