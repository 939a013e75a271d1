"""What may change while a job runs, and how `control.json` changes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from lora_api.config import SampleConfig, TrainerConfig
from lora_api.problems import InvalidDocument, parse
from lora_api.run import Control

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The runtime parameters in force. Generation 0 is the run configuration itself."""

    generation: int
    steps: int
    lr: float
    save_every: int
    sample: SampleConfig

    @classmethod
    def of(cls, config: TrainerConfig, control: Control | None = None) -> Settings:
        """The settings of a configuration, with the newest `control.json` taken over."""
        own = cls(0, config.train.steps, config.train.lr, config.save.save_every, config.sample)
        return own if control is None else own.taking(control)

    def taking(self, control: Control) -> Settings:
        """These settings with a control document taken over; a sample block that does not fit is logged and left out."""
        sample = self.sample
        if control.sample:
            try:
                sample = parse(SampleConfig, {**sample.model_dump(mode="json"), **control.sample}, "control.sample")
            except InvalidDocument as error:
                log.warning("%s; samples are drawn as before", error)
        return Settings(control.generation, control.steps, control.lr, control.save_every, sample)
