"""Worker: owns one GPU (or a few), keeps a real SGLang server alive on it, and tells what it is.

Plain class; deployment/cluster.py makes it an actor. A crash of the engine ends one life (life.py), and the next has
fresh ports, a fresh mirror and a new incarnation id. The heartbeat goes to routers over ZMQ every
second and at every change; what is loaded goes to the LoRA table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import zmq

from actors.adapters.entry import Assignment
from actors.engine.client import EngineError
from actors.engine.spec import EngineSpec, KvEventsConfig, LoraConfig, ModelConfig
from actors.life import EngineLife
from actors.ports import reserve
from router.ids import DpRank, Incarnation, WorkerId
from router.net.snapshots import SnapshotServer
from router.reports import Holding, Snapshot, SnapshotRequest, TableVersion, WorkerFacts, WorkerReport, WorkerState

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
_RETRY_S: Final = 0.5
_ASSIGNMENT_S: Final = 5.0
_TABLE_S: Final = 2.0
"""Holdings are told again at this pace, so that a restarted table is whole again."""
_BACKOFF_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0)
_STABLE_S: Final = 60.0
"""An engine that lived so long starts the backoff over."""


class Table(Protocol):
    """The LoRA table, from afar. Any call may raise; it is then made again."""

    async def tell(
        self, worker_id: WorkerId, incarnation: Incarnation, holdings: list[Holding], facts: WorkerFacts | None
    ) -> TableVersion:
        """See LoraTable."""

    async def wait_wanted(self, worker_id: WorkerId, epoch: str, revision: int, timeout_s: float) -> Assignment:
        """See LoraTable."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker is made with."""

    worker_id: WorkerId
    index: int
    host: str
    """Address of its node that others reach."""
    device: str
    model: ModelConfig
    kv_events: KvEventsConfig
    lora: LoraConfig
    dp_size: int = 1
    cpu_cores: tuple[int, ...] = ()
    extra_args: tuple[str, ...] = ()
    emulated: str | None = None
    """Profile of an emulated engine; None for SGLang's."""
    api_key: str


class Worker:
    """Lives on one event loop. `run` supervises until `stop`."""

    def __init__(self, settings: WorkerSettings, table: Table) -> None:
        self._settings = settings
        self._lora_table = table
        #: what the table wants of us
        self._assignment = Assignment(epoch="", revision=0)
        self._folder = tempfile.TemporaryDirectory(prefix=f"loray-{settings.worker_id}-")
        self._rng = random.Random()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port(f"tcp://{settings.host}")
        #: where heartbeats are heard
        self.heartbeat_endpoint = f"tcp://{settings.host}:{port}"
        self._snapshots = SnapshotServer(self._snapshot, settings.host)
        #: the present life; the only one that anybody is told of
        self.life = EngineLife(settings.worker_id)
        #: why the last life ended, with the engine's last lines
        self.last_error = ""
        #: the LoRA table when it last took our holdings
        self._table = TableVersion(epoch="", version=-1)
        self._num_crashes = 0
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"Worker({self._settings.worker_id}, {self.report().state}, incarnation {self.life.incarnation})"

    async def run(self) -> None:
        """Keep an engine alive until `stop`; returns once it is gone. A crash is backed off and tried again."""
        for work in (self._beat(), self._tell(), self._follow_assignment(), self._snapshots.serve()):
            self._tasks.add(asyncio.ensure_future(work))
        attempt = 0
        while not self._stopping.is_set():
            started_s = time.monotonic()
            await self._live()
            if self._stopping.is_set():
                break
            self._num_crashes += 1
            self.life = EngineLife(self._settings.worker_id)
            self._send()
            attempt = 0 if time.monotonic() - started_s > _STABLE_S else attempt + 1
            await self._pause(_BACKOFF_S[min(attempt, len(_BACKOFF_S)) - 1] if attempt else 0.0)
        self._send()
        self._ended.set()

    async def stop(self) -> None:
        """End the engine and all that serves it, once `run` was called. Safe to call again."""
        self._stopping.set()
        await self.life.kill()
        await self._ended.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._snapshots.close()
        self._context.destroy(linger=100)
        self._folder.cleanup()

    def drain(self) -> None:
        """Take no new requests; running ones finish."""
        self.life.drain()
        self._send()

    async def flush_cache(self) -> None:
        """Empty the engine's prefix cache. Raises EngineError."""
        if self.life.client is None:
            raise EngineError("the engine is not running")
        await self.life.client.flush_cache()

    def report(self) -> WorkerReport:
        """The heartbeat as of now."""
        report = msgspec.structs.replace(
            self.life.report(), table_epoch=self._table.epoch, table_version=self._table.version
        )
        if self._stopping.is_set():
            return msgspec.structs.replace(report, state=WorkerState.STOPPED)
        return report

    def status(self) -> dict[str, Any]:
        """For `status`: JSON values."""
        report, mirror = self.report(), self.life.mirror
        ports = [rank.endpoint.rsplit(":", 1)[1] for rank in report.ranks]
        return {
            "id": report.worker_id,
            "state": report.state,
            "incarnation": report.incarnation,
            "host": self._settings.host,
            "url": report.url,
            "event_ports": [int(port) for port in ports],
            "page_size": report.page_size,
            "context_length": report.context_length,
            "dp_ranks": [rank.dp_rank for rank in report.ranks],
            "cached_blocks": sum(mirror.num_blocks(rank.dp_rank) for rank in report.ranks) if mirror else 0,
            "adapters": {row.name: row.state for row in self.life.holdings},
            "engine_pid": self.life.pid,
            "crashes": self._num_crashes,
            "last_error": self.last_error,
        }

    # -- inside --------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """One life from its start to its end, whatever ends it."""
        life = self.life
        try:
            await life.start(
                self._spec(),
                api_key=self._settings.api_key,
                folder=Path(self._folder.name),
                snapshot_endpoint=self._snapshots.endpoint,
            )
            log.info("worker %s: serving, incarnation %s", self._settings.worker_id, life.incarnation)
            if self._assignment.revision:
                life.assign(self._assignment.wanted)
            self._send()
            await life.wait()
        except (EngineError, OSError, ValueError) as exc:
            if not self._stopping.is_set():
                self.last_error = str(exc)
                log.error("worker %s: %s", self._settings.worker_id, exc)
        finally:
            await life.close()

    def _spec(self) -> EngineSpec:
        settings = self._settings
        dp_size = settings.dp_size
        first = settings.kv_events.first_port
        if first is not None:
            first += settings.index * (2 + 2 * dp_size)
        port = reserve(settings.host, 1 + 2 * dp_size, first=first, rng=self._rng)
        return EngineSpec(
            model=settings.model,
            kv_events=settings.kv_events,
            lora=settings.lora,
            device="cuda" if settings.device == "cuda" else "cpu",
            host=settings.host,
            port=port,
            event_port=port + 1,
            replay_port=port + 1 + dp_size,
            first_dp_rank=DpRank(settings.index * dp_size),
            dp_size=dp_size,
            cpu_cores=settings.cpu_cores,
            extra_args=settings.extra_args,
            emulated=settings.emulated,
        )

    def _send(self) -> None:
        if not self._socket.closed:
            self._socket.send(msgspec.msgpack.encode(self.report()), zmq.NOBLOCK)

    async def _beat(self) -> None:
        while True:
            self._send()
            await asyncio.sleep(HEARTBEAT_S)

    async def _tell(self) -> None:
        """Tell the table what is held: when it changes, and again at a pace."""
        while True:
            life = self.life
            life.changed.clear()
            try:
                self._table = await self._lora_table.tell(
                    self._settings.worker_id, life.incarnation, life.holdings, life.facts
                )
            except Exception as exc:  # noqa: BLE001  # the table is away: it is told again until it is back
                log.warning("worker %s: the LoRA table can't be told: %s", self._settings.worker_id, exc)
                await asyncio.sleep(_RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TABLE_S):
                    await life.changed.wait()

    async def _follow_assignment(self) -> None:
        """Ask the table what is to be held, and have the present life hold it."""
        while True:
            known = self._assignment
            try:
                self._assignment = await self._lora_table.wait_wanted(
                    self._settings.worker_id, known.epoch, known.revision, _ASSIGNMENT_S
                )
            except Exception as exc:  # noqa: BLE001  # the table is away: what is held stays until it is back
                log.warning("worker %s: the LoRA table doesn't say what to hold: %s", self._settings.worker_id, exc)
                await asyncio.sleep(_RETRY_S)
                continue
            if self.life.facts is not None and self._assignment.revision:
                self.life.assign(self._assignment.wanted)

    def _snapshot(self, request: SnapshotRequest) -> Snapshot:
        if self.life.mirror is None:
            error = "the engine is not running"
            return Snapshot(
                incarnation=request.incarnation, dp_rank=request.dp_rank, last_seq=-1, blocks={}, error=error
            )
        return self.life.mirror.snapshot(request)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
