"""One request through the fleet: decide, book, relay, retry what no client byte depends on, account.

A request is tried again elsewhere when its engine can't be reached or dies before the client has seen a byte, never
at the same worker twice. A stream that dies later ends with one error event. A client that leaves ends its request
in the engine too. Whatever happens, the booking is given back.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import aiohttp
from aiohttp import web

from router.admission import Priority, Ticket
from router.core import RouterCore
from router.decision import Decision, RouteRequest
from router.errors import (
    AdapterNotHeld,
    ContextTooLong,
    InvalidRequest,
    NoCapacity,
    Overloaded,
    RequestOverdue,
    RouterError,
    UpstreamError,
)
from router.hashing import pack_tokens
from router.health import MAX_ATTEMPTS
from router.ids import SourceId, WorkerId
from router.net import metrics
from router.net.adapters import AdapterGate
from router.net.admission import PRIORITY_HEADER, Admission, priority_of
from router.net.arrival import ArrivalGate
from router.net.engine_probe import ProbeError, ask_cached_tokens
from router.net.engine_tokenizer import disagreement, tokenize_chat
from router.net.failover import Failover
from router.net.metrics import AdapterLabels, Metric
from router.net.openai import Api, Call, engine_body
from router.net.relay import AdapterGoneError, EngineLostError, Outgoing, Relay
from router.net.tokenizer import PromptTokenizer
from router.net.usage import Usage

log = logging.getLogger(__name__)

_CONNECT_S: Final = 5.0
_ABORT_S: Final = 30.0


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
        admission: Admission,
    ) -> None:
        """`record(metric, value, *labels)`; `drain(source)` applies events that have arrived already; `sample` is
        shown requests whose cached tokens can be predicted."""
        self._core = core
        self._served_name = served_name
        self._record: Callable[[Metric, float, str], None] = record
        self._admission = admission
        self._sample = sample
        self._gate = gate
        self._timeout_s = timeout_s
        self._labels = AdapterLabels()
        self._tasks: set[asyncio.Task[None]] = set()
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {engine_key}"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),  # requests have deadlines of their own
            auto_decompress=False,
        )
        self._failover = Failover(core, probe=self.ask_cached_tokens)
        self._relay = Relay(
            self._session,
            ArrivalGate(core, drain),
            self._failover,
            account=self._account,
            on_computed=admission.changed,
            abort=self._abort,
        )

    async def close(self) -> None:
        """Close connections; requests in flight fail."""
        for task in self._tasks:
            task.cancel()
        await self._failover.close()
        await self._session.close()

    async def run(self) -> None:
        """Look after requests that wait and workers that stand still, until cancelled."""
        await asyncio.gather(self._admission.run(), self._failover.run())

    @property
    def num_queued(self) -> int:
        """Requests that wait for a worker with room."""
        return len(self._admission)

    @property
    def suspensions(self) -> int:
        """Times that a worker was suspended."""
        return self._failover.suspensions

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
            max_output_tokens=call.max_output_tokens,
        )

    async def send(self, outgoing: Outgoing, wanted: RouteRequest, request: web.Request) -> web.StreamResponse:
        """Wait for room, then route and relay until a worker answers. Raises RouterError."""
        deadline_s = time.monotonic() + self._timeout_s
        priority = priority_of(request.headers.get(PRIORITY_HEADER))
        ticket = await self._enter(wanted, priority)
        self._failover.budget.asked(time.monotonic())
        try:
            return await self._send(outgoing, wanted, request, priority, ticket, deadline_s)
        finally:
            self._admission.changed()

    async def _enter(self, wanted: RouteRequest, priority: Priority) -> Ticket | None:
        tokens = wanted.num_tokens + round(self._core.load.output_tokens)
        return await self._admission.enter(wanted.adapter, priority, tokens)

    async def _send(
        self,
        outgoing: Outgoing,
        wanted: RouteRequest,
        request: web.Request,
        priority: Priority,
        ticket: Ticket | None,
        deadline_s: float,
    ) -> web.StreamResponse:
        failed: dict[WorkerId, str] = {}
        while True:
            now_s = time.monotonic()
            try:
                decision = self._core.route(replace(wanted, now_s=now_s, exclude=failed.keys()))
                booking = self._core.book(decision, now_s=now_s, whole=not outgoing.stream)
            except AdapterNotHeld:
                assert wanted.adapter is not None
                self._admission.sent(ticket)
                self._admission.check_bound(self._gate.waiting.total())
                await self._gate.wait(wanted.adapter, failed.keys())
                ticket = await self._enter(wanted, priority)  # many may have waited for it with this one
                continue
            except NoCapacity as exc:
                if failed:
                    raise UpstreamError(f"every worker that could serve this failed: {failed}") from exc
                raise
            finally:
                self._admission.sent(ticket)
            with booking:
                self._gate.used(decision)
                try:
                    return await self._relay.attempt(outgoing, decision, booking, request, deadline_s=deadline_s)
                except AdapterGoneError:
                    self._gate.gone(decision)
                except EngineLostError as exc:
                    self._abort(decision, outgoing.request_id)
                    self._lost(outgoing, decision.source.worker_id, str(exc), failed)
                except (asyncio.CancelledError, ConnectionResetError, RequestOverdue):
                    self._abort(decision, outgoing.request_id)
                    raise

    def _lost(self, outgoing: Outgoing, worker_id: WorkerId, why: str, failed: dict[WorkerId, str]) -> None:
        """Count the failure. Raises UpstreamError where the request may not be tried again."""
        failed[worker_id] = why
        log.warning("request %s: worker %s lost (%s)", outgoing.request_id, worker_id, why)
        self._failover.failed(worker_id)
        if len(failed) >= MAX_ATTEMPTS:
            raise UpstreamError(f"{len(failed)} workers failed this request: {failed}")
        if not self._failover.budget.take(time.monotonic()):
            raise UpstreamError(f"worker {worker_id} failed this request, and too many are being tried again: {why}")
        self._record(metrics.RETRIES, 1, worker_id)

    def _account(self, outgoing: Outgoing, decision: Decision, status: str, ttft_s: float, usage: Usage | None) -> None:
        adapter = self._labels.label(outgoing.adapter)
        self._record(metrics.REQUESTS, 1, adapter, decision.source.worker_id, status)  # type: ignore[call-arg]  # as many labels as the metric has
        self._record(metrics.REASONS, 1, decision.reason)
        if status == "200":
            self._record(metrics.TTFT, ttft_s, adapter)
        if usage is None:
            return
        self._core.load.learn_output(usage.completion_tokens)
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

    def _check_length(self, num_tokens: int) -> None:
        limits = [record.report.context_length for record in self._core.workers.values()]
        longest = max(filter(None, limits), default=0)
        if longest and num_tokens >= longest:
            raise ContextTooLong(
                f"the prompt has {num_tokens} tokens, but the context length is {longest}, output included"
            )

    def _abort(self, decision: Decision, request_id: str) -> None:
        """The client has left, or goes elsewhere: end its request in the engine, in the background."""

        async def abort() -> None:
            url, timeout = decision.url + "/abort_request", aiohttp.ClientTimeout(total=_ABORT_S)
            try:
                async with self._session.post(url, json={"rid": request_id}, timeout=timeout) as answer:
                    await answer.read()
            except (aiohttp.ClientError, TimeoutError) as exc:
                log.info("request %s: abort at %s failed: %s", request_id, decision.source, exc)

        if not self._session.closed:
            task = asyncio.ensure_future(abort())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def error_response(error: RouterError) -> web.Response:
    """The error as the OpenAI API would say it."""
    wait_s = error.retry_after_s if isinstance(error, Overloaded) else 1
    headers = {"Retry-After": str(wait_s)} if error.status in (429, 503) else None
    return web.json_response(error.body(), status=error.status, headers=headers)
