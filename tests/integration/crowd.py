"""Many clients at once, from one thread: as many connections as requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from tests.integration.asking import COMPLETIONS

_TIMEOUT_S = 100.0


@dataclass(frozen=True, slots=True)
class Wish:
    """One request that is to be sent."""

    body: dict[str, Any]
    path: str = COMPLETIONS
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def worker(self) -> str:
        """Who served it."""
        return self.headers["x-loray-worker"]

    @property
    def code(self) -> str:
        """Of an error."""
        return str(msgspec.json.decode(self.body)["error"]["code"])

    @property
    def text(self) -> str:
        """Of a completion that isn't streamed."""
        return str(msgspec.json.decode(self.body)["choices"][0]["text"])


class Crowd:
    """Clients of one router. Lives on one loop."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def send(self, wish: Wish) -> Reply:
        """One request and its whole answer."""
        async with self._session.post(wish.path, json=wish.body, headers=dict(wish.headers)) as answer:
            return Reply(answer.status, dict(answer.headers), await answer.read())

    async def send_all(self, wishes: Sequence[Wish], *, at_once: int | None = None) -> list[Reply]:
        """All of them, `at_once` at a time; replies in their order."""
        turn = asyncio.Semaphore(at_once or len(wishes))

        async def one(wish: Wish) -> Reply:
            async with turn:
                return await self.send(wish)

        return await asyncio.gather(*map(one, wishes))

    @asynccontextmanager
    async def stream(self, wish: Wish) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose answer has begun; leaving it closes the connection."""
        async with self._session.post(wish.path, json=wish.body, headers=dict(wish.headers)) as answer:
            try:
                yield answer
            finally:
                answer.close()


@asynccontextmanager
async def crowd(url: str) -> AsyncIterator[Crowd]:
    """A connection of its own for each request."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        yield Crowd(session)


def ask_all(url: str, wishes: Sequence[Wish], *, at_once: int | None = None) -> list[Reply]:
    """`Crowd.send_all`, for those who have no loop."""

    async def asking() -> list[Reply]:
        async with crowd(url) as clients:
            return await clients.send_all(wishes, at_once=at_once)

    return asyncio.run(asking())
