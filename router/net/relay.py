"""One attempt: a request to one engine, its answer to the client byte by byte."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from router.booking import Booking
from router.decision import Decision
from router.errors import RequestOverdue, RouterError, UpstreamError
from router.net.arrival import ArrivalGate
from router.net.failover import Attempt, Failover
from router.net.openai import Api
from router.net.usage import StreamFilter, Usage, error_of, usage_of

log = logging.getLogger(__name__)

_HOP_HEADERS: Final = frozenset({"content-length", "transfer-encoding", "connection", "server", "date", "keep-alive"})
_ADAPTER_GONE: Final = (
    "Got LoRA adapter that has never been loaded: ",
    "The following requested LoRA adapters are not loaded: ",
)
"""How SGLang's tokenizer manager and LoRA registry begin to say that they don't hold an adapter."""


_OVERDUE: Final = "the request wasn't answered within router.request_timeout_s"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """One attempt, and all that it is about."""

    outgoing: Outgoing
    decision: Decision
    booking: Booking
    request: web.Request
    deadline_s: float
    attempt: Attempt
    started_s: float
    mark: int

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() >= self.deadline_s


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
        abort: Callable[[Decision, str], None],
    ) -> None:
        """`account(outgoing, decision, status, seconds, usage)` is told how each answer ended; `on_computed` is called
        when a prompt has been computed, which makes room for another; `abort(decision, request_id)` ends a request in
        its engine."""
        self._on_computed = on_computed
        self._abort = abort
        self._session = session
        self._arrival = arrival
        self._failover = failover
        self._account = account

    async def attempt(
        self, outgoing: Outgoing, decision: Decision, booking: Booking, request: web.Request, *, deadline_s: float
    ) -> web.StreamResponse:
        """The engine's answer, relayed; it ends at `deadline_s` of the monotonic clock.

        Raises EngineLostError, AdapterGoneError and RequestOverdue before any byte is relayed.
        """
        with self._failover.attempt(decision) as attempt:
            exchange = _Exchange(
                outgoing=outgoing,
                decision=decision,
                booking=booking,
                request=request,
                deadline_s=deadline_s,
                attempt=attempt,
                started_s=time.monotonic(),
                mark=self._arrival.mark(decision.source),
            )
            return await self._relay(exchange)

    async def _relay(self, exchange: _Exchange) -> web.StreamResponse:
        outgoing, decision = exchange.outgoing, exchange.decision
        upstream, first = await self._first_bytes(exchange)
        async with upstream:
            if upstream.status >= 500:
                raise EngineLostError(f"HTTP {upstream.status}: {first[:200]!r}")
            self._failover.answered(decision.source.worker_id)
            streams = outgoing.stream and upstream.status == 200
            may_be_gone = outgoing.adapter is not None and (streams or upstream.status == 400)
            if may_be_gone and error_of(first).startswith(_ADAPTER_GONE):
                raise AdapterGoneError
            now_s = time.monotonic()
            exchange.booking.first_token(now_s=now_s)
            if streams:
                self._on_computed()
                return await self._stream(exchange, upstream, first)
        usage = usage_of(first) if upstream.status == 200 else None
        await self._arrival.settle(decision.source, exchange.mark, usage if outgoing.predictable else None)
        self._account(outgoing, decision, str(upstream.status), now_s - exchange.started_s, usage)
        return web.Response(body=first, status=upstream.status, headers=_headers(upstream.headers, decision))

    async def _first_bytes(self, exchange: _Exchange) -> tuple[aiohttp.ClientResponse, bytes]:
        """The engine's answer, and its first chunk, or all of it where it isn't a stream."""
        outgoing, decision, attempt = exchange.outgoing, exchange.decision, exchange.attempt
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(exchange.deadline_s - time.monotonic()) as limit:
                attempt.end = lambda: limit.reschedule(loop.time())
                upstream = await self._session.post(
                    decision.url + outgoing.path,
                    data=outgoing.body(decision),
                    headers={"Content-Type": outgoing.content_type},
                    params=exchange.request.query if outgoing.path not in tuple(Api) else None,
                    allow_redirects=False,
                )
                try:
                    whole = not outgoing.stream or upstream.status != 200
                    return upstream, await (upstream.read() if whole else upstream.content.readany())
                except BaseException:
                    upstream.close()
                    raise
                finally:
                    attempt.end = None
        except (aiohttp.ClientError, TimeoutError) as exc:
            if exchange.is_overdue:
                raise RequestOverdue(_OVERDUE) from exc
            raise EngineLostError(f"{type(exc).__name__}: {exc}") from exc

    async def _stream(self, exchange: _Exchange, upstream: aiohttp.ClientResponse, chunk: bytes) -> web.StreamResponse:
        outgoing, decision, attempt = exchange.outgoing, exchange.decision, exchange.attempt
        ttft_s = time.monotonic() - exchange.started_s
        response = web.StreamResponse(headers=_headers(upstream.headers, decision))
        await response.prepare(exchange.request)
        events = StreamFilter(hide_usage=outgoing.hide_usage)
        status = "200"
        attempt.has_begun = True
        attempt.end = lambda: upstream.content.set_exception(aiohttp.ClientConnectionError("nothing more will come"))
        overdue = asyncio.get_running_loop().call_later(exchange.deadline_s - time.monotonic(), attempt.give_up)
        try:
            while chunk:
                if data := events.feed(chunk):
                    if events.usage is not None:
                        await self._arrival.settle(decision.source, exchange.mark, events.usage)
                    await response.write(data)
                chunk = await _read(upstream.content.readany())
                self._failover.heard(attempt)
            if rest := events.flush():
                await response.write(rest)
        except EngineLostError as exc:
            status = "broken"
            log.warning("request %s: stream from %s broke: %s", outgoing.request_id, decision.source, exc)
            error = self._broken(exchange)
            await response.write(b"data: " + msgspec.json.encode(error.body()) + b"\n\n")
        else:
            of_one = events.usage if outgoing.predictable else None  # several samples' tokens come side by side
            exchange.booking.finish(now_s=time.monotonic(), output_tokens=of_one.completion_tokens if of_one else 0)
        finally:
            overdue.cancel()
            attempt.end = None
        await response.write_eof()
        self._account(outgoing, decision, status, ttft_s, events.usage)
        return response

    def _broken(self, exchange: _Exchange) -> RouterError:
        """What the client of a stream is told that didn't come to its end."""
        worker_id = exchange.decision.source.worker_id
        if exchange.is_overdue:
            self._abort(exchange.decision, exchange.outgoing.request_id)
            return RequestOverdue(_OVERDUE)
        self._failover.failed(worker_id)
        return UpstreamError(f"worker {worker_id} failed while answering")


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
