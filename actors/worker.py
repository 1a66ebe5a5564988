"""Worker: owns one GPU (or a few), keeps a real SGLang server alive on it, and tells what it is.

Plain class; deployment/cluster.py makes it an actor. One incarnation is one life of the engine process: a crash
ends it, and the next one has fresh ports, a fresh mirror and a new id. The heartbeat goes to routers over ZMQ every
second and at every change; what is loaded goes to the LoRA table.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from actors.engine.child import EngineProcess
from actors.engine.client import EngineClient, EngineError, EngineFacts
from actors.engine.identity import AdapterFilesError, adapter_files, content_id, lora_id
from actors.engine.spec import EngineSpec, KvEventsConfig, LoraConfig, ModelConfig
from actors.mirror import Mirror
from actors.ports import reserve
from router.ids import DpRank, Incarnation, SourceId, WorkerId
from router.net.snapshots import SnapshotServer
from router.reports import AdapterState, Holding, RankReport, Snapshot, SnapshotRequest, WorkerReport, WorkerState

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
_POLL_S: Final = 0.25
_TABLE_S: Final = 2.0
"""Holdings are told again at this pace, so that a restarted table is whole again."""
_BACKOFF_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0)
_STABLE_S: Final = 60.0
"""An engine that lived so long starts the backoff over."""

TellTable = Callable[[WorkerId, Incarnation, list[Holding]], Awaitable[None]]
"""Tells the LoRA table all that an incarnation holds; may raise, is then tried again."""


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
    api_key: str


class Worker:
    """Lives on one event loop. `run` supervises until `stop`."""

    def __init__(self, settings: WorkerSettings, tell_table: TellTable) -> None:
        self._settings = settings
        self._tell_table = tell_table
        self._folder = tempfile.TemporaryDirectory(prefix=f"loray-{settings.worker_id}-")
        self._rng = random.Random()
        self._engine: EngineProcess | None = None
        self._client: EngineClient | None = None
        self._mirror: Mirror | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port(f"tcp://{settings.host}")
        #: where heartbeats are heard
        self.heartbeat_endpoint = f"tcp://{settings.host}:{port}"
        self._snapshots = SnapshotServer(self._snapshot, settings.host)
        self._holdings: list[Holding] = []
        self._report = self._new_life()
        #: why the last life ended, with the engine's last lines
        self.last_error = ""
        self._num_crashes = 0
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"Worker({self._settings.worker_id}, {self._report.state}, incarnation {self._report.incarnation})"

    async def run(self) -> None:
        """Keep an engine alive until `stop`; returns once it is gone. A crash is backed off and tried again."""
        for work in (self._beat(), self._tell(), self._snapshots.serve()):
            self._tasks.add(asyncio.ensure_future(work))
        attempt = 0
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                await self._live()
            except (EngineError, OSError, ValueError) as exc:
                self.last_error = str(exc)
                log.error("worker %s: %s", self._settings.worker_id, exc)
            finally:
                await self._end_life()
            if self._stopping.is_set():
                break
            self._num_crashes += 1
            self._report = self._new_life()
            self._send()
            attempt = 0 if time.monotonic() - started_s > _STABLE_S else attempt + 1
            pause_s = _BACKOFF_S[min(attempt, len(_BACKOFF_S)) - 1] if attempt else 0.0
            await self._pause(pause_s)
        self._set_state(WorkerState.STOPPED)
        self._ended.set()

    async def stop(self) -> None:
        """End the engine and all that serves it, once `run` was called. Safe to call again."""
        self._stopping.set()
        if self._engine is not None:
            await self._engine.stop()
        await self._ended.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._snapshots.close()
        self._context.destroy(linger=100)
        self._folder.cleanup()

    def drain(self) -> None:
        """Take no new requests; running ones finish."""
        if self._report.state is WorkerState.READY:
            self._set_state(WorkerState.DRAINING)

    async def flush_cache(self) -> None:
        """Empty the engine's prefix cache. Raises EngineError."""
        if self._client is None:
            raise EngineError("the engine is not running")
        await self._client.flush_cache()

    def report(self) -> WorkerReport:
        """The heartbeat as of now."""
        if self._mirror is None:
            return self._report
        ranks = tuple(
            msgspec.structs.replace(rank, last_seq=self._mirror.last_seq(rank.dp_rank)) for rank in self._report.ranks
        )
        return msgspec.structs.replace(self._report, ranks=ranks)

    def status(self) -> dict[str, Any]:
        """For `status`: JSON values."""
        report = self.report()
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
            "cached_blocks": sum(self._mirror.num_blocks(r.dp_rank) for r in report.ranks) if self._mirror else 0,
            "adapters": {row.name: row.state for row in self._holdings},
            "engine_pid": self._engine.pid if self._engine else None,
            "crashes": self._num_crashes,
            "last_error": self.last_error,
        }

    # -- one life ------------------------------------------------------------------------------------------------

    def _new_life(self) -> WorkerReport:
        return WorkerReport(
            worker_id=self._settings.worker_id,
            incarnation=Incarnation(uuid.uuid4().hex[:12]),
            state=WorkerState.STARTING,
        )

    async def _live(self) -> None:
        """Start an engine, serve, and raise when it ends."""
        spec = self._spec()
        _check_files(spec)
        self._engine = EngineProcess(spec, api_key=self._settings.api_key, folder=Path(self._folder.name))
        await self._engine.start()
        url = f"http://{spec.host}:{spec.port}"
        self._client = EngineClient(url, self._settings.api_key)
        while not await self._client.is_ready():
            if self._engine.exit_code is not None:
                await self._engine.wait()
                raise EngineError(f"engine ended with {self._engine.exit_code} at start:\n{self._engine.tail}")
            await self._pause(_POLL_S)
        self._serve(spec, url, await self._client.facts())
        code = await self._engine.wait()
        if not self._stopping.is_set():
            raise EngineError(f"engine ended with {code} while serving:\n{self._engine.tail}")

    def _serve(self, spec: EngineSpec, url: str, facts: EngineFacts) -> None:
        ranks = [
            RankReport(
                dp_rank=DpRank(spec.first_dp_rank + i),
                endpoint=f"tcp://{spec.host}:{spec.event_port + i}",
                replay_endpoint=f"tcp://{spec.host}:{spec.replay_port + i}",
            )
            for i in range(spec.dp_size)
        ]
        life = self._report
        sources = [SourceId(life.worker_id, life.incarnation, rank.dp_rank) for rank in ranks]
        self._mirror = Mirror(sources, ranks)
        self._holdings = [self._holding(name, path) for name, path in self._settings.lora.adapters.items()]
        self._report = msgspec.structs.replace(
            life,
            state=WorkerState.READY,
            url=url,
            ranks=tuple(ranks),
            page_size=facts.page_size,
            context_length=facts.context_length,
            max_total_tokens=facts.max_total_tokens,
            max_loras_per_batch=spec.lora.max_loras_per_batch,
            dynamo_format=spec.kv_events.format == "dynamo",
            bigram=facts.bigram,
            snapshot_endpoint=self._snapshots.endpoint,
        )
        log.info("worker %s: serving at %s, incarnation %s", life.worker_id, url, life.incarnation)
        self._send()

    async def _end_life(self) -> None:
        engine, client, mirror = self._engine, self._client, self._mirror
        self._engine = self._client = self._mirror = None
        self._holdings = []
        if mirror is not None:
            await mirror.close()
        if client is not None:
            await client.close()
        if engine is not None:
            await engine.stop()

    def _spec(self) -> EngineSpec:
        settings = self._settings
        dp_size = settings.dp_size
        count = 1 + 2 * dp_size
        first = settings.kv_events.first_port
        if first is not None:
            first += settings.index * (2 + 2 * dp_size)
        port = reserve(settings.host, count, first=first, rng=self._rng)
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
        )

    def _holding(self, name: str, path: str) -> Holding:
        content = content_id(Path(path))
        return Holding(
            worker_id=self._report.worker_id,
            incarnation=self._report.incarnation,
            lora_id=lora_id(name, content),
            name=name,
            content_id=content,
            state=AdapterState.LOADED,
        )

    # -- telling others ------------------------------------------------------------------------------------------

    def _set_state(self, state: WorkerState) -> None:
        self._report = msgspec.structs.replace(self._report, state=state)
        self._send()

    def _send(self) -> None:
        if not self._socket.closed:
            self._socket.send(msgspec.msgpack.encode(self.report()), zmq.NOBLOCK)

    async def _beat(self) -> None:
        while True:
            self._send()
            await asyncio.sleep(HEARTBEAT_S)

    async def _tell(self) -> None:
        told: tuple[Incarnation, int] | None = None
        told_s = 0.0
        while True:
            current = (self._report.incarnation, len(self._holdings))
            if current != told or time.monotonic() - told_s > _TABLE_S:
                try:
                    await self._tell_table(self._settings.worker_id, self._report.incarnation, self._holdings)
                    told, told_s = current, time.monotonic()
                except Exception as exc:  # noqa: BLE001  # the table is away: it is told again until it is back
                    log.warning("worker %s: the LoRA table can't be told: %s", self._settings.worker_id, exc)
            await asyncio.sleep(_POLL_S)

    def _snapshot(self, request: SnapshotRequest) -> Snapshot:
        if self._mirror is None:
            error = "the engine is not running"
            return Snapshot(
                incarnation=request.incarnation, dp_rank=request.dp_rank, last_seq=-1, blocks={}, error=error
            )
        return self._mirror.snapshot(request)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return


def _check_files(spec: EngineSpec) -> None:
    """Raise ValueError for what would take SGLang half a minute to find out."""
    model = Path(spec.model.path)
    if model.is_absolute() and not (model / "config.json").is_file():
        raise ValueError(f"model folder {model} has no config.json on this node; correct model.path")
    for name, path in spec.lora.adapters.items():
        try:
            adapter_files(Path(path))
        except AdapterFilesError as exc:
            raise ValueError(f"lora.adapters.{name}: {exc}") from exc
