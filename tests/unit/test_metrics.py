"""Metrics: names, label sets that stay bounded, series that go with their job."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from lora_operator.cache import JobCache, JobView
from lora_operator.core.views import JobKey
from lora_operator.metrics import Metrics


def a_view(**facts: object) -> JobView:
    plain = {"uid": "u", "version": 1, "wish": (), "profile": "default", "phase": "Running", "finished": False}
    return JobView(**{**plain, **facts})  # type: ignore[arg-type]


def families(metrics: Metrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def test_every_metric_has_the_prefix_a_help_text_and_a_conventional_name() -> None:
    for family in text_string_to_metric_families(Metrics(JobCache()).render().decode()):
        assert re.fullmatch(r"lora_operator_[a-z_]+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        if family.type == "histogram":
            assert family.name.endswith("_seconds")


def test_jobs_are_counted_by_phase_and_absent_phases_are_zero() -> None:
    cache = JobCache()
    cache.put(JobKey("a", "one"), a_view(uid="1"))
    cache.put(JobKey("a", "two"), a_view(uid="2"))
    cache.put(JobKey("a", "three"), a_view(uid="3", phase="Failed", finished=True))
    counts = {labels["phase"]: value for labels, value in families(Metrics(cache))["lora_operator_jobs"]}
    assert (counts["Running"], counts["Failed"], counts["Queued"]) == (2, 1, 0)


def test_a_job_has_series_while_it_is_unfinished_and_none_afterwards() -> None:
    cache, key = JobCache(), JobKey("team-a", "mascot")
    metrics = Metrics(cache)
    cache.put(key, a_view(step=40, steps=100, steps_per_second=2.5, checkpoints=3))
    names = {"namespace": "team-a", "name": "mascot"}
    found = families(metrics)
    assert found["lora_operator_job_step"] == [(names, 40)]
    assert found["lora_operator_job_steps"] == [(names, 100)]
    assert found["lora_operator_job_steps_per_second"] == [(names, 2.5)]
    assert found["lora_operator_job_checkpoints"] == [(names, 3)]
    cache.put(key, a_view(version=2, finished=True, outcome="Succeeded"))
    assert "lora_operator_job_step" not in families(metrics)
    cache.put(key, a_view(version=3))
    cache.remove(key)
    assert "lora_operator_job_step" not in families(metrics)


def test_the_number_of_series_is_bounded_whatever_the_number_of_jobs() -> None:
    cache = JobCache()
    for index in range(5000):
        cache.put(JobKey("a", f"job-{index}"), a_view(uid=str(index)))
    found = families(Metrics(cache))
    assert len(found["lora_operator_job_step"]) == 2000
    assert sum(value for _, value in found["lora_operator_jobs"]) == 5000
