"""The report of a run: curves, samples by step, data, speed, restarts, on one page that needs nothing from elsewhere."""

from __future__ import annotations

from lora_trainer.report.facts import RunHistory, dataset_facts, read_history
from lora_trainer.report.page import Report, page
from lora_trainer.report.pictures import Gallery, read_gallery

__all__ = ["Gallery", "Report", "RunHistory", "dataset_facts", "page", "read_gallery", "read_history"]
