"""HTTP surface of the indexer service: register servers, ask who holds a prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from router.errors import InvalidRequest, RouterError
from router.ids import LoraId
from router.net.dispatch import error_response
from router.net.indexer import Indexer, Query, Registration

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY_BYTES = 32 * 1024 * 1024
"""A prompt of a million token ids fits."""


class IndexerServer:
    """Handlers of one indexer. `start` binds, `stop` lets everything go."""

    def __init__(self, indexer: Indexer, *, host: str, port: int) -> None:
        self._indexer = indexer
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises OSError if the port is taken."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.router.add_post("/workers", self._register)
        app.router.add_get("/workers", self._workers)
        app.router.add_put("/workers/{worker_id:.+}/adapters", self._set_adapters)
        app.router.add_delete("/workers/{worker_id:.+}", self._remove)
        app.router.add_post("/query", self._query)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self._watching = asyncio.ensure_future(self._indexer.run())

    async def stop(self) -> None:
        """Stop listening and following."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._indexer.close()

    async def _register(self, request: web.Request) -> web.Response:
        registration = _read(await request.read(), Registration)
        self._indexer.register(registration)
        return web.json_response({"worker_id": registration.worker_id, "dp_rank": registration.dp_rank}, status=201)

    async def _workers(self, _request: web.Request) -> web.Response:
        return web.json_response(self._indexer.workers())

    async def _set_adapters(self, request: web.Request) -> web.Response:
        """Body: {name: lora_id}, or the same under `adapters`."""
        body = _read(await request.read(), dict[str, Any])
        if isinstance(body.get("adapters"), dict) and len(body) == 1:
            body = body["adapters"]
        adapters = _convert(body, dict[str, LoraId])
        self._indexer.set_adapters(request.match_info["worker_id"], adapters)
        return web.json_response({"adapters": adapters})

    async def _remove(self, request: web.Request) -> web.Response:
        self._indexer.remove(request.match_info["worker_id"])
        return web.json_response({"removed": request.match_info["worker_id"]})

    async def _query(self, request: web.Request) -> web.Response:
        return web.json_response(self._indexer.query(_read(await request.read(), Query)))

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RouterError as exc:
        return error_response(exc)
    except web.HTTPException as exc:
        wrapped = InvalidRequest(f"{request.method} {request.path}: {exc.reason}")
        return web.json_response(wrapped.body(), status=exc.status)


def _read(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise InvalidRequest(f"unreadable body: {exc}") from exc


def _convert(value: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"unreadable body: {exc}") from exc
