"""One request through the fleet: decide, book, relay, retry what no client byte depends on, account.

A request is tried again elsewhere when its engine can't be reached or dies before the client has seen a byte, never
at the same worker twice. A stream that dies later ends with one error event. A client that leaves ends its request
in the engine too. Whatever happens, the booking is given back.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from router.core import RouterCore
from router.decision import Decision, RouteRequest
from router.errors import AdapterNotHeld, ContextTooLong, InvalidRequest, NoCapacity, RouterError, UpstreamError
from router.hashing import pack_tokens
from router.ids import SourceId, WorkerId
from router.load import Booking
from router.net import metrics
from router.net.adapters import AdapterGate
from router.net.arrival import ArrivalGate
from router.net.engine_probe import ProbeError, ask_cached_tokens
from router.net.engine_tokenizer import disagreement, tokenize_chat
from router.net.metrics import AdapterLabels, Metric
from router.net.openai import Api, Call, engine_body
from router.net.tokenizer import PromptTokenizer
from router.net.usage import StreamFilter, Usage, usage_of

log = logging.getLogger(__name__)

_CONNECT_S: Final = 5.0
_HOP_HEADERS: Final = frozenset({"content-length", "transfer-encoding", "connection", "server", "date", "keep-alive"})
_ADAPTER_GONE: Final = re.compile(rb"adapters? (that has never been loaded|are not loaded)")
"""How SGLang's tokenizer manager says that it doesn't hold an adapter."""


class _EngineLostError(Exception):
    """The engine couldn't be reached or died before it answered."""


class _AdapterGoneError(Exception):
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


class Dispatcher:
    """Owns the HTTP client towards the engines. Lives on the core's loop."""

    def __init__(
        self,
        core: RouterCore,
        *,
        served_name: str,
        engine_key: str,
        timeout_s: float,
        record: Callable[..., None],
        drain: Callable[[SourceId], None],
        sample: Callable[[RouteRequest], None],
        gate: AdapterGate,
    ) -> None:
        """`record(metric, value, *labels)`; `drain(source)` applies events that have arrived already; `sample` is
        shown requests whose cached tokens can be predicted."""
        self._core = core
        self._served_name = served_name
        self._record: Callable[[Metric, float, str], None] = record
        self._arrival = ArrivalGate(core, drain)
        self._sample = sample
        self._gate = gate
        self._labels = AdapterLabels()
        self._tasks: set[asyncio.Task[None]] = set()
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {engine_key}"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close connections; requests in flight fail."""
        for task in self._tasks:
            task.cancel()
        await self._session.close()

    async def call(
        self, call: Call, token_ids: list[int] | None, request: web.Request, *, replace_prompt: bool
    ) -> web.StreamResponse:
        """Serve an OpenAI request. `token_ids` None: nothing is known of them, and it is routed by load.

        `replace_prompt`: the engine gets the ids in place of the text, and needn't tokenize again.
        """
        request_id = f"{'chatcmpl' if call.api is Api.CHAT else 'cmpl'}-{uuid.uuid4().hex}"

        def body(decision: Decision) -> bytes:
            return engine_body(
                call,
                served_name=self._served_name,
                request_id=request_id,
                token_ids=token_ids if replace_prompt else None,
                local_rank=decision.local_rank,
            )

        outgoing = Outgoing(
            path=call.api,
            body=body,
            content_type="application/json",
            stream=call.stream,
            hide_usage=not call.wants_usage,
            adapter=call.adapter,
            predictable=call.predictable,
            request_id=request_id,
        )
        wanted = self.route_request(call, token_ids)
        if call.predictable:
            self._sample(wanted)
        return await self.send(outgoing, wanted, request)

    async def ask_tokens(self, call: Call) -> list[int] | None:
        """Token ids of a chat from a ready engine; None if none says."""
        record = self._core.least_loaded()
        return None if record is None else await tokenize_chat(self._session, record.report.url, call.body)

    async def check_tokenizer(self, url: str, tokenizer: PromptTokenizer) -> str | None:
        """How the tokenizer differs from that of the engine at `url`; '' if it doesn't, None if it doesn't say."""
        return await disagreement(self._session, url, tokenizer)

    async def ask_cached_tokens(self, source: SourceId, wanted: RouteRequest) -> int:
        """What the source's engine says it has cached of a prompt. Raises ProbeError."""
        record = self._core.workers.get(source.worker_id)
        if record is None or source not in record.sources:
            raise ProbeError("the source is gone")
        local_rank = record.sources.index(source) if len(record.sources) > 1 else None
        rid = f"audit-{uuid.uuid4().hex}"
        return await ask_cached_tokens(self._session, record.report.url, wanted, local_rank=local_rank, rid=rid)

    def route_request(self, call: Call, token_ids: list[int] | None) -> RouteRequest:
        """The decision's view of a call. Raises InvalidRequest."""
        if token_ids is not None:
            self._check_length(len(token_ids))
        keys = {name: call.body.get(name) for name in ("extra_key", "cache_salt")}
        plain = all(key is None or isinstance(key, str) for key in keys.values())
        try:
            packed = pack_tokens(token_ids) if token_ids is not None and plain else None
        except OverflowError as exc:
            raise InvalidRequest(f"token ids must be unsigned 32-bit integers: {exc}") from exc
        return RouteRequest(
            packed_tokens=packed,
            adapter=call.adapter,
            extra_key=keys["extra_key"] if plain else None,
            cache_salt=keys["cache_salt"] if plain else None,
            max_cached_tokens=call.max_cached_tokens,
        )

    async def send(self, outgoing: Outgoing, wanted: RouteRequest, request: web.Request) -> web.StreamResponse:
        """Route and relay until a worker answers. Raises RouterError."""
        failed: dict[WorkerId, str] = {}
        while True:
            try:
                decision = self._core.route(replace(wanted, exclude=failed.keys()))
            except AdapterNotHeld:
                assert wanted.adapter is not None
                await self._gate.wait(wanted.adapter, failed.keys())
                continue
            except NoCapacity as exc:
                if failed:
                    raise UpstreamError(f"every worker that could serve this failed: {failed}") from exc
                raise
            self._gate.used(decision)
            booking = self._core.book(decision, now_s=time.monotonic())
            try:
                return await self._attempt(outgoing, decision, booking, request)
            except _AdapterGoneError:
                self._gate.gone(decision)
            except _EngineLostError as exc:
                worker_id = decision.source.worker_id
                failed[worker_id] = str(exc)
                log.warning("request %s: worker %s lost (%s)", outgoing.request_id, worker_id, exc)
                self._record(metrics.RETRIES, 1, worker_id)
            except (asyncio.CancelledError, ConnectionResetError):
                self._abort(decision, outgoing.request_id)
                raise
            finally:
                booking.finish()

    async def _attempt(
        self, outgoing: Outgoing, decision: Decision, booking: Booking, request: web.Request
    ) -> web.StreamResponse:
        started_s = time.monotonic()
        mark = self._arrival.mark(decision.source)
        try:
            upstream = await self._session.post(
                decision.url + outgoing.path,
                data=outgoing.body(decision),
                headers={"Content-Type": outgoing.content_type},
                params=request.query if outgoing.path not in tuple(Api) else None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise _EngineLostError(f"{type(exc).__name__}: {exc}") from exc
        async with upstream:
            if outgoing.stream and upstream.status == 200:
                return await self._stream(upstream, outgoing, decision, booking, request, started_s, mark)
            answer = await _read(upstream.read())
        if upstream.status == 400 and outgoing.adapter is not None and _ADAPTER_GONE.search(answer):
            raise _AdapterGoneError
        status, headers = upstream.status, upstream.headers
        booking.timed = False  # the time of a whole answer says nothing of its prefill
        booking.first_token(now_s=time.monotonic())
        usage = usage_of(answer) if status == 200 else None
        await self._arrival.settle(decision.source, mark, usage if outgoing.predictable else None)
        self._account(outgoing, decision, str(status), time.monotonic() - started_s, usage)
        return web.Response(body=answer, status=status, headers=self._headers(headers, decision))

    async def _stream(
        self,
        upstream: aiohttp.ClientResponse,
        outgoing: Outgoing,
        decision: Decision,
        booking: Booking,
        request: web.Request,
        started_s: float,
        mark: int,
    ) -> web.StreamResponse:
        chunk = await _read(upstream.content.readany())  # a death before this is retried
        if outgoing.adapter is not None and _ADAPTER_GONE.search(chunk):
            raise _AdapterGoneError
        ttft_s = time.monotonic() - started_s
        booking.first_token(now_s=time.monotonic())
        response = web.StreamResponse(headers=self._headers(upstream.headers, decision))
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
            if rest := events.flush():
                await response.write(rest)
        except _EngineLostError as exc:
            status = "broken"
            log.warning("request %s: stream from %s broke: %s", outgoing.request_id, decision.source, exc)
            error = UpstreamError(f"worker {decision.source.worker_id} failed while answering")
            await response.write(b"data: " + msgspec.json.encode(error.body()) + b"\n\n")
        await response.write_eof()
        self._account(outgoing, decision, status, ttft_s, events.usage)
        return response

    def _account(self, outgoing: Outgoing, decision: Decision, status: str, ttft_s: float, usage: Usage | None) -> None:
        adapter = self._labels.label(outgoing.adapter)
        self._record(metrics.REQUESTS, 1, adapter, decision.source.worker_id, status)  # type: ignore[call-arg]  # as many labels as the metric has
        self._record(metrics.REASONS, 1, decision.reason)
        if status == "200":
            self._record(metrics.TTFT, ttft_s, adapter)
        if usage is None:
            return
        self._record(metrics.PROMPT, usage.prompt_tokens, adapter)
        self._record(metrics.ACTUAL, usage.cached_tokens, adapter)
        predicted = decision.predicted_cached_tokens
        if predicted is None or not outgoing.predictable:
            return
        self._record(metrics.PREDICTED, predicted, adapter)
        outcome = metrics.outcome(predicted, usage.cached_tokens)
        self._record(metrics.PREDICTIONS, 1, outcome)
        if outcome != "exact":
            log.info(
                "request %s at %s: predicted %d cached tokens, engine says %d",
                outgoing.request_id,
                decision.source,
                predicted,
                usage.cached_tokens,
            )

    def _headers(self, upstream: Mapping[str, str], decision: Decision) -> dict[str, str]:
        headers = {name: value for name, value in upstream.items() if name.lower() not in _HOP_HEADERS}
        headers["x-loray-worker"] = decision.source.worker_id
        headers["x-loray-dp-rank"] = str(decision.source.dp_rank)
        headers["x-loray-reason"] = decision.reason
        if decision.predicted_cached_tokens is not None:
            headers["x-loray-predicted-cached-tokens"] = str(decision.predicted_cached_tokens)
        return headers

    def _check_length(self, num_tokens: int) -> None:
        limits = [record.report.context_length for record in self._core.workers.values()]
        longest = max(filter(None, limits), default=0)
        if longest and num_tokens >= longest:
            raise ContextTooLong(
                f"the prompt has {num_tokens} tokens, but the context length is {longest}, output included"
            )

    def _abort(self, decision: Decision, request_id: str) -> None:
        """The client has left: end its request in the engine, in the background."""

        async def abort() -> None:
            try:
                async with self._session.post(decision.url + "/abort_request", json={"rid": request_id}) as answer:
                    await answer.read()
            except (aiohttp.ClientError, TimeoutError) as exc:
                log.info("request %s: abort at %s failed: %s", request_id, decision.source, exc)

        if not self._session.closed:
            task = asyncio.ensure_future(abort())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _read(reading: Awaitable[bytes]) -> bytes:
    """Bytes from an engine. Raises _EngineLostError; what a client's connection raises is another matter."""
    try:
        return await reading
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise _EngineLostError(f"{type(exc).__name__}: {exc}") from exc


def error_response(error: RouterError) -> web.Response:
    """The error as the OpenAI API would say it."""
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return web.json_response(error.body(), status=error.status, headers=headers)
