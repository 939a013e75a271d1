"""Which checkpoints stay, which go, in which order."""

from __future__ import annotations

from lora_api import layout
from lora_operator.core.retention import ledger, plan_retention, without_deletion
from tests.unit.builders import NOW, RunBuilder, checkpoint, word


def steps(manifests: object) -> list[tuple[int, int]]:
    return [(m.step, m.start) for m in manifests]  # type: ignore[attr-defined]


def a_run(*at: int, start: int = 1) -> RunBuilder:
    return RunBuilder().with_checkpoints(*(checkpoint(step, start) for step in at))


def test_the_newest_stay_and_the_manifests_of_the_others_go_before_their_files() -> None:
    found = plan_retention(a_run(100, 200, 300, 400).build(), 2, NOW)
    assert steps(found.kept) == [(400, 1), (300, 1)]
    assert steps(found.expired) == [(200, 1), (100, 1)]
    manifests, files = found.delete_keys
    assert manifests == (layout.checkpoint_manifest(200, 1), layout.checkpoint_manifest(100, 1))
    assert set(files) == {layout.checkpoint_folder(step, 1) + "adapter.safetensors" for step in (100, 200)}


def test_with_few_enough_nothing_goes() -> None:
    found = plan_retention(a_run(100, 200).build(), 2, NOW)
    assert (found.expired, found.delete_keys) == ((), ())


def test_order_is_by_step_and_not_by_name_or_time() -> None:
    found = plan_retention(a_run(900, 10_000, 2_000).build(), 1, NOW)
    assert steps(found.kept) == [(10_000, 1)]


def test_of_one_step_the_newer_start_counts_and_the_other_is_superseded() -> None:
    run = a_run(100, 200).with_checkpoints(checkpoint(200, 2)).build()
    assert steps(ledger(run.manifests)) == [(200, 2), (100, 1)]
    found = plan_retention(run, 2, NOW)
    assert steps(found.kept) == [(200, 2), (100, 1)]
    assert steps(found.expired) == [(200, 1)]


def test_the_checkpoint_that_a_running_start_went_on_from_stays_until_it_has_its_own() -> None:
    run = a_run(100, 200, 300).with_progress(120, start=2, resumed_from_step=100)
    found = plan_retention(run.build(), 1, NOW)
    assert steps(found.kept) == [(300, 1), (100, 1)]
    committed = run.with_checkpoints(checkpoint(400, 2)).build()
    assert steps(plan_retention(committed, 1, NOW).kept) == [(400, 2)]


def test_a_start_that_has_ended_holds_nothing() -> None:
    run = a_run(100, 200, 300).with_progress(120, start=2, resumed_from_step=100, exit=word(85)).build()
    assert steps(plan_retention(run, 1, NOW).kept) == [(300, 1)]


def test_a_rejected_checkpoint_does_not_count_and_goes_when_a_good_one_is_there() -> None:
    bad = checkpoint(300)
    found = plan_retention(a_run(100, 200, 300).with_rejected(bad).build(), 2, NOW)
    assert steps(found.kept) == [(200, 1), (100, 1)]
    assert steps(found.expired) == [(300, 1)]


def test_when_all_are_rejected_nothing_is_deleted() -> None:
    both = [checkpoint(100), checkpoint(200)]
    found = plan_retention(RunBuilder().with_checkpoints(*both).with_rejected(*both).build(), 1, NOW)
    assert found.delete_keys == ()
    assert steps(found.kept) == [(200, 1)]


def test_leftovers_go_when_they_are_old_and_do_not_count() -> None:
    folder = layout.checkpoint_folder(250, 1)
    run = a_run(100, 200, 300).with_object(folder + "adapter.safetensors", age_seconds=30)
    assert plan_retention(run.build(), 3, NOW).delete_keys == ()
    run = a_run(100, 200, 300).with_object(folder + "adapter.safetensors", age_seconds=3700)
    assert plan_retention(run.build(), 3, NOW).delete_keys == ((folder + "adapter.safetensors",),)


def test_an_old_file_of_a_kept_checkpoint_is_no_leftover_however_deep_it_lies() -> None:
    run = RunBuilder().with_checkpoints(checkpoint(100), age_seconds=9999)
    run = run.with_object(layout.checkpoint_folder(100, 1) + "ema/part/0.bin", age_seconds=9999)
    assert plan_retention(run.build(), 1, NOW).delete_keys == ()


def test_a_checkpoint_whose_manifest_this_version_can_not_read_is_left_alone() -> None:
    folder = layout.checkpoint_folder(500, 1)
    run = a_run(100).with_object(folder + layout.MANIFEST, age_seconds=9999)
    run = run.with_object(folder + "adapter.safetensors", age_seconds=9999)
    assert plan_retention(run.build(), 1, NOW).delete_keys == ()


def test_only_listed_keys_are_deleted_whatever_a_manifest_names() -> None:
    evil = checkpoint(100).model_copy(
        update={"files": (checkpoint(1).files[0].model_copy(update={"name": "../../../../other-job/run.json"}),)}
    )
    run = a_run(200, 300).build()
    run = (
        RunBuilder()
        .with_checkpoints(*run.manifests)
        .build()
        .__class__(
            location=run.location,
            manifests=(*run.manifests, evil),
            objects=(*run.objects, *a_run(100).build().objects),
        )
    )
    found = plan_retention(run, 2, NOW)
    assert steps(found.expired) == [(100, 1)]
    listed = {item.key for item in run.objects}
    assert {key for batch in found.delete_keys for key in batch} <= listed


def test_a_manifest_that_lies_elsewhere_than_it_says_is_not_expired_over_and_over() -> None:
    run = a_run(200, 300).build()
    lost = checkpoint(100)
    run = run.__class__(location=run.location, manifests=(*run.manifests, lost), objects=run.objects)
    found = plan_retention(run, 2, NOW)
    assert (found.expired, steps(found.kept)) == ((), [(300, 1), (200, 1)])


def test_every_key_lies_below_checkpoints() -> None:
    found = plan_retention(a_run(*range(100, 1100, 100)).build(), 1, NOW)
    assert all(key.startswith(layout.CHECKPOINTS) for batch in found.delete_keys for key in batch)


def test_without_deletion_all_of_them_are_kept() -> None:
    found = without_deletion(plan_retention(a_run(100, 200, 300).build(), 1, NOW))
    assert steps(found.kept) == [(300, 1), (200, 1), (100, 1)]
    assert (found.expired, found.delete_keys) == ((), ())
