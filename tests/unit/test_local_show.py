"""What is said about loading a result holds for every kind of result."""

from __future__ import annotations

from lora_operator.local.show import diffusers_lines


def test_an_adapter_is_loaded_from_its_file(tmp_path):
    lines = diffusers_lines("base", f"{tmp_path}/adapter.safetensors")
    assert lines[-1] == f'pipe.load_lora_weights("{tmp_path}/adapter.safetensors")'


def test_an_adapter_of_several_kinds_is_loaded_with_all_of_its_files(tmp_path):
    (tmp_path / "adapter.lokr.safetensors").touch()
    *_, first, second, last = diffusers_lines("base", f"{tmp_path}/adapter.safetensors")
    assert first == f'pipe.load_lora_weights("{tmp_path}/adapter.safetensors", adapter_name="first")'
    assert second == f'pipe.load_lora_weights("{tmp_path}/adapter.lokr.safetensors", adapter_name="lokr")'
    assert last == "pipe.set_adapters(['first', 'lokr'])"


def test_the_adapters_of_two_experts_go_where_they_belong(tmp_path):
    (tmp_path / "adapter_low_noise.safetensors").touch()
    *_, first, second, last = diffusers_lines("base", f"{tmp_path}/adapter_high_noise.safetensors")
    assert first == f'pipe.load_lora_weights("{tmp_path}/adapter_high_noise.safetensors", adapter_name="high_noise")'
    assert second.endswith('adapter_name="low_noise", load_into_transformer_2=True)')
    assert last == "pipe.set_adapters(['high_noise', 'low_noise'])"
    (alone,) = diffusers_lines("base", f"{tmp_path}/adapter_low_noise.safetensors")[2:]
    assert alone == f'pipe.load_lora_weights("{tmp_path}/adapter_low_noise.safetensors", load_into_transformer_2=True)'


def test_a_whole_denoiser_is_loaded_as_a_component():
    lines = diffusers_lines("base", "run/final/transformer/diffusion_pytorch_model.safetensors")
    assert 'AutoModel.from_pretrained("run/final/transformer")' in lines[1]


def test_nothing_is_claimed_about_layouts_for_other_programs():
    assert diffusers_lines("base", "run/final/adapter.kohya.safetensors") == []
