"""Prometheus metrics of rank 0, read from the snapshot when they are asked for: no cost to a step."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lora_trainer.reporting import Snapshot

log = logging.getLogger(__name__)

_GAUGES = {
    "step": ("Updates done", "step"),
    "steps": ("Updates in all", "steps"),
    "loss": ("Loss, smoothed", "loss"),
    "learning_rate": ("Learning rate of the last update", "learning_rate"),
    "grad_norm": ("Gradient norm of the last update, before clipping", "grad_norm"),
    "steps_per_second": ("Updates per second, smoothed", "steps_per_second"),
    "eta_seconds": ("Seconds until the last update at this speed", "eta_seconds"),
    "save_seconds": ("Longest checkpoint save of this start", "save_seconds"),
    "checkpoint_step": ("Updates in the newest committed checkpoint", "committed_step"),
}


class SnapshotCollector(Collector):
    """The snapshot as Prometheus metrics named `lora_trainer_*`."""

    def __init__(self, now: Snapshot) -> None:
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        now = self._now
        for name, (text, attribute) in _GAUGES.items():
            value = getattr(now, attribute)
            if value is not None:
                yield GaugeMetricFamily(f"lora_trainer_{name}", text, value=value)
        if now.steps_per_second is not None:
            speed = now.steps_per_second * now.samples_per_step
            yield GaugeMetricFamily("lora_trainer_samples_per_second", "Samples per second, smoothed", value=speed)
        yield CounterMetricFamily(
            "lora_trainer_nonfinite_steps", "Updates skipped in this start", value=now.nonfinite_steps
        )
        yield CounterMetricFamily(
            "lora_trainer_lost_steps", "Updates done twice, over all starts", value=now.lost_steps
        )


def serve(now: Snapshot, port: int) -> None:
    """Serves /metrics in a daemon thread; a port that is taken is logged and trained without."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(now))
    try:
        start_http_server(port, registry=registry)
    except OSError as error:
        log.warning("no metrics on port %d: %s", port, error)
