"""observe -> plan -> apply -> write status -> emit events, until nothing changes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

from lora_api import layout
from lora_api.job import JobStatus, LoRATrainingJob, Phase, status_to_wire
from lora_api.names import child_name
from lora_api.problems import InvalidDocument, Problem, parse
from lora_api.profile import LoRATrainingProfile, StoreSpec
from lora_api.store import Store, StoreCredentialsError, StoreError, StoreMissingError
from lora_operator.adapters.rundir import RunDirectories, delete_everything
from lora_operator.core.conditions import is_terminal
from lora_operator.core.plan import plan
from lora_operator.core.read import attempt_of, child_view, pod_view, read_status
from lora_operator.core.validate import problems_of_job
from lora_operator.core.views import ChildView, JobKey, Manifest, Observed, Plan, RunView
from lora_operator.ports import Clock, Cluster, RefusedError, Stores

logger = logging.getLogger(__name__)
_PASSES = 6  # an intention and the act upon it are two passes; more than these in a row would be a loop
_AFTER_TOO_MANY_PASSES = 1.0
_LEAST_SECONDS = 0.1


class Metrics(Protocol):
    """What the reconciler counts."""

    def reconciled(self, key: JobKey, status: JobStatus | None, removed_checkpoints: int) -> None:
        """A pass has ended; None when the job is gone."""
        ...


@dataclass(frozen=True)
class _Target:
    """A job's spec with everything it refers to."""

    job: LoRATrainingJob | None = None
    profile: LoRATrainingProfile | None = None
    spec: StoreSpec | None = None
    store: Store | None = None
    problems: tuple[Problem, ...] = ()
    store_error: str | None = None


class Reconciler:
    """Brings one job at a time to where its spec wants it. Holds no state of a job that it couldn't lose."""

    def __init__(
        self,
        cluster: Cluster,
        stores: Stores,
        clock: Clock,
        *,
        in_cluster: bool = True,
        poll_seconds: float | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._cluster, self._stores, self._clock, self._metrics = cluster, stores, clock, metrics
        self._in_cluster, self._poll_seconds = in_cluster, poll_seconds
        self._runs = RunDirectories()

    async def reconcile(self, key: JobKey) -> float | None:
        """One look at a job, and what follows from it.

        Returns:
            Seconds until the next look; None: an event will call again.

        Raises:
            ClusterError: The API server could not be asked.
        """
        for _ in range(_PASSES):
            observed, store = await self._observe(key)
            if observed is None:
                if self._metrics:
                    self._metrics.reconciled(key, None, 0)
                return None
            decided = await self._act(key, observed, store)
            if decided is None:
                continue  # the job itself was written: look at it as it is now
            changed = decided.status != observed.status
            if changed and not await self._cluster.write_status(observed.raw, status_to_wire(decided.status)):
                return 0.0  # somebody else wrote: look again
            for event in decided.events:
                await self._cluster.emit(observed.raw, event)
            if self._metrics:
                removed = decided.status.checkpoints.removed - observed.status.checkpoints.removed
                self._metrics.reconciled(key, decided.status, removed)
            if not (changed and decided.requeue_after_seconds == 0.0):
                return self._next_look(decided.requeue_after_seconds)
        return _AFTER_TOO_MANY_PASSES

    def _next_look(self, seconds: float | None) -> float | None:
        if seconds is None:
            return None
        seconds = max(seconds, _LEAST_SECONDS)  # whatever was decided, this is no busy loop
        return seconds if self._poll_seconds is None else min(seconds, self._poll_seconds)

    async def _observe(self, key: JobKey) -> tuple[Observed | None, Store | None]:
        """Children are read before the run directory: a child that has completed has written its result before."""
        raw = await self._cluster.read_job(key)
        if raw is None:
            return None, None
        now, status, uid = self._clock.now(), read_status(raw), raw["metadata"].get("uid", "")
        over = is_terminal(status) and raw["metadata"].get("deletionTimestamp") is None
        blank = Observed(now=now, raw=raw, status=status)
        target, observed = await asyncio.gather(
            _nothing() if over else self._target(raw), self._with_children(key, blank, uid, now)
        )
        observed = replace(
            observed,
            job=target.job,
            problems=target.problems,
            profile=target.profile,
            store=target.spec,
            store_error=target.store_error,
        )
        if target.store is None:
            return observed, None
        return await self._with_run(observed, target.store), target.store

    async def _target(self, raw: Manifest) -> _Target:
        """The parsed job, its profile and its opened store, or what is wrong with them."""
        try:
            job = parse(LoRATrainingJob, {**raw, "status": None})
        except InvalidDocument as error:
            return _Target(problems=tuple(error.problems))
        profile, problems = await self._profile(job)
        problems = [*problems, *problems_of_job(job, profile, in_cluster=self._in_cluster)]
        spec = profile.spec.store(job.spec.output.store) if profile else None
        barred = any(problem.path.startswith("spec.output.store") for problem in problems)
        if barred or spec is None or profile is None:
            return _Target(job, profile, spec, problems=tuple(problems))
        secret_problems, opened = await asyncio.gather(
            self._secret_problems(job, spec), self._stores.open(spec), return_exceptions=True
        )
        if isinstance(secret_problems, BaseException):
            raise secret_problems
        problems = secret_problems
        try:
            if isinstance(opened, BaseException):
                raise opened
            root = opened
        except StoreCredentialsError as error:
            problem = Problem(f"spec.output.store {spec.name!r}", str(error))
            return _Target(job, profile, spec, problems=(*problems, problem))
        except StoreError as error:
            return _Target(job, profile, spec, problems=tuple(problems), store_error=str(error))
        return _Target(job, profile, spec, root.sub(job.output_path), tuple(problems))

    async def _profile(self, job: LoRATrainingJob) -> tuple[LoRATrainingProfile | None, list[Problem]]:
        name = job.spec.profile
        raw = await self._cluster.read_profile(name)
        if raw is None:
            text = f"LoRATrainingProfile {name!r} does not exist; see what there is with: kubectl get ltp"
            return None, [Problem("spec.profile", text)]
        try:
            return parse(LoRATrainingProfile, {key: raw[key] for key in ("apiVersion", "kind", "metadata", "spec")}), []
        except InvalidDocument as error:
            first = error.problems[0]
            return None, [Problem("spec.profile", f"LoRATrainingProfile {name!r} is not valid: {first}")]

    async def _secret_problems(self, job: LoRATrainingJob, spec: StoreSpec) -> list[Problem]:
        name = spec.credentials.job_secret_name
        if not self._in_cluster or name is None:
            return []
        namespace = job.metadata.namespace
        wanted = {"accessKey", "secretKey"}
        where = f"spec.output.store {spec.name!r}"
        try:
            keys = await self._cluster.secret_keys(namespace, name)
        except RefusedError as error:
            text = f"Secret {name!r} in namespace {namespace!r} can't be looked at: {error}; add its name to the chart's rbac.jobSecretNames"
            return [Problem(where, text)]
        if keys is None:
            text = f"Secret {name!r} does not exist in namespace {namespace!r}; create it with the keys accessKey and secretKey"
            return [Problem(where, text)]
        if not wanted <= keys:
            text = f"Secret {name!r} in namespace {namespace!r} lacks the key {min(wanted - keys)}; it has: {', '.join(sorted(keys))}"
            return [Problem(where, text)]
        return []

    async def _with_children(self, key: JobKey, observed: Observed, uid: str, now: datetime) -> Observed:
        jobs, pods = await asyncio.gather(self._cluster.read_children(key, uid), self._cluster.read_pods(key, uid))
        children = [child_view(item, uid) for item in jobs]
        attempt, name = observed.status.attempt, observed.status.child_name or child_name(key.name, 1)
        child: ChildView | None = next((c for c in children if c.name == name and c.ours), None)
        if child is None and not is_terminal(observed.status):
            there = await self._cluster.read_child(key.namespace, name)
            child = child_view(there, uid) if there is not None else None
        mine = tuple(pod_view(pod, now) for pod in pods if attempt_of(pod) == attempt)
        others = tuple(pod_view(pod, now) for pod in pods if attempt_of(pod) != attempt)
        waiting = [pod.name for pod in mine if pod.phase == "Pending"]
        warnings = await self._cluster.read_warnings(key.namespace, waiting) if waiting else []
        return replace(
            observed,
            child=child,
            other_children=tuple(c for c in children if c.ours and (child is None or c.uid != child.uid)),
            pods=mine,
            stray_pods=tuple(pod for pod in others if not pod.ended),
            warnings=tuple(warnings),
        )

    async def _with_run(self, observed: Observed, store: Store) -> Observed:
        try:
            run: RunView = await asyncio.to_thread(self._runs.observe, store)
        except StoreMissingError as error:
            return replace(
                observed, problems=(*observed.problems, Problem(f"spec.output.store {_name(observed)!r}", str(error)))
            )
        except StoreCredentialsError as error:
            return replace(
                observed, problems=(*observed.problems, Problem(f"spec.output.store {_name(observed)!r}", str(error)))
            )
        except StoreError as error:
            return replace(observed, store_error=str(error))
        return replace(observed, run=run)

    async def _act(self, key: JobKey, observed: Observed, store: Store | None) -> Plan | None:
        """Decides and does it: the store first, then the cluster. What can't be done is decided about once more.

        Returns:
            What is to be written to the status; None when the job's finalizers were written instead.
        """
        decided = plan(observed)
        if decided.finalizers is not None:  # before anything exists that they protect
            return await self._change_finalizers(key, observed, decided, store)
        try:
            await self._apply_to_store(decided, store)
        except StoreError as error:
            logger.warning("%s: %s", key, error)
            decided = plan(replace(observed, store_error=str(error)))
        for name, uid in decided.delete_children:
            await self._cluster.delete_child(key.namespace, name, uid)
        try:
            await self._create(decided)
        except RefusedError as error:
            logger.warning("%s: creating attempt %s was refused: %s", key, decided.status.attempt, error)
            await self._take_back(key, decided)
            decided = plan(replace(observed, apply_error=str(error)))
        return decided

    async def _create(self, decided: Plan) -> None:
        """Everything at once: the kubelet waits for what a pod mounts. Raises the first error when all have been tried."""
        done = await asyncio.gather(*map(self._cluster.create, decided.create), return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _take_back(self, key: JobKey, decided: Plan) -> None:
        """Removes what was created before the API server refused the rest: its content is old when that is tried again."""
        names = {manifest["metadata"]["name"] for manifest in decided.create}
        for name in names:
            await self._cluster.delete_child(key.namespace, name, "")

    async def _change_finalizers(
        self, key: JobKey, observed: Observed, decided: Plan, store: Store | None
    ) -> Plan | None:
        """The run directory goes before the finalizer that protects it."""
        assert decided.finalizers is not None, "the caller has looked"
        if decided.delete_run and store is not None:
            try:
                await asyncio.to_thread(delete_everything, store)
            except StoreError as error:
                logger.warning("%s: %s", key, error)
                return plan(replace(observed, run=None, store_error=str(error)))
        if await self._cluster.write_finalizers(observed.raw, decided.finalizers):
            for event in decided.events:
                if decided.status.phase is Phase.DELETING:
                    await self._cluster.emit(observed.raw, event)
        return None

    async def _apply_to_store(self, decided: Plan, store: Store | None) -> None:
        """Runtime parameters and retention. Raises StoreError."""
        if store is None:
            return
        if decided.put_control is not None:
            data = decided.put_control.model_dump_json(by_alias=True).encode()
            await asyncio.to_thread(store.put, layout.CONTROL, data)
        for batch in decided.delete_keys:
            await asyncio.to_thread(store.delete, list(batch))


async def _nothing() -> _Target:
    return _Target()


def _name(observed: Observed) -> str:
    return observed.store.name if observed.store else ""
