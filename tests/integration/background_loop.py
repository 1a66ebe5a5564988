"""An event loop in a thread of its own, driven by tests that aren't asynchronous themselves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

SETTLE_S: Final = 60.0
"""Longest wait for anything that should take a moment."""
_TICK_S: Final = 0.05

T = TypeVar("T")


def poll(condition: Callable[[], T], *, within_s: float = SETTLE_S, what: str = "") -> T:
    """First truthy value of `condition`; fails after `within_s`."""
    until_s = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < until_s, f"not within {within_s} s: {what or condition}"
        time.sleep(_TICK_S)
    return value


class BackgroundLoop:
    """`start_loop` first, `stop_loop` last."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="background-loop", daemon=True)

    def start_loop(self) -> None:
        """Begin."""
        self._thread.start()

    def stop_loop(self) -> None:
        """End; whatever still runs is left where it is."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], *, within_s: float = SETTLE_S) -> T:
        """Result of a coroutine that runs on the loop."""
        return self.spawn(work).result(within_s)

    def call(self, ask: Callable[[], T]) -> T:
        """Result of a plain function that runs on the loop, where all state lives."""

        async def asking() -> T:
            return ask()

        return self.run(asking())

    def wait(self, condition: Callable[[], T], *, within_s: float = SETTLE_S, what: str = "") -> T:
        """First truthy value of a function that runs on the loop."""
        return poll(lambda: self.call(condition), within_s=within_s, what=what)
