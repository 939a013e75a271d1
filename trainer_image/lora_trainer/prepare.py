"""Everything between the claim and the first step: data, base model, cache, adapter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_api.parallelism import is_sharded
from lora_api.precision import choose_precision
from lora_api.run import RunConfig
from lora_api.shrink import passes
from lora_api.stores import Credentials
from lora_api.training import Precision
from lora_trainer.data.cache import TensorCache, text_key
from lora_trainer.data.captions import prompts_of
from lora_trainer.data.encode import captions_of, encode_captions, encode_masks, encode_pictures
from lora_trainer.data.models import Sources
from lora_trainer.data.samples import Fingerprints, Sample, digest, plan_samples
from lora_trainer.environment import Environment
from lora_trainer.errors import ConfigurationError, DataError
from lora_trainer.families.folder import ModelError, import_pipeline
from lora_trainer.families.registry import family_for
from lora_trainer.memory.compiling import compile_blocks
from lora_trainer.memory.measure import MemoryWatch
from lora_trainer.memory.placing import checkpointing, loading_device, offload_blocks, place_base
from lora_trainer.objective import take_noise_settings
from lora_trainer.reporting import Reporter
from lora_trainer.runtime import TORCH_DTYPE, Group
from lora_trainer.spread import Spread
from lora_trainer.stages import Datasets, stages_of, views_of
from lora_trainer.stopping import StopRequest

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel
    from lora_trainer.families.family import Family
    from lora_trainer.networks import Trainable

log = logging.getLogger(__name__)

Condition = dict[str, Tensor]


@dataclass
class Prepared:
    """What the loop and the samples need."""

    model: BaseModel
    adapter: Trainable
    spread: Spread
    samples: list[Sample]
    views: dict[Datasets, range]  # where those of each way to train the datasets lie in it
    cache: TensorCache
    data_digest: str
    prompts: tuple[str, ...]
    conditions: list[Condition]  # of the prompts, on rank 0
    negative: Condition | None  # of the empty prompt, where there are prompts
    memory: MemoryWatch
    precision: Precision

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
        sample_prompts: Of the settings in force.
        fresh: Whether training begins here; False where a checkpoint will replace the start values.
    """

    run: RunConfig
    environment: Environment
    credentials: Credentials | None
    device: torch.device
    group: Group
    reporter: Reporter
    stop: StopRequest
    sample_prompts: tuple[str, ...] = ()
    fresh: bool = True

    def prepare(self) -> Prepared:
        """Everything the loop needs.

        Raises:
            ConfigurationError: When model and configuration do not fit.
            DataError: When the data can't be used.
            StoreError: When a store can't be used.
        """
        try:
            return self._prepare()
        except (ConfigurationError, DataError, ModelError) as error:
            raise type(error)(self._as_the_user_calls_it(str(error))) from error

    def _as_the_user_calls_it(self, text: str) -> str:
        """A message about a copy speaks of the original: people know s3://bucket/prefix, not our cache."""
        for folder, location in self._sources.copies.items():
            text = text.replace(folder, location.rstrip("/"))
        return text

    def _prepare(self) -> Prepared:
        config = self.run.config
        family = _family(config.model.arch)
        model_folder, samples, views = self._first_on_each_node(family)
        memory = MemoryWatch(self.device)
        if self.environment.leads:
            memory.expect(config, model_folder, self.precision, self.group.world_size)
        model = self._load(family, model_folder)
        self._take_assistant(family, model)
        if self._sharded:  # only shares of the denoiser go to the device, when it is sharded
            model.device, model.text_format = self.device, config.model.quantize_te
            model.pipe.vae.to(self.device)
        else:
            place_base(model, config.model, self.device)
        prompts = prompts_of(self.sample_prompts, config.trigger_word)
        cache = TensorCache(self.environment.cache_folder / "tensors")
        self._encode(samples, prompts, model, cache)
        self._say("adding the adapter")
        adapter, spread = self._add_adapter(model)
        self._save_memory(model)
        if not self._sharded:  # last: DDP asks where parameters lie, and those of resting blocks have moved by now
            spread.module = self.group.wrap(model.denoiser, whole=config.network.type == "full")
        model.forward_module = spread.module or model.denoiser
        conditions = [cache.load(text_key(prompt, model.text_identity)) for prompt in prompts]
        negative = cache.load(text_key("", model.text_identity)) if prompts else None
        return Prepared(
            model,
            adapter,
            spread,
            samples,
            views,
            cache,
            digest(samples),
            prompts,
            conditions,
            negative,
            memory,
            self.precision,
        )

    def _load(self, family: Family, folder: Path) -> BaseModel:
        train = self.run.config.train
        try:
            self._say("importing libraries")
            import_pipeline(folder)
            self._say("loading the base model")
            cpu = torch.device("cpu")
            device = cpu if self._sharded else loading_device(self.run.config.model, self.device)
            model = family.load(folder, dtype=TORCH_DTYPE[self.precision], device=device)
        except ModelError as error:
            raise ConfigurationError(f"config.model.name_or_path: {error}") from error
        try:
            take_noise_settings(model, train)
        except ValueError as error:
            raise ConfigurationError(f"config.{error}") from error
        return model

    @cached_property
    def precision(self) -> Precision:
        """The number format that `train.dtype` comes to on this device; said once."""
        kind = self.device.type
        bf16 = kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        precision, reason = choose_precision(self.run.config.train.dtype, kind, bf16=bf16)
        log.info("number format %s: %s", precision, reason)
        return precision

    def _first_on_each_node(self, family: Family) -> tuple[Path, list[Sample], dict[Datasets, range]]:
        """Model folder, samples and their views; one process of each node downloads and reads, the others find its work done."""
        leads = self.environment.local_rank == 0
        if not leads:
            self.group.wait(self.stop.check)
        model_folder = self._sources.model(self.run.config.model)
        self._sources.assistant(self.run.config.model)
        self._first_adapter()
        datasets = self.run.config.datasets
        folders = [
            self._sources.dataset(each.folder_path, f"config.datasets[{n}].folder_path")
            for n, each in enumerate(datasets)
        ]
        masks = [
            self._sources.dataset(each.mask_path, f"config.datasets[{n}].mask_path") if each.mask_path else None
            for n, each in enumerate(datasets)
        ]
        prints = Fingerprints(self.environment.cache_folder / "fingerprints.json")
        samples: list[Sample] = []
        views: dict[Datasets, range] = {}
        for view in views_of(stages_of(self.run.config)):
            found = plan_samples(
                list(zip(folders, view, strict=True)),
                trigger=self.run.config.trigger_word,
                multiple=family.size_multiple,
                prints=prints,
                masks=masks,
                report=self._say,
            )
            views[view] = range(len(samples), len(samples) + len(found))
            samples += found
        if leads:
            prints.save()
            self.group.wait(self.stop.check)
        return model_folder, samples, views

    def _add_adapter(self, model: BaseModel) -> tuple[Trainable, Spread]:
        """What is trained, and how it lies on the ranks. Whole models are sharded first: each share is made fp32 by itself."""
        whole = self.run.config.network.type == "full"
        try:
            spread = self._shard(model, ()) if self._sharded and whole else Spread(self.group)
            adapter = _add_adapter(model, self.run, self._first_adapter(), spread)
            if self._sharded and not whole:
                spread = self._shard(model, adapter.parameters())
            adapter.spread = spread
        except ValueError as error:
            raise ConfigurationError(f"config.{error}") from error
        return adapter, spread

    def _shard(self, model: BaseModel, whole: Sequence[torch.nn.Parameter]) -> Spread:
        from lora_trainer.sharding import shard  # takes seconds to import

        self._say("sharding the base model")
        return shard(model, self.group, whole)

    @cached_property
    def _sharded(self) -> bool:
        return is_sharded(self.run.config, self.group.world_size)

    @cached_property
    def _sources(self) -> Sources:
        environment = self.environment
        return Sources(
            self.run,
            environment.cache_folder,
            self.credentials,
            environment.credentials_folder,
            self._say,
            download=environment.local_rank == 0,
        )

    def _first_adapter(self) -> Path | None:
        """The local file of `network.init_from`; None where nothing begins with it."""
        location = self.run.config.network.init_from
        if location is None or not self.fresh:
            return None
        return self._sources.file(location, "config.network.init_from")

    def _take_assistant(self, family: Family, model: BaseModel) -> None:
        """Merges the training adapter; says so where a distilled model has none."""
        from lora_trainer.networks import merge_assistant

        file = self._sources.assistant(self.run.config.model)
        if file is None:
            if advice := family.distilled(model):
                log.warning("config.model: the base model is distilled and loses that by training; %s", advice)
            return
        self._say("merging the training adapter")
        try:
            model.assistant = merge_assistant(model.pipe, file)
        except ValueError as error:
            raise ConfigurationError(f"config.model.assistant_lora_path: {error}") from error

    def _save_memory(self, model: BaseModel) -> None:
        """Lets blocks rest, compiles and recomputes where that is asked for, or has become necessary."""
        train, shrunk = self.run.config.train, self.run.shrunk
        if shrunk:
            log.info(
                "device memory ran out before: trained with %s instead of %s", passes(train, shrunk), passes(train, 0)
            )
        offloaded = offload_blocks(model, self.run.config.model, self.device) is not None
        if train.compile:
            compile_blocks(model, self.environment.cache_folder)
        if passes(train, shrunk).gradient_checkpointing:
            try:
                model.enable_gradient_checkpointing(*checkpointing(train, offloaded=offloaded))
            except (ValueError, AttributeError, NotImplementedError) as error:
                if train.gradient_checkpointing:
                    raise
                # nobody asked for what it can't do
                log.warning("this model can't recompute its activations: %s", error)

    def _encode(self, samples: list[Sample], prompts: tuple[str, ...], model: BaseModel, cache: TensorCache) -> None:
        share = (self.environment.local_rank, self.environment.local_world_size)
        encode_pictures(samples, model, cache, share=share, report=self._say)
        encode_masks(samples, model, cache, share=share, report=self._say)
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


def _add_adapter(model: BaseModel, run: RunConfig, first: Path | None, spread: Spread) -> Trainable:
    from lora_trainer.networks import add_adapter, train_all, warm_start

    network = run.config.network
    if network.type == "full":
        adapter: Trainable = train_all(model, network, spread)
    else:
        train = run.config.train
        adapter = add_adapter(
            model, network, seed=train.seed, denoiser=train.train_unet, text_encoders=train.train_text_encoder
        )
    if first is not None:
        with model.plain_weights():
            warm_start(model, adapter, first)
    return adapter
