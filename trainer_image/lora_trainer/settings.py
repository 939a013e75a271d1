"""What may change while a job runs, and how `control.json` changes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from lora_api.config import SampleConfig, SaveConfig, TrainerConfig
from lora_api.order import without_its_end
from lora_api.problems import InvalidDocument, parse
from lora_api.run import Control

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The runtime parameters in force. Generation 0 is the run configuration itself."""

    generation: int
    steps: int
    lr: float
    save: SaveConfig
    sample: SampleConfig
    own: TrainerConfig  # the run configuration

    @classmethod
    def of(cls, config: TrainerConfig, control: Control | None = None) -> Settings:
        """The settings of a configuration, with the newest `control.json` taken over."""
        own = cls(0, config.train.steps, config.train.lr, config.save, config.sample, config)
        return own if control is None else own.taking(control)

    @property
    def save_every(self) -> int:
        """Steps between checkpoints."""
        return self.save.save_every

    @property
    def max_step_saves(self) -> int:
        """Checkpoints that are kept."""
        return self.save.max_step_saves

    @property
    def config(self) -> TrainerConfig:
        """The configuration as it is in force."""
        train = self.own.train.model_copy(update={"steps": self.steps, "lr": self.lr})
        if train.steps != self.own.train.steps and train.stages:
            *others, last = train.stages  # the last one becomes longer or shorter, whatever length it was given
            train = train.model_copy(update={"stages": (*others, last.model_copy(update={"steps": None}))})
        return self.own.model_copy(update={"train": train, "save": self.save, "sample": self.sample})

    @property
    def document(self) -> Control:
        """These settings as a control document."""
        return Control(
            generation=self.generation,
            steps=self.steps,
            lr=self.lr,
            save_every=self.save_every,
            max_step_saves=self.max_step_saves,
            sample=self.sample.model_dump(mode="json"),
            save=self.save.model_dump(mode="json"),
        )

    def taking(self, control: Control) -> Settings:
        """These settings with a control document taken over; a block that does not fit is logged and left out."""
        blocks = {
            "train": {"steps": control.steps, "lr": control.lr},
            "save": {**control.save, "save_every": control.save_every, "max_step_saves": control.max_step_saves},
            "sample": control.sample,
        }
        config = self.config
        for name, values in blocks.items():
            try:
                config = _with_block(config, name, values)
            except InvalidDocument as error:
                log.warning("%s; %s stays as it was", error, name)
        return Settings(control.generation, config.train.steps, config.train.lr, config.save, config.sample, self.own)


def _with_block(config: TrainerConfig, name: str, values: dict[str, Any]) -> TrainerConfig:
    """The configuration with some values of a block replaced, and all its rules asked again."""
    wire = config.model_dump(mode="json", exclude_unset=True)
    wire[name] = {**wire.get(name, {}), **values}
    if "train" in wire:
        wire["train"] = without_its_end(wire["train"])  # new steps are those of the last stage too
    return parse(TrainerConfig, wire, "control")
