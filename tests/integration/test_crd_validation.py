"""The CRDs in a real API server: it refuses what the types refuse, and fills in what the types fill in."""

from __future__ import annotations

import pytest

from lora_api.crd import job_crd, profile_crd
from lora_api.job import LoRATrainingJob
from lora_api.problems import parse
from lora_api.profile import LoRATrainingProfile
from tests.bad_manifests import BAD, JOB, PROFILE, Bad, changed
from tests.cluster.apiserver import ApiServer
from tests.cluster.report import wait_until

JOBS = "/apis/lora-operator.io/v1alpha1/namespaces/default/loratrainingjobs"
PROFILES = "/apis/lora-operator.io/v1alpha1/loratrainingprofiles"
STRICT = "?fieldValidation=Strict"
ADVICE = "what defines the run is fixed once the job exists; create a new job"


@pytest.fixture(scope="module")
def server():
    with ApiServer() as running:
        for crd in (job_crd(), profile_crd()):
            code, body = running.api.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
            assert code == 201, body
        wait_until(
            "the new kinds", lambda: running.api.get(JOBS) is not None and running.api.get(PROFILES) is not None, 30
        )
        yield running


@pytest.fixture
def api(server):
    yield server.api
    server.api.request("DELETE", JOBS)
    server.api.request("DELETE", PROFILES)


def create(api, manifest, *, dry_run=False):
    path = JOBS if manifest["kind"] == "LoRATrainingJob" else PROFILES
    return api.request("POST", path + STRICT + ("&dryRun=All" if dry_run else ""), manifest)


def update(api, created, path, value):
    """Puts `created` back with `value` at `path`, as somebody would who edits it."""
    return api.request("PUT", f"{JOBS}/{created['metadata']['name']}{STRICT}", changed(created, path, value))


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.server], ids=str)
def test_the_server_refuses_what_the_types_refuse_and_names_the_field(api, bad: Bad):
    code, answer = create(api, bad.manifest, dry_run=True)
    assert code in (400, 422), answer
    assert bad.field in answer["message"]


@pytest.mark.parametrize(("manifest", "kind"), [(JOB, LoRATrainingJob), (PROFILE, LoRATrainingProfile)])
def test_the_server_fills_in_the_defaults_of_the_types(api, manifest, kind):
    code, created = create(api, manifest)
    assert code == 201, created
    ours = parse(kind, manifest).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert created["spec"] == ours["spec"]


def test_a_key_without_a_value_is_a_key_left_out(api):
    raw = changed(changed(JOB, "spec.config.save", None), "spec.config.train", {"lr": None, "steps": 5})
    code, created = create(api, raw)
    assert code == 201, created
    assert created["spec"]["config"]["save"]["save_every"] == 500
    assert created["spec"]["config"]["train"]["lr"] == 1e-4


def test_messages_of_cross_field_rules_are_those_of_the_types(api):
    _, answer = create(api, changed(JOB, "spec.config.train.train_text_encoder", True), dry_run=True)
    assert (
        "spec.config.train.train_text_encoder: Invalid value: true is not supported for model.arch zimage; set it to false"
        in answer["message"]
    )


FIXED = [
    ("spec.profile", "other", "found other, but the job was created with default"),
    ("spec.output.path", "elsewhere", "found elsewhere, but the job was created with unset"),
    ("spec.output.store", "other", "found other, but the job was created with default"),
    ("spec.resources.nodes", 2, "found 2, but the job was created with unset"),
    ("spec.config.device", "cpu", "found cpu, but the job was created with auto"),
    ("spec.config.trigger_word", "mascotxyz", "found mascotxyz, but the job was created with unset"),
    ("spec.config.model.arch", "flux2_klein_4b", "found flux2_klein_4b, but the job was created with zimage"),
    ("spec.config.network.linear", 32, "found 32, but the job was created with 16"),
    ("spec.config.network.dropout", 0.5, "found 0.5, but the job was created with 0"),
    ("spec.config.network.only_if_contains", ["attn"], "differs from what the job was created with"),
    ("spec.config.datasets", [{"folder_path": "s3://datasets/other"}], "differs from what the job was created with"),
    ("spec.config.train.batch_size", 2, "found 2, but the job was created with 1"),
    ("spec.config.train.gradient_checkpointing", True, "found true, but the job was created with false"),
]


@pytest.mark.parametrize(("path", "value", "said"), FIXED, ids=[path for path, *_ in FIXED])
def test_what_defines_the_run_cannot_change(api, path, value, said):
    _, created = create(api, JOB)
    code, answer = update(api, created, path, value)
    assert code == 422
    assert f"{path}: Forbidden: {said}; {ADVICE}" in answer["message"]


def test_items_of_lists_cannot_be_added_removed_or_edited(api):
    two = changed(JOB, "spec.config.datasets", [{"folder_path": "a"}, {"folder_path": "b"}])
    _, created = create(api, two)
    datasets = created["spec"]["config"]["datasets"]
    for other in (
        datasets[:1],
        [*datasets, datasets[0]],
        datasets[::-1],
        [datasets[0], datasets[1] | {"num_repeats": 2}],
    ):
        code, answer = update(api, created, "spec.config.datasets", other)
        assert code == 422
        assert "spec.config.datasets: Forbidden: differs" in answer["message"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.config.trigger_word", "w"),
        ("spec.config.network.conv", 16),
        ("spec.output.path", "p"),
        ("spec.resources.cpu", "4"),
    ],
)
def test_an_optional_field_cannot_be_taken_away(api, path, value):
    _, created = create(api, changed(JOB, path, value))
    parent, _, name = path.rpartition(".")
    kept = created
    for part in parent.split("."):
        kept = kept[part]
    code, answer = update(api, created, parent, {key: item for key, item in kept.items() if key != name})
    assert code == 422
    assert f"{path}: Forbidden: found unset, but the job was created with {value}; {ADVICE}" in answer["message"]


@pytest.mark.parametrize(
    ("path", "field", "before"),
    [
        ("spec.config.network", "spec.config.network.linear", 32),
        ("spec.config.train", "spec.config.train.batch_size", 4),
    ],
)
def test_taking_a_whole_block_away_is_a_change_of_what_stood_in_it(api, path, field, before):
    _, created = create(api, changed(JOB, field, before))
    code, answer = update(api, created, path, {})
    assert code == 422
    assert f"{field}: Forbidden" in answer["message"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.runPolicy", {"suspend": True, "queueName": "gpu", "backoffLimit": 0, "stallTimeoutSeconds": 0}),
        ("spec.config.save", {"save_every": 7, "max_step_saves": 2, "dtype": "fp32"}),
        ("spec.config.sample", {"prompts": ["a [trigger]"], "sample_every": 5}),
        ("spec.config.train.steps", 12),
        ("spec.config.train.lr", 0.5),
    ],
)
def test_what_may_change_while_a_job_runs_can_change(api, path, value):
    _, created = create(api, JOB)
    code, answer = update(api, created, path, value)
    assert code == 200, answer


STAGES = [{"steps": 3, "batch_size": 2}, {"steps": 6, "lr": 1e-3}]


@pytest.mark.parametrize("last", [{"steps": 9, "lr": 1e-3}, {"lr": 1e-3}])
def test_the_last_stage_may_become_longer(api, last):
    _, created = create(api, changed(JOB, "spec.config.train", {"stages": STAGES}))
    train = created["spec"]["config"]["train"] | {"steps": 12, "stages": [STAGES[0], last]}
    code, answer = update(api, created, "spec.config.train", train)
    assert code == 200, answer


@pytest.mark.parametrize(
    "stages", [[{"steps": 3}, STAGES[1]], [STAGES[0], {"steps": 6}], [{"steps": 9}], [], [*STAGES, {"steps": 1}]]
)
def test_nothing_else_of_the_stages_can_change(api, stages):
    _, created = create(api, changed(JOB, "spec.config.train", {"stages": STAGES}))
    code, answer = update(api, created, "spec.config.train.stages", stages)
    assert code == 422
    assert (
        f"spec.config.train.stages: Forbidden: differs from what the job was created with; {ADVICE}"
        in answer["message"]
    )


def test_what_may_change_must_still_be_right(api):
    _, created = create(api, JOB)
    code, answer = update(api, created, "spec.config.save.max_step_saves", 0)
    assert code == 422
    assert "spec.config.save.max_step_saves" in answer["message"]


def test_unknown_fields_are_dropped_where_the_client_asks_for_no_strictness(api):
    code, created = api.request("POST", JOBS + "?fieldValidation=Ignore", changed(JOB, "spec.config.save.max_saves", 1))
    assert code == 201
    assert "max_saves" not in created["spec"]["config"]["save"]
