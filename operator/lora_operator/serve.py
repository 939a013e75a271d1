"""The operator as a process in a cluster."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import kopf
import typer
from aiohttp import web
from kubernetes.aio.client import Configuration

from lora_operator import handlers
from lora_operator.adapters.clock import SystemClock
from lora_operator.adapters.kube import KubeCluster
from lora_operator.adapters.kube_api import KubeApi, load_configuration
from lora_operator.adapters.store import SecretStores
from lora_operator.cache import JobCache
from lora_operator.metrics import Metrics
from lora_operator.ports import ClusterError
from lora_operator.reconciler import Reconciler
from lora_operator.runtime import Runtime
from lora_operator.watchdog import Watchdog

_log = logging.getLogger("lora_operator.serve")  # also when run with -m
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_WAIT_FOR_CRDS_SECONDS = 60.0


class LogFormat(StrEnum):
    """How log lines look."""

    PLAIN = "plain"
    JSON = "json"


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    namespaces: tuple[str, ...] = ()
    kubeconfig: Path | None = None
    liveness_port: int = 8081
    metrics_port: int = 8080
    workers: int = 16
    resync_seconds: float = 300.0


class _JsonFormatter(logging.Formatter):
    """One JSON object for each line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(log_format: LogFormat, level: str) -> None:
    """Everything to standard error; of kopf and aiohttp only what went wrong."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S%z")
    handler.setFormatter(_JsonFormatter() if log_format is LogFormat.JSON else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("kopf", "aiohttp.access", "asyncio", "urllib3"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


def operator_namespace() -> str:
    """The namespace this process runs in: `POD_NAMESPACE`, the service account's, or `default`."""
    named = os.environ.get("POD_NAMESPACE", "").strip()
    if named:
        return named
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.is_file() else "default"


async def _login(kubeconfig: Path | None) -> kopf.ConnectionInfo:
    """The same credentials for kopf's watches as for all else."""
    configuration: Configuration = await load_configuration(kubeconfig)
    header = await configuration.get_api_key_with_prefix("BearerToken") or ""
    scheme, _, token = header.rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme.capitalize() or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
        trust_env=True,
    )


async def _wait_for_crds(cluster: KubeCluster) -> None:
    """Returns once the server serves our resources: kopf looks for them only when it starts.

    Raises:
        ClusterError: When they don't come.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _WAIT_FOR_CRDS_SECONDS
    while True:
        try:
            missing = await cluster.missing_resources()
            trouble = f"the API server does not serve {', '.join(sorted(missing))}; install the chart's crds/ folder"
        except ClusterError as error:
            missing, trouble = frozenset({"all"}), str(error)
        if not missing:
            return
        if loop.time() > deadline:
            raise ClusterError(trouble)
        _log.warning("%s", trouble)
        await asyncio.sleep(2)


async def _serve_http(runtime: Runtime, port: int) -> web.AppRunner:
    """Starts `/metrics` and `/readyz`."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=runtime.scrape(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def ready(_request: web.Request) -> web.Response:
        known = runtime.watchdog.ready
        return web.Response(text="ok" if known else "jobs have not been listed yet", status=200 if known else 503)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/readyz", ready)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner


def _build(options: Options, cluster: KubeCluster, cache: JobCache, metrics: Metrics) -> Runtime:
    clock = SystemClock()
    stores = SecretStores(cluster, clock, operator_namespace=operator_namespace())
    reconciler = Reconciler(cluster, stores, clock)
    watched = max(1, len(options.namespaces))
    return Runtime(
        cluster,
        reconciler.reconcile,
        cache=cache,
        metrics=metrics,
        watchdog=Watchdog(expected_watchers=handlers.CLUSTER_WIDE_WATCHERS + handlers.WATCHERS_PER_NAMESPACE * watched),
        namespaces=options.namespaces,
        workers=options.workers,
        resync_seconds=options.resync_seconds,
    )


async def serve(options: Options) -> None:
    """Runs the operator until SIGTERM or SIGINT.

    Raises:
        ClusterError: When it can't begin: no way to the API server, or no CRDs.
    """
    # store calls block; each look at a job makes them one after the other
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(options.workers + 4, thread_name_prefix="store"))
    cache = JobCache()
    metrics = Metrics(cache)
    api = await KubeApi.connect(options.kubeconfig, on_answer=metrics.saw_request)
    try:
        cluster = KubeCluster(api, SystemClock(), instance=os.environ.get("POD_NAME", "lora-operator"))
        await _wait_for_crds(cluster)
        runtime = _build(options, cluster, cache, metrics)
        http = await _serve_http(runtime, options.metrics_port)
        _log.info("serving %s", ", ".join(options.namespaces) or "all namespaces")
        try:
            await kopf.operator(
                registry=handlers.register(runtime, lambda: _login(options.kubeconfig)),
                settings=handlers.settings(),
                clusterwide=not options.namespaces,
                namespaces=options.namespaces,
                liveness_endpoint=f"http://0.0.0.0:{options.liveness_port}/healthz",
            )
        finally:
            await http.cleanup()
            await cluster.flush()
    finally:
        await api.close()
    _log.info("stopped")


def main(  # noqa: PLR0917 - options of a command line
    namespace: Annotated[
        list[str] | None, typer.Option(help="Namespace to serve; may be repeated. Left out: all.")
    ] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(help="Kubeconfig file. Left out: KUBECONFIG, the pod's service account, ~/.kube/config."),
    ] = None,
    log_format: Annotated[LogFormat, typer.Option(help="How log lines look.")] = LogFormat.PLAIN,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    liveness_port: Annotated[int, typer.Option(help="Port of /healthz.")] = 8081,
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics and /readyz.")] = 8080,
    workers: Annotated[int, typer.Option(min=1, help="Jobs looked at at once.")] = 16,
    resync_seconds: Annotated[float, typer.Option(min=1, help="Seconds between two looks at all jobs.")] = 300.0,
) -> None:
    """Run the operator in a cluster, until SIGTERM."""
    configure_logging(log_format, log_level)
    options = Options(
        tuple(namespace or ()), kubeconfig, liveness_port, metrics_port, workers=workers, resync_seconds=resync_seconds
    )
    try:
        asyncio.run(serve(options))
    except ClusterError as error:
        _log.error("%s", error)
        raise SystemExit(1) from error
    except Exception as error:
        # newer versions of kopf end with the error of a watcher that died for good
        _log.exception("the operator has failed; a new process has to take over")
        raise SystemExit(1) from error


if __name__ == "__main__":
    typer.run(main)
