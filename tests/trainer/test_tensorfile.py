"""Files that we lay out ourselves: the library's bytes."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import load, save

from lora_trainer.tensorfile import _TYPES, HostBuffers, TensorFile, with_header

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a.step": torch.tensor(7.0),
    "a.half": torch.ones(5, dtype=torch.bfloat16),
    "a.index": torch.arange(3),
    "a.flag": torch.tensor([True, False, True]),
    "a.byte": torch.arange(7, dtype=torch.uint8),
    "a.double": torch.ones(2, dtype=torch.float64),
    "empty": torch.empty(0, 4),
}


def test_a_file_without_texts_is_the_library_s_to_the_byte():
    assert bytes(TensorFile(TENSORS).finished()) == save(TENSORS)
    assert bytes(TensorFile({}).finished()) == save({})


def test_every_number_format_lies_where_the_library_puts_it():
    tensors = {f"t{n}": torch.zeros(3, dtype=dtype) for n, dtype in enumerate(reversed(_TYPES))}
    assert bytes(TensorFile(tensors).finished()) == save(tensors)


def test_texts_come_in_the_order_of_their_names_and_the_hash_is_that_of_the_content():
    trap = '"sshs_model_hash":"' + "0" * 64 + '"'  # a text that looks like the place of the hash
    data = with_header(TENSORS, {"b": "ü", "a": trap, "z": trap})
    size = int.from_bytes(data[:8], "little")
    texts = json.loads(data[8 : 8 + size])["__metadata__"]
    assert list(texts) == ["a", "b", "sshs_model_hash", "z"]
    assert (texts["a"], texts["z"]) == (trap, trap)
    assert texts["sshs_model_hash"] == hashlib.sha256(data[8 + size :]).hexdigest()
    assert data[8 + size :] == save(TENSORS)[8 + int.from_bytes(save(TENSORS)[:8], "little") :]
    assert all(torch.equal(tensor, TENSORS[key]) for key, tensor in load(data).items())


def test_a_file_keeps_the_values_of_the_moment_it_was_made_in():
    tensor = torch.ones(3)
    file = TensorFile({"x": tensor})
    tensor.add_(1)
    assert load(bytes(file.finished()))["x"].tolist() == [1, 1, 1]
    assert file.tensors["x"].tolist() == [1, 1, 1]


def test_tensors_that_are_not_contiguous_are_written_as_they_read():
    turned = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(load(bytes(TensorFile({"x": turned}).finished()))["x"], turned)


@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (4, 8)])
def test_memory_is_used_again_as_far_as_it_reaches(sizes):
    buffers = HostBuffers()
    first, second = (TensorFile({"x": torch.full((size,), 1.0 * size)}, name="a", buffers=buffers) for size in sizes)
    assert load(bytes(second.finished()))["x"].tolist() == [1.0 * sizes[1]] * sizes[1]
    shared = first.tensors["x"].untyped_storage().data_ptr() == second.tensors["x"].untyped_storage().data_ptr()
    assert shared == (sizes[1] <= sizes[0])
