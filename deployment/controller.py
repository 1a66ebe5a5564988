"""Controller: makes a deployment what its configuration says, and keeps it so. One actor per deployment.

Workers and router are made anew when their actors die; the engine inside a worker is the worker's own business.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup

from actors.adapters.admission import DeskSettings
from deployment import cluster
from deployment.cluster import Handle, PlacementError
from deployment.config import Config
from deployment.plan import check_applicable, desk_settings, router_settings, worker_settings
from router.ids import WorkerId

log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S: Final = 120.0
"""How long a leaving worker may take to finish what runs."""
_TICK_S: Final = 0.5
_CALL_S: Final = 10.0
MAX_START_FAILURES: Final = 3
"""Engine crashes before the first worker ever served: the configuration is at fault, not the day."""
_REMAKE_S: Final = 2.0


@dataclass(slots=True)
class _Member:
    """A worker as the controller has it."""

    worker_id: WorkerId
    index: int
    handle: Handle = None
    group: PlacementGroup | None = None
    endpoint: str = ""
    run: asyncio.Future[None] | None = None
    status: dict[str, Any] = field(default_factory=dict)
    leaving: bool = False
    error: str = ""


class Controller:
    """Lives on one event loop. `run` returns when the deployment is down; raises if it never came up."""

    def __init__(self, config: Config) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = config
        self._api_key = secrets.token_urlsafe(32)
        #: the catalogue of adapters lies here, for the deployment's life
        self._folder = tempfile.TemporaryDirectory(prefix=f"loray-{config.name}-")
        self._members: dict[WorkerId, _Member] = {}
        self._table: Handle = None
        self._router: Handle = None
        self._router_run: asyncio.Future[None]
        self._router_status: dict[str, Any] = {}
        self._table_status: dict[str, Any] = {}
        self._stopping = asyncio.Event()
        self._was_ready = False
        self._started_s = time.time()
        self._lock = asyncio.Lock()
        self._leaves: set[asyncio.Task[None]] = set()
        #: lines for whoever started us, oldest first
        self._news: list[str] = []

    def __repr__(self) -> str:
        return f"Controller({self._config.name})"

    async def run(self) -> None:
        """Bring the deployment up and keep it up until `down`. Raises PlacementError, OSError, RuntimeError."""
        try:
            cluster.check_capacity(self._config)
            self._table = cluster.make_table(self._config, self._desk())
            await self._make_router()
            while not self._stopping.is_set():
                async with self._lock:
                    await self._reconcile()
                await self._look()
                self._judge()
                await self._sleep(_TICK_S)
        finally:
            await self._tear_down()

    async def apply(self, config: Config) -> None:
        """Change the running deployment. Raises ConfigError if it can't be changed into `config`."""
        check_applicable(self._config, config)
        cluster.check_capacity(config)
        async with self._lock:
            old, self._config = self._config.workers.count, config
        self._say(f"apply: workers {old} -> {config.workers.count}")

    async def down(self) -> None:
        """End the deployment; `run` returns when all is gone."""
        self._stopping.set()

    async def news(self, since: int) -> list[str]:
        """Lines said after the first `since`."""
        return self._news[since:]

    async def status(self) -> dict[str, Any]:
        """The whole deployment, as JSON values."""
        router_workers = self._router_status.get("workers", {})
        workers = []
        for member in self._members.values():
            seen = router_workers.get(member.worker_id, {})
            workers.append({
                "id": member.worker_id,
                "state": "starting",
                **member.status,
                **({"state": "draining"} if member.leaving else {}),
                **({"last_error": member.error} if member.error else {}),
                "ranks": seen.get("ranks", []),
                "in_flight": sum(rank["in_flight"] for rank in seen.get("ranks", [])),
            })  # fmt: skip
        return {
            "state": self._state(),
            "name": self._config.name,
            "model": self._config.model.served_name,
            "workers_wanted": self._config.workers.count,
            "uptime_s": round(time.time() - self._started_s, 1),
            "workers": workers,
            "router": self._router_status,
            "table": self._table_status,
        }

    def _desk(self) -> DeskSettings:
        return desk_settings(
            self._config, run_id=uuid.uuid4().hex, state_file=str(Path(self._folder.name) / "adapters.json")
        )

    # -- towards what is wanted ----------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        wanted = {WorkerId(f"w{index}"): index for index in range(self._config.workers.count)}
        changed = False
        for worker_id, member in list(self._members.items()):
            if member.run is not None and member.run.done():
                await self._lose(member)
                changed = True
            elif worker_id not in wanted and not member.leaving:
                member.leaving = True
                self._spawn(self._leave(member))
        for worker_id, index in wanted.items():
            if worker_id not in self._members:
                self._members[worker_id] = member = _Member(worker_id, index)
                self._spawn(self._join(member))
        if self._router_run.done():
            self._say("router died; making a new one")
            cluster.discard(self._router)
            await self._make_router()
            changed = True
        if changed:
            await self._tell_router()

    async def _join(self, member: _Member) -> None:
        settings = worker_settings(self._config, member.index, api_key=self._api_key)
        try:
            member.group = await cluster.place_worker(self._config, member.worker_id)
            member.handle = cluster.make_worker(self._config, settings, self._table, member.group)
            member.endpoint = await member.handle.start.remote()
            member.run = _watched(member.handle.run.remote())
        except (PlacementError, ray.exceptions.RayError) as exc:
            member.error = str(exc)
            self._say(f"worker {member.worker_id}: {exc}")
            cluster.discard(member.handle, member.group)
            await self._sleep(_REMAKE_S)
            self._members.pop(member.worker_id, None)
            return
        self._say(f"worker {member.worker_id}: engine is starting")
        await self._tell_router()

    async def _lose(self, member: _Member) -> None:
        self._say(f"worker {member.worker_id}: its actor is gone; making a new one")
        cluster.discard(member.handle, member.group)
        del self._members[member.worker_id]
        await self._forget(member)

    async def _leave(self, member: _Member) -> None:
        """Drain, then end. Requests still running at the deadline are cut off and retried elsewhere if they can be."""
        self._say(f"worker {member.worker_id}: draining")
        until_s = time.monotonic() + DRAIN_TIMEOUT_S
        try:
            if member.run is not None:
                await member.handle.drain.remote()
                await self._sleep(2 * _TICK_S)  # heartbeats tell the routers
                while time.monotonic() < until_s and await self._router.in_flight.remote(member.worker_id):
                    await self._sleep(_TICK_S)
                async with asyncio.timeout(_CALL_S):
                    await member.handle.stop.remote()
        except (ray.exceptions.RayError, TimeoutError) as exc:
            log.warning("worker %s: left without a proper end: %s", member.worker_id, exc)
        cluster.discard(member.handle, member.group)
        self._members.pop(member.worker_id, None)
        await self._tell_router()
        await self._forget(member)
        self._say(f"worker {member.worker_id}: left")

    async def _forget(self, member: _Member) -> None:
        try:
            async with asyncio.timeout(_CALL_S):
                await self._table.forget.remote(member.worker_id)
        except (ray.exceptions.RayError, TimeoutError) as exc:
            log.warning("the LoRA table wasn't told that %s is gone: %s", member.worker_id, exc)

    async def _make_router(self) -> None:
        settings = router_settings(self._config, api_key=self._api_key)
        self._router = cluster.make_router(self._config, settings, self._table)
        await self._router.start.remote()
        self._router_run = _watched(self._router.run.remote())

    async def _tell_router(self) -> None:
        endpoints = {m.worker_id: m.endpoint for m in self._members.values() if m.endpoint}
        try:
            await self._router.follow.remote(endpoints)
        except ray.exceptions.RayError as exc:
            log.warning("the router wasn't told its workers: %s", exc)

    # -- looking -------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        members = [m for m in self._members.values() if m.run is not None]
        calls = [m.handle.status.remote() for m in members]
        calls += [self._router.status.remote(), self._table.status.remote()]
        results = await asyncio.gather(*(asyncio.wait_for(c, _CALL_S) for c in calls), return_exceptions=True)
        for member, result in zip(members, results, strict=False):
            if isinstance(result, dict):
                self._notice(member, result)
        router, table = results[-2:]
        self._router_status = router if isinstance(router, dict) else {}
        self._table_status = table if isinstance(table, dict) else {}

    def _notice(self, member: _Member, status: dict[str, Any]) -> None:
        before = member.status
        member.status = status
        if status["incarnation"] != before.get("incarnation") and before:
            self._say(f"worker {member.worker_id}: engine died; incarnation {status['incarnation']} is starting")
        if status["state"] == "ready" and before.get("state") != "ready":
            self._say(f"worker {member.worker_id}: ready at {status['url']}, incarnation {status['incarnation']}")

    def _judge(self) -> None:
        if self._state() == "ready" and not self._was_ready:
            self._was_ready = True
            self._say(f"ready: {self._router_status['url']}")
        if self._was_ready:
            return
        if error := self._table_status.get("error"):
            raise RuntimeError(f"the LoRA table can't start: {error}")
        for name, why in self._table_status.get("rejected", {}).items():
            raise RuntimeError(f"adapter {name!r} can't be served: {why}")
        for row in self._table_status.get("holdings", []):
            if row["state"] == "failed":
                raise RuntimeError(f"adapter {row['name']!r} can't be loaded on {row['worker_id']}: {row['error']}")
        for member in self._members.values():
            if member.status.get("crashes", 0) >= MAX_START_FAILURES:
                raise RuntimeError(
                    f"worker {member.worker_id} failed to start {MAX_START_FAILURES} times; the last time:\n"
                    f"{member.status['last_error']}"
                )

    def _state(self) -> str:
        if self._stopping.is_set():
            return "stopping"
        exact = sum(
            bool(worker["ranks"]) and worker["state"] == "ready" and all(r["state"] == "exact" for r in worker["ranks"])
            for worker in self._router_status.get("workers", {}).values()
        )
        whole = exact >= self._config.workers.count and self._adapters_loaded()
        if whole and not any(member.leaving for member in self._members.values()):
            return "ready"
        return "degraded" if self._was_ready else "starting"

    def _adapters_loaded(self) -> bool:
        """Whether every worker holds what it shall, and the router knows it."""
        table = self._table_status
        loaded = {(row["worker_id"], row["name"]) for row in table.get("holdings", []) if row["state"] == "loaded"}
        wanted = {(w, name) for w, names in table.get("wanted", {}).items() for name in names}
        everybody = len(table.get("wanted", {})) >= self._config.workers.count
        read = everybody and not table.get("unread", 1)
        return read and wanted <= loaded and self._router_status.get("table_version") == table.get("version")

    # -- the end -------------------------------------------------------------------------------------------------

    async def _tear_down(self) -> None:
        self._stopping.set()
        for task in self._leaves:
            task.cancel()
        stops = [m.handle.stop.remote() for m in self._members.values() if m.run is not None]
        stops += [self._router.stop.remote()] if self._router is not None else []
        await asyncio.gather(*(asyncio.wait_for(s, _CALL_S) for s in stops), return_exceptions=True)
        for member in self._members.values():
            cluster.discard(member.handle, member.group)
        for handle in (self._router, self._table):
            cluster.discard(handle)
        self._folder.cleanup()
        self._say("down")

    def _say(self, line: str) -> None:
        log.info("%s", line)
        self._news.append(line)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._leaves.add(task)
        task.add_done_callback(self._leaves.discard)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


def _watched(run: Any) -> asyncio.Future[None]:
    """An actor's endless `run` as a future: done means that the actor is gone."""
    watched: asyncio.Future[None] = asyncio.wrap_future(run.future())
    watched.add_done_callback(lambda done: done.cancelled() or done.exception())
    return watched
