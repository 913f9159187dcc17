"""`firsttoken operator`: wiring. Every event ends as "reconcile this key"; nothing is decided here.

kopf brings the watch streams. Only low-level event handlers are registered: they add no finalizer and no
annotation, and keep no state in the objects.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import kopf
from prometheus_client import disable_created_metrics

from firsttoken_operator.cluster import (
    CONFIG_MAP,
    DEPLOYMENT,
    GROUP,
    INFERENCE_SERVICE,
    KILL_SWITCH,
    POD,
    VERSION,
    ClusterError,
    ConnectError,
    KubeCluster,
)
from firsttoken_operator.desired.names import MANAGED_BY, MANAGED_BY_LABEL, SERVICE_LABEL
from firsttoken_operator.dispatch import Dispatcher
from firsttoken_operator.health import Freshness, Health, start_servers
from firsttoken_operator.metrics import CountingCluster, CountingRuntimeClient, OperatorMetrics
from firsttoken_operator.runtime_client import HttpRuntimeClient
from firsttoken_operator.settings import Settings, SettingsError, read_settings

logger = logging.getLogger("firsttoken.operator")

CRD_WAIT_SECONDS = 2.0
NEEDED = frozenset({INFERENCE_SERVICE.plural, KILL_SWITCH.plural})


def run() -> None:
    """Run until told to stop (SIGTERM, SIGINT). Ends the process with one line when it cannot start."""
    try:
        settings = read_settings()
        disable_created_metrics()  # type: ignore[no-untyped-call]
        logging.basicConfig(
            level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        # kopf logs every watched event; what matters is logged here.
        logging.getLogger("kopf").setLevel(logging.WARNING)
        asyncio.run(_main(settings))
    except (SettingsError, ConnectError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        pass


async def _main(settings: Settings) -> None:
    metrics = OperatorMetrics()
    health = Health(Freshness(time.monotonic))
    cluster = await KubeCluster.connect()
    runtime_client = HttpRuntimeClient()
    servers = await start_servers(
        health, metrics, settings.bind_host, settings.metrics_port, settings.health_port
    )
    dispatcher = Dispatcher(
        CountingCluster(cluster, metrics),
        CountingRuntimeClient(runtime_client, metrics, time.perf_counter),
        settings,
        metrics,
        health,
    )
    resync: asyncio.Task[None] | None = None
    try:
        await wait_for_crds(cluster, health, settings.namespaces)
        resync = asyncio.create_task(dispatcher.resync_forever())
        await kopf.operator(
            registry=build_registry(dispatcher, cluster),
            settings=kopf_settings(),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
        )
    finally:
        if resync is not None:
            resync.cancel()
        await dispatcher.aclose()
        for server in servers:
            await server.cleanup()
        await runtime_client.aclose()
        await cluster.aclose()


async def wait_for_crds(cluster: KubeCluster, health: Health, namespaces: Sequence[str]) -> None:
    """Wait until both CRDs are served, saying so: without them there is nothing to watch."""
    said = ""
    while True:
        try:
            missing = NEEDED - await cluster.served_plurals(GROUP, VERSION)
            words = f"CRDs {', '.join(f'{name}.{GROUP}' for name in sorted(missing))} to be served"
        except ClusterError as error:
            missing, words = NEEDED, f"the API server ({error})"
        if not missing:
            health.waiting_for = ""
            logger.info("CRDs are served; watching %s", ", ".join(namespaces) or "all namespaces")
            return
        health.waiting_for = words
        if words != said:
            logger.warning("waiting for %s; install them with the Helm chart (crds.enabled)", words)
            said = words
        await asyncio.sleep(CRD_WAIT_SECONDS)


def kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    # Resources are found at the start (wait_for_crds); no rights on CRDs and namespaces are needed then.
    settings.scanning.disabled = True
    settings.watching.connect_timeout = 30
    # Back within three seconds of the API server; kopf's own steps grow to 21 s and then end the operator.
    settings.networking.error_backoffs = (0.5, 1.0, 2.0, *([3.0] * 10_000))
    settings.process.ultimate_exiting_timeout = 20
    owned = {MANAGED_BY_LABEL: MANAGED_BY}
    selector = ",".join(f"{name}={value}" for name, value in owned.items())
    for kind in (POD, DEPLOYMENT, CONFIG_MAP):
        settings.watching.label_selectors[kind.plural] = selector
    return settings


def build_registry(dispatcher: Dispatcher, cluster: KubeCluster) -> kopf.OperatorRegistry:
    """The handlers: each turns an event into a key."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection(cluster)

    @kopf.on.event(GROUP, VERSION, INFERENCE_SERVICE.plural, registry=registry)
    async def service_event(event: Mapping[str, Any], **_: Any) -> None:
        dispatcher.saw_service(event["object"], deleted=event["type"] == "DELETED")

    @kopf.on.event(GROUP, VERSION, KILL_SWITCH.plural, registry=registry)
    async def kill_switch_event(event: Mapping[str, Any], **_: Any) -> None:
        dispatcher.saw_kill_switch(event["object"], deleted=event["type"] == "DELETED")

    async def child_event(event: Mapping[str, Any], **_: Any) -> None:
        metadata = event["object"]["metadata"]
        dispatcher.saw_child(metadata["namespace"], (metadata.get("labels") or {}).get(SERVICE_LABEL))

    for kind in (DEPLOYMENT, POD, CONFIG_MAP):
        kopf.on.event(kind.api_version, kind.plural, labels={SERVICE_LABEL: kopf.PRESENT}, registry=registry)(
            child_event
        )
    return registry


async def connection(cluster: KubeCluster) -> kopf.ConnectionInfo:
    """kopf's connection, with the same credentials as our own."""
    configuration = cluster.configuration
    settings = await configuration.auth_settings()
    header = (settings.get("BearerToken") or {}).get("value") or ""
    scheme, _, token = header.strip().partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
