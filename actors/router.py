"""Router: one event loop that owns a RouterCore, hears workers and the LoRA table, and serves HTTP.

Plain class; deployment/cluster.py makes it an actor. No Ray call lies on a request's path: heartbeats and events
come over ZMQ, the table's copies by a long poll of their own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from router.config import RouterConfig
from router.core import RouterCore
from router.decision import RouteRequest
from router.ids import Incarnation, WorkerId
from router.net import metrics
from router.net.adapter_admin import AdapterAdmin, AdapterRoutes
from router.net.adapters import AdapterGate, AdapterTable
from router.net.admission import Admission
from router.net.audit import Auditor
from router.net.auditing import Auditing
from router.net.decision_log import keep_log
from router.net.dispatch import Dispatcher
from router.net.follower import Follower
from router.net.gauges import Crowd, Gauges
from router.net.ingress import Ingress
from router.net.metrics import PrometheusRecorder, Recorder
from router.net.tokenizer import PromptTokenizer
from router.reports import TableView, WorkerReport, WorkerState

log = logging.getLogger(__name__)

MAX_SAMPLES: Final = 64
_MEASURE_S: Final = 1.0
_TABLE_WAIT_S: Final = 30.0
_RETRY_S: Final = 0.5


class Table(AdapterTable, AdapterAdmin, Protocol):
    """The LoRA table, from afar."""


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a router is made with."""

    router_id: str
    config: RouterConfig
    served_name: str
    model_path: str
    api_key: str
    """Key of the engines, not of the clients."""
    min_blocks: int = 0


class Router:
    """Lives on one event loop."""

    def __init__(self, settings: RouterSettings, table: Table, recorders: Sequence[Recorder] = ()) -> None:
        self._settings = settings
        self._lora_table = table
        self._prometheus = PrometheusRecorder()
        self._recorders = (self._prometheus, *recorders)
        self._core = RouterCore(
            settings.config.weights,
            rng=random.Random(),
            hash_seed=int.from_bytes(os.urandom(8), "big"),
            min_blocks=settings.min_blocks,
            max_index_bytes=settings.config.max_index_mb * 1024 * 1024,
        )
        #: a worker has told of a newer table than our copy
        self._table_behind = asyncio.Event()
        #: the latest requests, for audits to ask again
        self._samples: deque[RouteRequest] = deque(maxlen=MAX_SAMPLES)
        self._gauges = Gauges(self._core, self._record, crowd=self._crowd)
        self._tasks: set[asyncio.Task[None]] = set()
        #: None where the model's tokenizer can't be loaded here
        self._tokenizer: PromptTokenizer | None = None
        #: the engine life that the tokenizer was, or is being, compared with
        self._compared: Incarnation | None = None
        #: lives that have been heard of
        self._known_lives: set[Incarnation] = set()
        self._follower: Follower
        self._gate: AdapterGate
        self._admission: Admission
        self._dispatcher: Dispatcher
        self._ingress: Ingress

    def __repr__(self) -> str:
        return f"Router({self._settings.router_id}, http://{self._settings.config.host}:{self._settings.config.port})"

    async def start(self) -> None:
        """Listen. Raises OSError if the port is taken or the model isn't there."""
        settings = self._settings
        self._tokenizer = await self._load_tokenizer()
        self._follower = Follower(self._core, on_report=self._heard)
        self._gate = AdapterGate(
            self._core,
            self._lora_table,
            wait_s=settings.config.adapter_wait_s,
            record_wait=lambda seconds: self._record(metrics.ADAPTER_WAIT, seconds),
        )
        self._admission = Admission(
            self._core,
            settings.config.admission,
            record_wait=lambda seconds: self._record(metrics.QUEUE_WAIT, seconds),
        )
        self._dispatcher = Dispatcher(
            self._core,
            served_name=settings.served_name,
            engine_key=settings.api_key,
            timeout_s=settings.config.request_timeout_s,
            record=self._record,
            drain=self._follower.drain,
            sample=self._samples.append,
            gate=self._gate,
            admission=self._admission,
        )
        auditor = Auditor(
            self._core, self._follower.context, ask_engine=self._dispatcher.ask_cached_tokens, samples=self._samples
        )
        auditing = Auditing(self._core, auditor, record=self._record, resync=self._follower.resync)
        self._ingress = Ingress(
            settings.config,
            self._core,
            self._dispatcher,
            served_name=settings.served_name,
            prometheus=self._prometheus,
            before_scrape=self._gauges.measure,
            audit=auditing.audit_all,
            adapters=AdapterRoutes(self._lora_table),
        )
        audits = auditing.run(settings.config.audit_interval_s)
        for work in (
            self._follow_table(),
            self._follower.watch(),
            self._keep_measuring(),
            self._gate.run(),
            self._dispatcher.run(),
            audits,
        ):
            self._spawn(work)
        if settings.config.decision_log is not None:
            self._spawn(keep_log(self._core, settings.config.decision_log, router_id=settings.router_id))
        await self._ingress.start()

    async def follow(self, endpoints: Mapping[WorkerId, str]) -> None:
        """Serve with these workers and no others: id -> heartbeat endpoint."""
        self._follower.follow(endpoints)

    async def in_flight(self, worker_id: WorkerId) -> int:
        """Requests of this router that run on the worker."""
        record = self._core.workers.get(worker_id)
        if record is None:
            return 0
        return sum(int(self._core.load.running[self._core.ingest.column(source)]) for source in record.sources)

    async def status(self) -> dict[str, Any]:
        """For `status`: JSON values."""
        config = self._settings.config
        return {
            "id": self._settings.router_id,
            "url": f"http://{config.host}:{config.port}",
            "table_epoch": self._core.table.epoch,
            **self._ingress.status(),
        }

    async def drain(self) -> None:
        """Report not ready, so that load balancers look elsewhere."""
        self._ingress.draining = True

    async def stop(self) -> None:
        """Stop listening and let everything go."""
        await self._ingress.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._dispatcher.close()
        await self._follower.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _heard(self, report: WorkerReport) -> None:
        table = self._core.table
        if report.table_epoch and (report.table_epoch != table.epoch or report.table_version > table.version):
            self._table_behind.set()
        if report.incarnation not in self._known_lives:
            self._known_lives = {r.report.incarnation for r in self._core.workers.values()}
            self._gate.changed()  # a holder may have come
        if report.state is WorkerState.READY and self._compared is None and self._tokenizer is not None:
            self._compared = report.incarnation
            self._spawn(self._compare_tokenizers(report, self._tokenizer))

    async def _load_tokenizer(self) -> PromptTokenizer | None:
        try:
            return await asyncio.to_thread(PromptTokenizer, self._settings.model_path)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, ImportError) as exc:  # remote code, an unreachable hub, an unknown kind
            log.error("no tokenizer here (%s): engines tokenize chats, completions are routed by load", exc)
            return None

    async def _compare_tokenizers(self, report: WorkerReport, tokenizer: PromptTokenizer) -> None:
        """All engines serve one model: the first to be ready tells whether we tokenize as they do."""
        try:
            difference = await self._dispatcher.check_tokenizer(report.url, tokenizer)
        except Exception:  # a tokenizer is a model's own code
            log.exception("chats are tokenized by the engines, since ours can't be compared")
            return
        record = self._core.workers.get(report.worker_id)
        if difference is None or record is None or record.report.incarnation != report.incarnation:
            self._compared = None  # the next heartbeat asks again
            return
        if difference:
            log.error("chats are tokenized by the engines, since %s", difference)
        else:
            self._ingress.trusted_tokenizer = tokenizer

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_measuring(self) -> None:
        while True:
            await asyncio.sleep(_MEASURE_S)
            self._gauges.measure()

    async def _follow_table(self) -> None:
        """Long polls; one that hangs while heartbeats tell of a newer table is given up for another."""
        while True:
            table = self._core.table
            poll = asyncio.ensure_future(self._lora_table.wait_view(table.epoch, table.version, _TABLE_WAIT_S))
            behind = asyncio.ensure_future(self._table_behind.wait())
            try:
                await asyncio.wait((poll, behind), return_when=asyncio.FIRST_COMPLETED)
                if not poll.done():  # the answer is on its way, or never comes
                    await asyncio.wait((poll,), timeout=_RETRY_S)
                if poll.done():
                    self._take_table(msgspec.msgpack.decode(poll.result(), type=TableView))
                self._table_behind.clear()
            except Exception as exc:  # noqa: BLE001  # the table is away: our copy serves until it is back
                log.warning(
                    "the LoRA table doesn't answer (%s): serving from version %d", exc, self._core.table.version
                )
                await asyncio.sleep(_RETRY_S)
            finally:
                poll.cancel()
                behind.cancel()

    def _take_table(self, view: TableView) -> None:
        if self._core.update_table(view):
            self._gauges.count_loads(view)
            self._gate.changed()

    def _crowd(self) -> Crowd:
        return Crowd(
            waiting_for_adapter=sum(self._gate.waiting.values()),
            queued=len(self._admission),
            refused=self._admission.refused,
            suspensions=self._dispatcher.suspensions,
        )

    def _record(self, metric: metrics.Metric, value: float, *labels: str) -> None:
        for recorder in self._recorders:
            recorder.record(metric, value, *labels)
