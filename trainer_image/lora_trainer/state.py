"""The state of a training run as files, and back, to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load
from torch import Tensor

from lora_trainer.averages import Average, standing_in
from lora_trainer.checkpoint import ADAPTER, OPTIMIZER, STATE, TRAINING
from lora_trainer.optimizers import OptimizerState, load_state, state_of
from lora_trainer.runtime import synchronise
from lora_trainer.tensorfile import HostBuffers, TensorFile, take_part

if TYPE_CHECKING:
    from lora_trainer.networks import Trainable

_VERSION = 1
_ADDED = ("stage", "stage_iteration")  # older checkpoints lack them; they are of runs with one stage


@dataclass
class TrainState:
    """Counters of a run. `iteration` runs ahead of `step` by the updates that were skipped."""

    step: int = 0  # updates done
    iteration: int = 0  # passes through the loop: decides data and noise
    nonfinite_in_a_row: int = 0
    loss_scale: float = 65536.0  # fp16 only
    good_steps: int = 0  # fp16 only: updates since the scale last changed
    stage: int = 0  # see stages
    stage_iteration: int = 0  # the iteration in which that stage began


Files = dict[str, TensorFile | bytes]


def snapshot(
    adapter: Trainable,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    extra: Mapping[str, Any],
    *,
    buffers: HostBuffers | None = None,
    average: Average | None = None,
) -> Files:
    """The files of a checkpoint with the values of now. That of the adapter is a file that diffusers loads, unless its
    header says otherwise.

    Values on a GPU are still on their way until the device is synchronised.

    Args:
        adapter: Saved in fp32.
        optimizer: Its state is named by the parameters' positions, which `Trainable` fixes.
        state: Counters.
        extra: Facts for people and for checks: settings in force, data digest, versions.
        buffers: Memory of an earlier snapshot, which nobody reads any more; None makes new memory.
        average: What the adapter's file holds instead; what training goes on with has a file of its own then.
    """
    scales = [group["lr_scale"] for group in optimizer.param_groups]
    optimizer_state = state_of(optimizer)
    counters = {"version": _VERSION, **asdict(state), "lr_scales": scales, **extra}
    if facts := optimizer_state.facts():
        counters["optimizer"] = facts
    header = {"step": str(state.step), **adapter.checkpoint_header()}
    with standing_in(average):
        files: Files = {
            ADAPTER: TensorFile(
                adapter.checkpoint_tensors(), header, name=ADAPTER, buffers=buffers, whole=adapter.spread.gathered
            )
        }
    if average is not None:
        files[TRAINING] = TensorFile(adapter.checkpoint_tensors(), name=TRAINING, buffers=buffers)
    return files | {
        OPTIMIZER: TensorFile(optimizer_state.tensors, name=OPTIMIZER, buffers=buffers, whole=adapter.spread.gathered),
        STATE: json.dumps(counters, indent=1, sort_keys=True).encode(),
    }


def finished(files: Mapping[str, TensorFile | bytes]) -> dict[str, bytes | memoryview]:
    """The bytes of a snapshot's files; every value has arrived."""
    return {name: each.finished() if isinstance(each, TensorFile) else each for name, each in files.items()}


def take_part_in_snapshot(adapter: Trainable, optimizer: torch.optim.Optimizer) -> None:
    """What the other ranks do while rank 0 takes a snapshot of a sharded model: they give their shares, file by file."""
    for tensors in (adapter.checkpoint_tensors(), state_of(optimizer).tensors):
        take_part(tensors, adapter.spread.gathered)


def pack(
    adapter: Trainable,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    extra: Mapping[str, Any],
    average: Average | None = None,
) -> dict[str, bytes]:
    """The files of a checkpoint as bytes; arguments as in `snapshot`."""
    files = snapshot(adapter, optimizer, state, extra, average=average)
    for device in {parameter.device for parameter in adapter.parameters()}:
        synchronise(device)
    return {name: bytes(content) for name, content in finished(files).items()}


def unpack(
    files: Mapping[str, bytes],
    adapter: Trainable,
    optimizer: torch.optim.Optimizer,
    average: Average | None = None,
) -> TrainState:
    """Puts a checkpoint's files into adapter, optimizer and average; returns the counters.

    Raises:
        ValueError: When they do not fit this adapter.
    """
    counters = json.loads(files[STATE])
    if counters["version"] != _VERSION:
        raise ValueError(f"{STATE}: version {counters['version']} found, {_VERSION} expected")
    adapter.load_checkpoint_tensors(load(files[ADAPTER]))
    if average is not None:
        average.restart()
    if TRAINING in files:
        adapter.load_checkpoint_tensors(load(files[TRAINING]))
    facts = counters.get("optimizer", {})
    tensors = load(files[OPTIMIZER])
    if adapter.spread.sharded:
        tensors = _shares(tensors, adapter, optimizer)
    load_state(optimizer, OptimizerState(tensors, **facts))
    for group, scale in zip(optimizer.param_groups, counters["lr_scales"], strict=True):
        group["lr_scale"] = scale  # relative to the rate the run began with, whatever `train.lr` says by now
    return TrainState(
        **{name: counters.get(name, 0) if name in _ADDED else counters[name] for name in asdict(TrainState())}
    )


def _shares(tensors: Mapping[str, Tensor], adapter: Trainable, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """This rank's share of each moment that has the shape of its parameter; counters are the same on all ranks."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners = {name: parameters[int(name.partition(".")[0])] for name in tensors}
    return {
        name: adapter.spread.like(owners[name], tensor)
        if tensor.shape == owners[name].shape and tensor.ndim
        else tensor
        for name, tensor in tensors.items()
    }
