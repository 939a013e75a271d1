"""Metrics for Prometheus. What concerns jobs is read from the cache at each scrape, so that a gone job leaves nothing."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from lora_api.job import Phase
from lora_operator.cache import JobCache, JobView

_RESTART_CAUSES = {
    "preemption": "preemption",
    "failure": "failure",
    "outOfMemory": "out_of_memory",
    "infrastructure": "infrastructure",
}
_MAX_JOBS = 2000  # with series of their own: a scrape must stay small whatever the number of jobs
_DURATIONS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class JobsCollector(Collector):
    """Turns the cache into series: how many jobs, and how far each unfinished one is."""

    def __init__(self, cache: JobCache) -> None:
        self._cache = cache

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """All series; of jobs that are not finished, at most the first two thousand."""
        phases = self._cache.phases()
        jobs = GaugeMetricFamily("lora_operator_jobs", "LoRATrainingJobs by phase.", labels=["phase"])
        for phase in sorted({*(str(known) for known in Phase), *phases}):
            jobs.add_metric([phase], phases[phase])
        yield jobs
        yield GaugeMetricFamily(
            "lora_operator_checkpoints",
            "Committed checkpoints that are kept, of all jobs.",
            value=sum(view.checkpoints for _, view in self._cache),
        )
        yield from self._progress()

    def _progress(self) -> Iterable[GaugeMetricFamily]:
        labels = ["namespace", "name"]
        step = GaugeMetricFamily("lora_operator_job_step", "Optimizer steps done.", labels=labels)
        steps = GaugeMetricFamily("lora_operator_job_steps", "Optimizer steps in all.", labels=labels)
        speed = GaugeMetricFamily("lora_operator_job_steps_per_second", "Optimizer steps per second.", labels=labels)
        kept = GaugeMetricFamily("lora_operator_job_checkpoints", "Checkpoints kept.", labels=labels)
        unfinished = [(key, view) for key, view in self._cache if not view.finished]
        for key, view in unfinished[:_MAX_JOBS]:
            names = [key.namespace, key.name]
            step.add_metric(names, view.step)
            steps.add_metric(names, view.steps)
            kept.add_metric(names, view.checkpoints)
            if view.steps_per_second is not None:
                speed.add_metric(names, view.steps_per_second)
        yield from (step, steps, speed, kept)


class Metrics:
    """All metrics of one process, in a registry of its own."""

    def __init__(self, cache: JobCache) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter that nobody reads
        self.registry = registry = CollectorRegistry()
        registry.register(JobsCollector(cache))
        build = Gauge("lora_operator_build_info", "Always 1; the version is a label.", ["version"], registry=registry)
        build.labels(version("lora-operator")).set(1)
        self._reconciles = Histogram(
            "lora_operator_reconcile_duration_seconds",
            "Time of one look at a job.",
            ["result"],
            buckets=_DURATIONS,
            registry=registry,
        )
        self._errors = Counter(
            "lora_operator_reconcile_errors_total", "Looks at a job that failed.", ["kind"], registry=registry
        )
        self._requests = Counter(
            "lora_operator_api_requests_total",
            "Requests to the API server, watches excepted; code 0 is no answer.",
            ["method", "code"],
            registry=registry,
        )
        self._restarts = Counter("lora_operator_restarts_total", "Restarts of jobs.", ["cause"], registry=registry)
        self._finished = Counter("lora_operator_jobs_finished_total", "Jobs that ended.", ["result"], registry=registry)
        self._removed = Counter(
            "lora_operator_checkpoints_removed_total", "Checkpoints that retention removed.", registry=registry
        )
        self._lost = Counter("lora_operator_lost_steps_total", "Steps that had to be done again.", registry=registry)
        self.queue_waiting = Gauge("lora_operator_queue_depth", "Jobs that wait for a look.", registry=registry)
        self.queue_running = Gauge("lora_operator_queue_running", "Jobs that are looked at now.", registry=registry)
        self.lag = Gauge("lora_operator_event_loop_lag_seconds", "How late the event loop is.", registry=registry)
        for cause in _RESTART_CAUSES.values():
            self._restarts.labels(cause)
        for result in ("Succeeded", "Failed"):
            self._finished.labels(result)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def saw_request(self, method: str, code: int) -> None:
        """An answer of the API server."""
        self._requests.labels(method, str(code)).inc()

    def saw_reconcile(self, seconds: float, error: str | None = None) -> None:
        """One look at a job; `error` is the kind of what failed: api, refused or unexpected."""
        self._reconciles.labels("error" if error else "ok").observe(seconds)
        if error:
            self._errors.labels(error).inc()

    def saw_change(self, before: JobView, after: JobView) -> None:
        """A job's status changed; counts what happened in between. A new object of the same name counts from zero."""
        if before.uid != after.uid:
            return
        for cause, label in _RESTART_CAUSES.items():
            self._restarts.labels(label).inc(max(0, after.restarts.get(cause, 0) - before.restarts.get(cause, 0)))
        self._removed.inc(max(0, after.checkpoints_removed - before.checkpoints_removed))
        self._lost.inc(max(0, after.lost_steps - before.lost_steps))
        if after.outcome is not None and before.outcome != after.outcome:
            self._finished.labels(after.outcome).inc()
