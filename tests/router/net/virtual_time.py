"""Coroutines in virtual time: nothing is waited for, the clock jumps to the next timer once nothing else is to do.

So a sleep of a millisecond means: until all that can happen now has happened.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
T = TypeVar("T")
START_S: Final = 1000.0
MOMENT_S: Final = 0.001
MAX_TURNS: Final = 1_000_000


class _JumpingSelector(selectors.DefaultSelector):
    """Where others would wait, the clock moves."""

    now_s = START_S
    turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns += 1
        assert self.turns < MAX_TURNS, "it goes round and round"
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and nothing will ever happen"
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is its own."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        #: what was left unhandled
        self.complaints: list[Mapping[str, Any]] = []
        super().__init__(self._jumping)
        self.set_exception_handler(lambda _, context: self.complaints.append(context))

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end; `time.monotonic` is the loop's clock. No exception may be left unhandled."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        patch.setattr("time.monotonic", loop.time)
        result = runner.run(work)
        assert loop.complaints == []
    return result


def virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a test of a coroutine function."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_virtual(test(*args, **kwargs))

    return run


async def moment() -> None:
    """All that can happen now happens."""
    await asyncio.sleep(MOMENT_S)
