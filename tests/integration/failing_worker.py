"""A worker whose engine answers as it is told to, a 500 say: heartbeats and HTTP as a worker's, and nothing behind."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import zmq
from aiohttp import web

from router.ids import DpRank, Incarnation, WorkerId
from router.reports import RankReport, WorkerReport, WorkerState
from tests.integration.local_fleet import CACHE_TOKENS, CONTEXT, PAGE, LocalFleet
from tests.ports import free_port

FAILING_ID: Final = WorkerId("w9")
_BEAT_S: Final = 0.5
_PROBE_PATH: Final = "/generate"


class FailingWorker:
    """Lives on the fleet's loop."""

    def __init__(self) -> None:
        #: what every request is answered with; 200 is an answer of one token
        self.status = 500
        #: requests that came, probes apart
        self.asked = 0
        self.probed = 0
        self._context = zmq.Context()
        self._beats = self._context.socket(zmq.PUB)
        self._events = self._context.socket(zmq.PUB)
        self.heartbeat_endpoint = f"tcp://127.0.0.1:{self._beats.bind_to_random_port('tcp://127.0.0.1')}"
        self._port = free_port()
        events = f"tcp://127.0.0.1:{self._events.bind_to_random_port('tcp://127.0.0.1')}"
        self._report = WorkerReport(
            worker_id=FAILING_ID,
            incarnation=Incarnation(uuid.uuid4().hex[:12]),
            state=WorkerState.READY,
            url=f"http://127.0.0.1:{self._port}",
            ranks=(RankReport(dp_rank=DpRank(9), endpoint=events),),
            page_size=PAGE,
            context_length=CONTEXT,
            max_total_tokens=CACHE_TOKENS,
            max_loras_per_batch=4,
        )
        self._runner: web.AppRunner | None = None
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, and be heard."""
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._beating = asyncio.ensure_future(self._beat())

    async def stop(self) -> None:
        """Be gone."""
        assert self._beating is not None
        assert self._runner is not None
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        await self._runner.cleanup()
        self._context.destroy(linger=0)

    async def _beat(self) -> None:
        while True:
            self._beats.send(msgspec.msgpack.encode(self._report), zmq.NOBLOCK)
            await asyncio.sleep(_BEAT_S)

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path == _PROBE_PATH:
            self.probed += 1
        elif request.path != "/abort_request":
            self.asked += 1
        if self.status != 200:
            return web.json_response({"object": "error", "message": f"status {self.status}"}, status=self.status)
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        choice = {"index": 0, "text": "9", "finish_reason": "length"}
        return web.json_response({"choices": [choice], "usage": usage, "meta_info": {"cached_tokens": 0}})


@contextmanager
def failing_worker(fleet: LocalFleet) -> Iterator[FailingWorker]:
    """One more worker of the fleet's first router, which knows it inside, and not any more afterwards."""
    worker = fleet.call(FailingWorker)
    fleet.run(worker.start())
    try:
        fleet.run(fleet.router.follow({**fleet.heartbeats(), FAILING_ID: worker.heartbeat_endpoint}))
        fleet.wait(
            lambda: any(record.report.worker_id == FAILING_ID for record in fleet.core.ready_workers()), what="it is in"
        )
        yield worker
    finally:
        fleet.run(fleet.router.follow(fleet.heartbeats()))
        fleet.run(worker.stop())
