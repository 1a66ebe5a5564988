"""The only module that says ray.remote: plain classes made actors, and the placement each of them gets."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any, Final

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.adapters.admission import AdapterDesk, DeskSettings
from actors.lora_table import LoraTable
from actors.router import Router, RouterSettings
from actors.worker import Worker, WorkerSettings
from deployment.config import Config
from deployment.metrics import RayRecorder
from deployment.names import NAMESPACE, actor_name
from deployment.remote_table import RemoteTable
from router.ids import WorkerId

PLACEMENT_TIMEOUT_S: Final = 60.0
"""How long a worker's resources may take to become free."""
_LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Handle = Any
"""An actor handle; Ray has no type for it."""


class PlacementError(RuntimeError):
    """The cluster hasn't got what a worker needs; the message says what is missing."""


def connect() -> dict[str, Any]:
    """Join the running Ray cluster, or start one on this machine (loopback). Returns Ray's context."""
    try:
        context = ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        context = ray.init(
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.WARNING,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            _node_ip_address="127.0.0.1",
        )
    return dict(context.address_info)


class WorkerActor:
    """A Worker on its node."""

    def __init__(self, settings: WorkerSettings, table: Handle) -> None:
        logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
        self._settings = settings
        self._table = table
        self._worker: Worker | None = None

    def __repr__(self) -> str:
        return f"Worker({self._settings.worker_id})"

    async def start(self) -> str:
        """Make the worker; returns its heartbeat endpoint. `run` does the rest."""
        host = _own_address()
        cores: tuple[int, ...] = ()
        if self._settings.device == "cpu":
            here = sorted(os.sched_getaffinity(0))
            first = self._settings.index * self._settings.dp_size
            cores = tuple(here[(first + i) % len(here)] for i in range(self._settings.dp_size))
        settings = msgspec.structs.replace(self._settings, host=host, cpu_cores=cores)
        self._worker = Worker(settings, RemoteTable(self._table))
        return self._worker.heartbeat_endpoint

    async def run(self) -> None:
        """See Worker.run."""
        await self._made.run()

    async def drain(self) -> None:
        """See Worker.drain."""
        self._made.drain()

    async def stop(self) -> None:
        """See Worker.stop."""
        await self._made.stop()

    async def flush_cache(self) -> None:
        """See Worker.flush_cache."""
        await self._made.flush_cache()

    async def status(self) -> dict[str, Any]:
        """See Worker.status; with what Ray knows."""
        context = ray.get_runtime_context()
        return {**self._made.status(), "node": context.get_node_id(), "gpus": ray.get_gpu_ids()}

    @property
    def _made(self) -> Worker:
        assert self._worker is not None, "start comes first"
        return self._worker


class RouterActor:
    """A Router on its node."""

    def __init__(self, settings: RouterSettings, table: Handle) -> None:
        logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
        self._settings = settings
        self._table = table
        self._router: Router | None = None

    def __repr__(self) -> str:
        return f"Router({self._settings.router_id}, http://{self._settings.config.host}:{self._settings.config.port})"

    async def start(self) -> None:
        """Listen. Raises OSError if the port is taken."""
        recorder = RayRecorder(router=self._settings.router_id)
        router = Router(self._settings, RemoteTable(self._table), [recorder])
        await router.start()
        self._router = router

    async def run(self) -> None:
        """Never returns: its failure tells the controller that this router is gone."""
        await asyncio.Event().wait()

    async def follow(self, endpoints: dict[WorkerId, str]) -> None:
        """See Router.follow."""
        await self._made.follow(endpoints)

    async def in_flight(self, worker_id: WorkerId) -> int:
        """See Router.in_flight."""
        return await self._made.in_flight(worker_id)

    async def status(self) -> dict[str, Any]:
        """See Router.status."""
        return await self._made.status()

    async def drain(self) -> None:
        """See Router.drain."""
        await self._made.drain()

    async def stop(self) -> None:
        """See Router.stop."""
        await self._made.stop()

    @property
    def _made(self) -> Router:
        assert self._router is not None, "start comes first"
        return self._router


def _own_address() -> str:
    """Address under which this node joined the cluster."""
    node_id = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)


def _here() -> Any:
    """The caller's own node."""
    node_id = ray.get_runtime_context().get_node_id()
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)


def make_table(config: Config, desk: DeskSettings) -> Handle:
    """The LoRA table, restarted by Ray wherever it dies; on the node of its caller, where its catalogue is kept."""
    options = {
        "name": actor_name(config.name, "lora_table"),
        "num_cpus": 0,
        "max_concurrency": 10_000,
        "max_restarts": -1,
        "max_task_retries": 0,
        "scheduling_strategy": _here(),
    }
    return ray.remote(LoraTable).options(**options).remote(AdapterDesk(desk))


def make_router(config: Config, settings: RouterSettings, table: Handle) -> Handle:
    """A router, on the node of its caller, where the endpoint is expected."""
    options = {
        "name": actor_name(config.name, "router", settings.router_id),
        "num_cpus": 0,
        "max_concurrency": 1000,
        "scheduling_strategy": _here(),
    }
    return ray.remote(RouterActor).options(**options).remote(settings, table)


async def place_worker(config: Config, worker_id: WorkerId) -> PlacementGroup:
    """Set a worker's resources aside. Raises PlacementError after PLACEMENT_TIMEOUT_S, having taken nothing."""
    workers = config.workers
    bundle = {"CPU": float(workers.cpus)} | ({"GPU": float(workers.gpus)} if workers.gpus else {})
    bundle = {key: value for key, value in bundle.items() if value} or {"CPU": 0.001}
    group = placement_group([bundle], strategy="STRICT_PACK", name=actor_name(config.name, str(worker_id)))
    try:
        await asyncio.wait_for(group.ready(), PLACEMENT_TIMEOUT_S)
    except TimeoutError as exc:
        remove_placement_group(group)
        raise PlacementError(_what_is_missing(worker_id, bundle)) from exc
    return group


def make_worker(config: Config, settings: WorkerSettings, table: Handle, group: PlacementGroup) -> Handle:
    """A worker inside its placement. Not restarted by Ray: the controller makes a new one."""
    workers = config.workers
    options = {
        "name": actor_name(config.name, "worker", settings.worker_id),
        "num_cpus": workers.cpus or 0.001 if not workers.gpus else workers.cpus,
        "num_gpus": workers.gpus,
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    }
    return ray.remote(WorkerActor).options(**options).remote(settings, table)


def discard(handle: Handle | None, group: PlacementGroup | None = None) -> None:
    """End an actor and give its resources back."""
    if handle is not None:
        ray.kill(handle)
    if group is not None:
        remove_placement_group(group)


def check_capacity(config: Config) -> None:
    """Raise PlacementError if the whole cluster can't hold all workers at once."""
    have = ray.cluster_resources()
    for kind, each in (("GPU", config.workers.gpus), ("CPU", config.workers.cpus)):
        needed = each * config.workers.count
        if needed > have.get(kind, 0):
            raise PlacementError(
                f"{config.workers.count} workers need {needed:g} {kind}s ({each:g} each), "
                f"the cluster has {have.get(kind, 0):g}; lower workers.count or add nodes"
            )


def _what_is_missing(worker_id: WorkerId, bundle: dict[str, float]) -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    fits = [n for n in nodes if all(n["Resources"].get(k, 0) >= v for k, v in bundle.items())]
    wanted = ", ".join(f"{value:g} {key}" for key, value in bundle.items())
    if not fits:
        return f"worker {worker_id} needs {wanted} on one node, and none of {len(nodes)} nodes is that large"
    left = ", ".join(f"{free.get(key, 0):g} {key}" for key in bundle)
    return f"worker {worker_id} needs {wanted} on one node; free in the cluster: {left}"
