"""Everything between the claim and the first step: data, base model, cache, adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_api.run import RunConfig
from lora_api.stores import Credentials
from lora_trainer.data.cache import TensorCache, text_key
from lora_trainer.data.captions import fill_trigger
from lora_trainer.data.encode import captions_of, encode_captions, encode_pictures
from lora_trainer.data.locations import local_folder
from lora_trainer.data.samples import Fingerprints, Sample, digest, plan_samples
from lora_trainer.environment import Environment
from lora_trainer.errors import ConfigurationError
from lora_trainer.families.registry import family_for
from lora_trainer.reporting import Reporter
from lora_trainer.runtime import TORCH_DTYPE, Group
from lora_trainer.stopping import StopRequest

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel, Family
    from lora_trainer.networks import Adapter

Condition = dict[str, Tensor]


@dataclass
class Prepared:
    """What the loop and the samples need."""

    model: BaseModel
    adapter: Adapter
    samples: list[Sample]
    cache: TensorCache
    data_digest: str
    prompts: tuple[str, ...]
    conditions: list[Condition]  # of the prompts, on rank 0
    negative: Condition | None  # of the empty prompt, where there are prompts

    def conditions_now(self) -> tuple[list[Condition], Condition | None]:
        """`conditions` and `negative` as the text encoders stand now."""
        negative = self.negative and self.model.refreshed(self.negative, "")
        pairs = zip(self.conditions, self.prompts, strict=True)
        return [self.model.refreshed(condition, prompt) for condition, prompt in pairs], negative


@dataclass
class Preparation:
    """Prepares one rank.

    Args:
        run: What to train.
        environment: Of this process.
        credentials: Of S3 stores.
        device: Of this rank.
        group: All ranks.
        reporter: Told what is being done.
        stop: Checked between pictures.
    """

    run: RunConfig
    environment: Environment
    credentials: Credentials | None
    device: torch.device
    group: Group
    reporter: Reporter
    stop: StopRequest

    def prepare(self) -> Prepared:
        """Everything the loop needs.

        Raises:
            ConfigurationError: When model and configuration do not fit.
            DataError: When the data can't be used.
            StoreError: When a store can't be used.
        """
        config = self.run.config
        family = _family(config.model.arch)
        model_folder, samples = self._first_on_each_node(family)
        self._say("loading the base model")
        model = family.load(model_folder, dtype=TORCH_DTYPE[config.train.dtype], device=self.device)
        prompts = tuple(fill_trigger(prompt, config.trigger_word) for prompt in config.sample.prompts)
        cache = TensorCache(self.environment.cache_folder / "tensors")
        self._encode(samples, prompts, model, cache)
        adapter = _add_adapter(model, self.run)
        if config.train.gradient_checkpointing:
            model.enable_gradient_checkpointing()
        conditions = [cache.load(text_key(prompt, model.text_identity)) for prompt in prompts]
        negative = cache.load(text_key("", model.text_identity)) if prompts else None
        return Prepared(model, adapter, samples, cache, digest(samples), prompts, conditions, negative)

    def _first_on_each_node(self, family: Family) -> tuple[Path, list[Sample]]:
        """Model folder and samples; one process of each node downloads and reads, the others find its work done."""
        leads = self.environment.local_rank == 0
        if not leads:
            self.group.wait(self.stop.check)
        model_folder = self._folder("config.model.name_or_path", self.run.config.model.name_or_path)
        datasets = self.run.config.datasets
        folders = [
            self._folder(f"config.datasets[{n}].folder_path", each.folder_path) for n, each in enumerate(datasets)
        ]
        prints = Fingerprints(self.environment.cache_folder / "fingerprints.json")
        samples = plan_samples(
            list(zip(folders, datasets, strict=True)),
            trigger=self.run.config.trigger_word,
            multiple=family.size_multiple,
            prints=prints,
            report=self._say,
        )
        if leads:
            prints.save()
            self.group.wait(self.stop.check)
        return model_folder, samples

    def _folder(self, field: str, location: str) -> Path:
        return local_folder(
            location,
            field,
            self.run,
            cache=self.environment.cache_folder,
            credentials=self.credentials,
            report=self._say,
            download=self.environment.local_rank == 0,
        )

    def _encode(self, samples: list[Sample], prompts: tuple[str, ...], model: BaseModel, cache: TensorCache) -> None:
        share = (self.environment.local_rank, self.environment.local_world_size)
        encode_pictures(samples, model, cache, share=share, report=self._say)
        texts = captions_of(samples) + ([*prompts, ""] if prompts else [])
        encode_captions(texts, model, cache, share=share, report=self._say)
        self.group.wait(self.stop.check)
        model.free_encoders()

    def _say(self, text: str) -> None:
        self.stop.check()
        self.reporter.detail(text)


def _family(arch: str) -> Family:
    try:
        return family_for(arch)
    except ValueError as error:
        raise ConfigurationError(f"config.{error}") from error


def _add_adapter(model: BaseModel, run: RunConfig) -> Adapter:
    from lora_trainer.networks import add_adapter

    try:
        return add_adapter(
            model,
            run.config.network,
            seed=run.config.train.seed,
            denoiser=run.config.train.train_unet,
            text_encoders=run.config.train.train_text_encoder,
        )
    except ValueError as error:
        raise ConfigurationError(f"config.{error}") from error
