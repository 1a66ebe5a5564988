"""Holds an answer's last bytes until the events that left its engine before it have arrived, a moment at most.

Engines publish what a request stored before they answer it, on another connection. Where threads wait for a core, the
answer can be here first; a client that asks on at once would then be predicted from a table that lacks its last turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from router.core import RouterCore
from router.ids import SourceId
from router.ingest import SourceState
from router.net.usage import Usage

WAIT_S: Final = 0.02
"""Longest that an answer is held; events are here first nearly always, and then it isn't held at all."""
_LOOK_S: Final = 0.001
MAX_TIMEOUTS: Final = 5
"""So many in a row mean that the engine stores less than we think: hold nothing until an answer would pass."""


class ArrivalGate:
    """Lives on the core's loop."""

    def __init__(self, core: RouterCore, drain: Callable[[SourceId], None]) -> None:
        """`drain(source)` applies events that have arrived already."""
        self._core = core
        self._drain = drain
        #: sources whose answers were held in vain lately, and how often in a row
        self._timeouts: dict[SourceId, int] = {}

    def mark(self, source: SourceId) -> int:
        """Position in the source's stream as a request is sent; for `settle`."""
        return self._core.ingest.cursor(source).next_seq

    async def settle(self, source: SourceId, mark: int, usage: Usage | None) -> None:
        """Return once as many batches have come since `mark` as the request must have caused, or after WAIT_S."""
        self._drain(source)
        if usage is None:
            return
        wanted = mark + self._num_batches(source, usage)
        if self._has_come(source, wanted):
            self._timeouts.pop(source, None)
            return
        if self._timeouts.get(source, 0) >= MAX_TIMEOUTS:
            return
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_S)
            self._drain(source)
            if self._has_come(source, wanted):
                self._timeouts.pop(source, None)
                return
        self._timeouts = {known: n for known, n in self._timeouts.items() if known in self._core.ingest}
        self._timeouts[source] = self._timeouts.get(source, 0) + 1

    def _has_come(self, source: SourceId, wanted: int) -> bool:
        """Also where there is nothing to wait for: the source is gone, or isn't exact anyway."""
        ingest = self._core.ingest
        if source not in ingest or ingest.state(source) is not SourceState.EXACT:
            return True
        return ingest.cursor(source).next_seq >= wanted

    def _num_batches(self, source: SourceId, usage: Usage) -> int:
        """Batches that one request causes at least: one for new pages of its prompt, one for new pages of its output.

        A request that ends with its first token stores both at once.
        """
        record = self._core.workers.get(source.worker_id)
        if record is None or not record.report.page_size:
            return 0
        page_size = record.report.page_size
        prompt_pages = usage.prompt_tokens // page_size
        all_pages = (usage.prompt_tokens + usage.completion_tokens - 1) // page_size  # the last token isn't stored
        new = (prompt_pages * page_size > usage.cached_tokens) + (all_pages > prompt_pages)
        return min(usage.completion_tokens, new)
