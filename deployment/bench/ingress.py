"""`bench ingress`: what the router adds to a call, and how many stream events it relays.

Three processes on loopback: an engine that answers at once with canned bytes, a router (the product's own ingress,
tokenizer, core and relay; no Ray), and this one as the client. Beside it a relay that does nothing else.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import aiohttp
import msgspec
import psutil
import uvloop
from aiohttp import web

from deployment.assets.paths import model_dir
from router.admission import AdmissionConfig
from router.config import RouterConfig
from router.core import RouterCore
from router.cost import CostWeights
from router.ids import DpRank, Incarnation, WorkerId
from router.net.adapter_admin import AdapterRoutes
from router.net.adapters import AdapterGate
from router.net.admission import Admission
from router.net.dispatch import Dispatcher
from router.net.ingress import Ingress
from router.net.metrics import PrometheusRecorder
from router.net.tokenizer import PromptTokenizer
from router.reports import RankReport, TableView, WorkerReport, WorkerState

MODEL: Final = "bench"
_NO_TABLE: Final[Any] = None
"""No request of the benchmark names an adapter."""
NUM_STREAMS: Final = 16
_USAGE: Final = {
    "prompt_tokens": 64, "completion_tokens": 4, "total_tokens": 68, "prompt_tokens_details": {"cached_tokens": 0},
}  # fmt: skip
_ANSWER: Final = msgspec.json.encode(
    {"id": "x", "object": "text_completion", "choices": [{"index": 0, "text": "four words of text"}], "usage": _USAGE}
)
_EVENT: Final = (
    b"data: "
    + msgspec.json.encode({
        "id": "c353af408e8e45b498cfb474e40145ae", "object": "text_completion", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "matched_stop": None}],
        "usage": None,
    })
    + b"\n\n"
)  # fmt: skip
_LAST: Final = b"data: " + msgspec.json.encode({"choices": [], "usage": _USAGE}) + b"\n\ndata: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class _Server:
    process: multiprocessing.process.BaseProcess
    url: str

    @property
    def cpu_s(self) -> float:
        """Processor time that the server has used."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system


def run(*, quick: bool) -> dict[str, Any]:
    """All figures. `quick` is for a smoke test, its figures mean nothing."""
    engine = _start(_engine, 0)
    router = _start(_router, int(engine.url.rsplit(":", 1)[1]))
    relay = _start(_relay, int(engine.url.rsplit(":", 1)[1]))
    try:
        return uvloop.run(_measure(engine, router, relay, quick=quick))
    finally:
        for server in (router, relay, engine):
            server.process.kill()
            server.process.join()


async def _measure(engine: _Server, router: _Server, relay: _Server, *, quick: bool) -> dict[str, Any]:
    rounds, events = (30, 500) if quick else (1000, 20_000)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        calls = await _unary(session, [engine.url, router.url, relay.url], rounds)
        added = sorted(routed - direct for direct, routed, _ in calls)
        relayed = sorted(routed - direct for direct, _, routed in calls)
        through_router = await _streams(session, router, events)
        through_relay = await _streams(session, relay, events)
    return {
        "added_ms": _percentiles(added),
        **through_router,
        "plain": {"added_ms": _percentiles(relayed), **through_relay},
    }


async def _unary(session: aiohttp.ClientSession, urls: list[str], rounds: int) -> list[tuple[float, ...]]:
    """Times of the same call to each URL in turn, in ms."""
    body = {"model": MODEL, "prompt": "word " * 60, "max_tokens": 4}
    taken = []
    for i in range(rounds + 20):
        row = []
        for url in urls:
            started = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                await answer.read()
            row.append((time.perf_counter() - started) * 1000)
        if i >= 20:
            taken.append(tuple(row))
    return taken


async def _streams(session: aiohttp.ClientSession, server: _Server, events: int) -> dict[str, float]:
    async def stream() -> int:
        body = {"model": MODEL, "prompt": "word", "stream": True, "max_tokens": events}
        size = 0
        async with session.post(f"{server.url}/v1/completions", json=body) as answer:
            async for chunk in answer.content.iter_any():
                size += len(chunk)
        return size // len(_EVENT)

    cpu_s, started = server.cpu_s, time.perf_counter()
    total = sum(await asyncio.gather(*(stream() for _ in range(NUM_STREAMS))))
    taken_s, cpu_s = time.perf_counter() - started, server.cpu_s - cpu_s
    return {
        "sse_events_per_s": round(total / taken_s),
        "sse_events_per_cpu_s": round(total / max(cpu_s, 0.01)),
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    return {"p50": round(values[len(values) // 2], 3), "p99": round(values[int(len(values) * 0.99)], 3)}


# -- servers, each in a process of its own ---------------------------------------------------------------------------


def _start(make: Callable[[int], Awaitable[int]], argument: int) -> _Server:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(make, argument, there), daemon=True)
    process.start()
    return _Server(process, f"http://127.0.0.1:{here.recv()}")


def _serve(make: Callable[[int], Awaitable[int]], argument: int, pipe: Connection) -> None:
    async def forever() -> None:
        pipe.send(await make(argument))
        await asyncio.Event().wait()

    uvloop.run(forever())


async def _listen(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> int:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return int(runner.addresses[0][1])


async def _engine(_argument: int) -> int:
    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.Response(body=_ANSWER, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(_EVENT)
            await asyncio.sleep(0)  # one event a chunk, as a decode step gives
        await response.write(_LAST)
        await response.write_eof()
        return response

    return await _listen(complete)


async def _relay(engine_port: int) -> int:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def relay(request: web.Request) -> web.StreamResponse:
        async with session.post(f"http://127.0.0.1:{engine_port}{request.path}", data=await request.read()) as upstream:
            response = web.StreamResponse(headers={"Content-Type": upstream.headers["Content-Type"]})
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    return await _listen(relay)


async def _router(engine_port: int) -> int:
    core = RouterCore(CostWeights(), rng=random.Random(0))
    report = WorkerReport(
        worker_id=WorkerId("w0"),
        incarnation=Incarnation("bench"),
        state=WorkerState.READY,
        url=f"http://127.0.0.1:{engine_port}",
        ranks=(RankReport(dp_rank=DpRank(0), endpoint="none"),),
        page_size=16,
        context_length=1 << 20,
    )
    for effect in core.report(report):
        core.ingest.replayed(effect.source, [], now_s=0.0)
    prometheus = PrometheusRecorder()
    dispatcher = Dispatcher(
        core,
        served_name=MODEL,
        engine_key="",
        timeout_s=600,
        record=prometheus.record,
        drain=lambda _source: None,
        sample=lambda _wanted: None,
        gate=AdapterGate(core, _NO_TABLE, wait_s=1, record_wait=lambda _seconds: None),
        admission=Admission(core, AdmissionConfig(), record_wait=lambda _seconds: None),
    )
    core.update_table(TableView(epoch="bench", version=0))
    port = _free_port()

    async def audit() -> dict[str, Any]:
        return {}

    ingress = Ingress(
        RouterConfig(port=port),
        core,
        dispatcher,
        served_name=MODEL,
        prometheus=prometheus,
        before_scrape=lambda: None,
        audit=audit,
        adapters=AdapterRoutes(_NO_TABLE),
    )
    ingress.trusted_tokenizer = PromptTokenizer(str(model_dir("tiny-llama")))
    await ingress.start()
    return port


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
