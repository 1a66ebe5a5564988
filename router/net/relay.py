"""One attempt: a request to one engine, its answer to the client byte by byte."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from router.decision import Decision
from router.errors import UpstreamError
from router.load import Booking
from router.net.arrival import ArrivalGate
from router.net.failover import Attempt, Failover
from router.net.openai import Api
from router.net.usage import StreamFilter, Usage, usage_of

log = logging.getLogger(__name__)

_HOP_HEADERS: Final = frozenset({"content-length", "transfer-encoding", "connection", "server", "date", "keep-alive"})
_ADAPTER_GONE: Final = re.compile(rb"adapters? (that has never been loaded|are not loaded)")
"""How SGLang's tokenizer manager says that it doesn't hold an adapter."""


class EngineLostError(Exception):
    """The engine couldn't be reached, failed, or died before it answered."""


class AdapterGoneError(Exception):
    """The engine has given up the adapter since the decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A request as it goes to an engine. `body` depends on the decision, for model name and rank."""

    path: str
    body: Callable[[Decision], bytes]
    content_type: str
    request_id: str
    """Ours, never empty: SGLang aborts every request whose id begins with the one given."""
    stream: bool = False
    hide_usage: bool = False
    adapter: str | None = None
    predictable: bool = True


Account = Callable[[Outgoing, Decision, str, float, Usage | None], None]


class Relay:
    """Sends requests to engines."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        arrival: ArrivalGate,
        failover: Failover,
        *,
        account: Account,
        on_computed: Callable[[], None],
    ) -> None:
        """`account(outgoing, decision, status, seconds, usage)` is told how each answer ended; `on_computed` is called
        when a prompt has been computed, which makes room for another."""
        self._on_computed = on_computed
        self._session = session
        self._arrival = arrival
        self._failover = failover
        self._account = account

    async def attempt(
        self, outgoing: Outgoing, decision: Decision, booking: Booking, request: web.Request
    ) -> web.StreamResponse:
        """The engine's answer, relayed. Raises EngineLostError and AdapterGoneError before any byte is."""
        started_s = time.monotonic()
        mark = self._arrival.mark(decision.source)
        with self._failover.attempt(decision) as attempt:
            upstream, first = await self._first_bytes(outgoing, decision, request, attempt)
        async with upstream:
            if upstream.status >= 500:
                raise EngineLostError(f"HTTP {upstream.status}: {first[:200]!r}")
            self._failover.answered(decision.source.worker_id)
            if outgoing.adapter is not None and _ADAPTER_GONE.search(first) and upstream.status in (200, 400):
                raise AdapterGoneError
            now_s = time.monotonic()
            if outgoing.stream and upstream.status == 200:
                booking.first_token(now_s=now_s)
                self._on_computed()
                return await self._stream(upstream, first, outgoing, decision, booking, request, started_s, mark)
        booking.first_token(now_s=now_s)
        usage = usage_of(first) if upstream.status == 200 else None
        await self._arrival.settle(decision.source, mark, usage if outgoing.predictable else None)
        self._account(outgoing, decision, str(upstream.status), now_s - started_s, usage)
        return web.Response(body=first, status=upstream.status, headers=_headers(upstream.headers, decision))

    async def _first_bytes(
        self, outgoing: Outgoing, decision: Decision, request: web.Request, attempt: Attempt
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """The engine's answer, and its first chunk, or all of it where it isn't a stream."""
        try:
            async with asyncio.timeout(None) as limit:
                attempt.limit = limit
                upstream = await self._session.post(
                    decision.url + outgoing.path,
                    data=outgoing.body(decision),
                    headers={"Content-Type": outgoing.content_type},
                    params=request.query if outgoing.path not in tuple(Api) else None,
                    allow_redirects=False,
                )
                try:
                    whole = not outgoing.stream or upstream.status != 200
                    return upstream, await (upstream.read() if whole else upstream.content.readany())
                except BaseException:
                    upstream.close()
                    raise
                finally:
                    attempt.limit = None
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise EngineLostError(f"{type(exc).__name__}: {exc}") from exc

    async def _stream(
        self,
        upstream: aiohttp.ClientResponse,
        chunk: bytes,
        outgoing: Outgoing,
        decision: Decision,
        booking: Booking,
        request: web.Request,
        started_s: float,
        mark: int,
    ) -> web.StreamResponse:
        ttft_s = time.monotonic() - started_s
        response = web.StreamResponse(headers=_headers(upstream.headers, decision))
        await response.prepare(request)
        events = StreamFilter(hide_usage=outgoing.hide_usage)
        status = "200"
        try:
            while chunk:
                if data := events.feed(chunk):
                    if events.usage is not None:
                        await self._arrival.settle(decision.source, mark, events.usage)
                    await response.write(data)
                chunk = await _read(upstream.content.readany())
                self._failover.heard(decision.source.worker_id)
            if rest := events.flush():
                await response.write(rest)
        except EngineLostError as exc:
            status = "broken"
            self._failover.failed(decision.source.worker_id)
            log.warning("request %s: stream from %s broke: %s", outgoing.request_id, decision.source, exc)
            error = UpstreamError(f"worker {decision.source.worker_id} failed while answering")
            await response.write(b"data: " + msgspec.json.encode(error.body()) + b"\n\n")
        else:
            of_one = events.usage if outgoing.predictable else None  # several samples' tokens come side by side
            booking.finish(now_s=time.monotonic(), output_tokens=of_one.completion_tokens if of_one else 0)
        await response.write_eof()
        self._account(outgoing, decision, status, ttft_s, events.usage)
        return response


async def _read(reading: Awaitable[bytes]) -> bytes:
    """Bytes from an engine. Raises EngineLostError; what a client's connection raises is another matter."""
    try:
        return await reading
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise EngineLostError(f"{type(exc).__name__}: {exc}") from exc


def _headers(upstream: Mapping[str, str], decision: Decision) -> dict[str, str]:
    headers = {name: value for name, value in upstream.items() if name.lower() not in _HOP_HEADERS}
    headers["x-loray-worker"] = decision.source.worker_id
    headers["x-loray-dp-rank"] = str(decision.source.dp_rank)
    headers["x-loray-reason"] = decision.reason
    headers["x-loray-cost-ms"] = f"{decision.cost_ms:.1f}"
    if decision.predicted_cached_tokens is not None:
        headers["x-loray-predicted-cached-tokens"] = str(decision.predicted_cached_tokens)
    return headers
