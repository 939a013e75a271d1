"""How much memory a start takes: what was expected before anything was loaded, and the peak that was measured."""

from __future__ import annotations

import logging
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from lora_api.config import TrainerConfig
from lora_api.memory import Estimate, estimate_of
from lora_api.memory.estimate import GIB, shapes_for
from lora_api.memory.words import does_not_fit, estimate_lines
from lora_api.training import Precision

log = logging.getLogger(__name__)

_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


class MemoryWatch:
    """Follows the memory of one device from now on.

    Attributes:
        estimate: What was expected; None before `expect`, and where the base model's shapes are not known.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.estimate: Estimate | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before = self._peak()

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES

    @property
    def peak_bytes(self) -> int:
        """Most that torch held on a GPU at one time; on a CPU, by how much the process grew, its libraries included."""
        return self._peak() - (0 if self._device.type == "cuda" else self._before)

    def expect(self, config: TrainerConfig, folder: Path, precision: Precision, processes: int = 1) -> None:
        """Estimates and logs; says so where it will not fit. Never a reason to stop: the estimate may be wrong."""
        shapes = shapes_for(config, folder)
        if shapes is None:
            log.info("memory: not estimated, the shapes of %s are not known", config.model.name_or_path)
            return
        self.estimate = estimate_of(config, shapes, precision=precision, processes=processes)
        for line in estimate_lines(config, self.estimate):
            log.info("%s", line)
        if self._device.type == "cuda":
            available_gib = torch.cuda.get_device_properties(self._device).total_memory / GIB
            if warning := does_not_fit(config, self.estimate, available_gib):
                log.warning("memory: %s", warning)

    def facts(self) -> dict[str, Any]:
        """Estimate and measurement in GiB, for the records of a run."""
        measured = round(self.peak_bytes / GIB, 3)
        figures = self.estimate.gib() if self.estimate else {}
        if self.estimate:
            grown = "" if self._device.type == "cuda" else " of the process, with its libraries,"
            log.info("memory: the peak%s was %.2f GiB, %.2f were expected", grown, measured, figures["total"])
        return {"measured_peak": measured, "measured_on": self._device.type, **figures}
