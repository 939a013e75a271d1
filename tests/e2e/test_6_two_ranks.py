"""Two pods, one process group."""

from __future__ import annotations

from tests.e2e.world import World, manifest


def test_two_ranks_find_each_other_and_when_one_is_deleted_both_restart_and_finish(world: World) -> None:
    with world.namespace("story-ranks") as namespace:
        run = f"{namespace}/pair"
        world.apply(manifest(namespace, "pair", steps=600, save_every=50, resources={"nodes": 2}))
        world.wait_checkpoint(run, seconds=180)
        first = {pod.metadata.name for pod in world.pods(namespace)}
        assert len(first) == 2
        (victim,) = [name for name in first if name.startswith("pair-1-1-")]
        world.core.delete_namespaced_pod(victim, namespace)

        job = world.wait_phase(namespace, "pair", "Succeeded", seconds=240)
        assert job["status"]["restarts"]["preemption"] == 1, job["status"]["restarts"]
        assert job["status"]["restartsTotal"] == 1
        assert job["status"]["attempt"] == 2
        assert job["status"]["lostSteps"] == 0
        second = {pod.metadata.name for pod in world.pods(namespace) if pod.metadata.name.startswith("pair-2-")}
        assert len(second) == 2
        assert world.progress(run)["resumedFromStep"] > 0
        logs = [world.cluster.kubectl("logs", name, "-n", namespace) for name in sorted(second)]
        for rank, log in enumerate(logs):
            assert f"[rank {rank}]" in log, log
            assert "resumed from checkpoints/" in log, log
