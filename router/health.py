"""Which workers fail: consecutive failures, overdue first tokens, and how many retries the fleet can bear. Pure.

Theory of operation. A request that fails before its first byte is tried elsewhere; that is what keeps it alive.
Suspending is what keeps the next ones from trying in vain: after FAILURES in a row, or when nothing at all has come
from a worker for far longer than its requests were to take. A client's fault (4xx) is no failure. Retries are bounded
by what was asked lately, so that a fleet that fails everywhere isn't asked everything many times over.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from router.ids import WorkerId

FAILURES: Final = 3
"""In a row, without an answer between them."""
STALL_FACTOR: Final = 5.0
"""A first token is overdue at so many times what was expected..."""
MIN_STALL_S: Final = 10.0
"""...and no earlier than this."""
MAX_ATTEMPTS: Final = 3
"""Workers that one request is sent to at most."""
_WINDOW_S: Final = 10.0
_FREE_RETRIES: Final = 100
"""Retries within the window that need no requests to justify them."""


class Failures:
    """Failures in a row, by worker."""

    def __init__(self) -> None:
        self._row: dict[WorkerId, int] = {}

    def failed(self, worker_id: WorkerId) -> bool:
        """Count one; True once there are enough to suspend the worker."""
        self._row[worker_id] = self._row.get(worker_id, 0) + 1
        return self._row[worker_id] >= FAILURES

    def answered(self, worker_id: WorkerId) -> None:
        """The worker has answered: what was before is forgotten."""
        self._row.pop(worker_id, None)


def stall_limit_s(expected_ms: float) -> float:
    """After how much silence a worker is doubted that was to give a first token after `expected_ms`."""
    return max(MIN_STALL_S, STALL_FACTOR * expected_ms / 1000)


class RetryBudget:
    """As many retries as first attempts within a window of ten seconds, and a hundred more."""

    def __init__(self) -> None:
        self._asked: deque[float] = deque()
        self._retried: deque[float] = deque()

    def asked(self, now_s: float) -> None:
        """A request's first attempt."""
        self._asked.append(now_s)
        _forget(self._asked, now_s)

    def take(self, now_s: float) -> bool:
        """Whether one retry more may be made; counts it if so."""
        _forget(self._asked, now_s)
        _forget(self._retried, now_s)
        if len(self._retried) >= len(self._asked) + _FREE_RETRIES:
            return False
        self._retried.append(now_s)
        return True


def _forget(times: deque[float], now_s: float) -> None:
    while times and now_s - times[0] > _WINDOW_S:
        times.popleft()
