"""What is left when the operator's process ends, in whatever way and at whatever moment."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.apiserver import ApiServer
from tests.contract.cluster_objects import a_job
from tests.integration.operator_process import Hands, Operator, child_of, eventually


def test_a_killed_operator_goes_on_without_doing_anything_twice(
    chart_server: ApiServer, team: Hands, tmp_path: Path
) -> None:
    with Operator(chart_server, tmp_path) as first:
        team.apply(a_job(namespace=team.namespace))
        child = child_of(team)
        eventually("the event", lambda: "Created" in [reason for reason, _ in team.events()])
        first.kill()
    with Operator(chart_server, tmp_path) as second:
        eventually("a look", lambda: second.metric("lora_operator_reconcile_duration_seconds_count") > 0)
        time.sleep(2)
        assert [(c["metadata"]["name"], c["metadata"]["uid"]) for c in team.children()] == [
            ("mascot-1", child["metadata"]["uid"])
        ]
        assert [reason for reason, _ in team.events()].count("Created") == 1


@pytest.mark.parametrize("moment", [0.0, 0.05, 0.15, 0.3, 0.5])
def test_an_operator_killed_at_any_moment_leaves_one_attempt(
    chart_server: ApiServer, team: Hands, tmp_path: Path, moment: float
) -> None:
    with Operator(chart_server, tmp_path) as first:
        team.apply(a_job(namespace=team.namespace))
        time.sleep(moment)
        first.kill()
    with Operator(chart_server, tmp_path):
        child_of(team)
        eventually("the status", lambda: team.status("mascot").get("childName") == "mascot-1")
        time.sleep(0.5)
        assert [child["metadata"]["name"] for child in team.children()] == ["mascot-1"]
        assert team.status("mascot")["attempt"] == 1


def test_sigterm_ends_the_process_quickly_and_with_zero(chart_server: ApiServer, team: Hands, tmp_path: Path) -> None:
    with Operator(chart_server, tmp_path) as operator:
        team.apply(a_job(namespace=team.namespace))
        child_of(team)
        began = time.monotonic()
        assert operator.terminate() == 0
        assert time.monotonic() - began < 8
        assert "Traceback" not in operator.text()


def test_jobs_made_while_the_operator_was_away_are_started(
    chart_server: ApiServer, team: Hands, tmp_path: Path
) -> None:
    team.apply(a_job(namespace=team.namespace))
    with Operator(chart_server, tmp_path):
        child_of(team)
