"""A LoRA table for a router in another process: its methods over ZMQ, one message a call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from router.ids import WorkerId

_CALL_S = 60.0


class TableServer:
    """Answers for a table, or whatever has its methods. Lives on the table's loop."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._tasks = {asyncio.ensure_future(self._serve())}

    async def close(self) -> None:
        """Stop answering."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            client, payload = await self._socket.recv_multipart()
            task = asyncio.ensure_future(self._answer(client, *msgspec.msgpack.decode(payload)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, client: bytes, method: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        try:
            answer = {"result": await getattr(self._table, method)(*args, **kwargs)}
        except ConnectionError as exc:
            answer = {"error": str(exc)}
        await self._socket.send_multipart([client, msgspec.msgpack.encode(answer)])


class TableClient:
    """As much of a table as a router calls by itself."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context = zmq.asyncio.Context()

    async def wait_view(self, epoch: str, version: int, timeout_s: float) -> bytes:
        """See LoraTable."""
        return bytes(await self._call("wait_view", epoch, version, timeout_s))

    async def want(self, name: str, preferred: list[WorkerId], waiting: int, *, more: bool) -> None:
        """See LoraTable."""
        await self._call("want", name, preferred, waiting, more=more)

    async def use(self, counts: Mapping[str, int]) -> None:
        """See LoraTable."""
        await self._call("use", dict(counts))

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        try:
            socket.connect(self._endpoint)
            await socket.send(msgspec.msgpack.encode([method, args, kwargs]))
            async with asyncio.timeout(_CALL_S):
                answer = msgspec.msgpack.decode(await socket.recv())
        finally:
            socket.close()
        if "error" in answer:
            raise ConnectionError(answer["error"])
        return answer["result"]
