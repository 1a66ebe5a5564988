"""Requests for adapters that no worker holds yet: they wait here while the LoRA table has one loaded.

The table is asked only then, and never by a request that can be served: what is used is told to it at a pace.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Protocol

from router.core import RouterCore
from router.decision import Decision
from router.errors import AdapterUnavailable, UnknownModel
from router.ids import WorkerId
from router.reports import AdapterState

log = logging.getLogger(__name__)

_ASK_S: Final = 0.5
"""A wish is repeated at this pace; the table forgets one that isn't."""
_TELL_S: Final = 0.25
_FAILED_S: Final = 5.0
"""Where every load has failed, requests still wait so long for one that succeeds."""


class AdapterTable(Protocol):
    """The LoRA table as a router uses it, from afar. Any call may raise."""

    async def wait_view(self, epoch: str, version: int, timeout_s: float) -> bytes:
        """See LoraTable."""

    async def want(self, name: str, preferred: list[WorkerId], waiting: int, *, more: bool) -> None:
        """See LoraTable."""

    async def use(self, counts: Mapping[str, int]) -> None:
        """See LoraTable."""


class AdapterGate:
    """Lives on the core's loop."""

    def __init__(
        self, core: RouterCore, table: AdapterTable, *, wait_s: float, record_wait: Callable[[float], None]
    ) -> None:
        """`wait_s`: longest wait of a request; `record_wait` is told each wait, in seconds."""
        self._core = core
        self._table = table
        self._wait_s = wait_s
        self._record_wait = record_wait
        #: requests that wait, by adapter
        self.waiting: Counter[str] = Counter()
        self._asked_s: dict[tuple[str, bool], float] = {}
        self._uses: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def changed(self) -> None:
        """The table's copy, or a worker, has changed: whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, name: str, exclude: Collection[WorkerId] = ()) -> None:
        """Until a ready worker holds the adapter, other than those of `exclude`.

        Raises:
            AdapterUnavailable: none does within `wait_s`, or all that tried have failed.
            UnknownModel: it isn't offered any more.
        """
        started_s = time.monotonic()
        failed_s: float | None = None
        self.waiting[name] += 1
        try:
            while not self._is_held(name, exclude):
                now_s = time.monotonic()
                if name not in self._core.table.names:
                    raise UnknownModel(f"adapter {name!r} was unloaded; GET /v1/models lists what is served")
                error = self._failure(name)
                failed_s = None if error is None else failed_s or now_s
                if error is not None and failed_s is not None and now_s - failed_s > _FAILED_S:
                    raise AdapterUnavailable(f"adapter {name!r} can't be loaded: {error}")
                if now_s - started_s > self._wait_s:
                    raise AdapterUnavailable(
                        f"no worker that is well has loaded adapter {name!r} within {self._wait_s:.0f} s"
                    )
                self._ask(name, more=self._is_held_in_vain(name))
                changed = self._changed
                try:
                    async with asyncio.timeout(_ASK_S):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            self.waiting[name] -= 1
            if not self.waiting[name]:
                del self.waiting[name]
            self._record_wait(time.monotonic() - started_s)

    def used(self, decision: Decision) -> None:
        """A request goes to a holder; where others could serve it sooner, load and all, one more is wanted."""
        if decision.adapter is None:
            return
        self._uses[decision.adapter] += 1
        if self._core.wants_more(decision, now_s=time.monotonic()):
            self._ask(decision.adapter, more=True)

    def gone(self, decision: Decision) -> None:
        """The engine says that it doesn't hold the adapter after all."""
        assert decision.adapter is not None
        log.warning("%s doesn't hold adapter %s any more", decision.source, decision.adapter)
        self._core.lose_adapter(decision.source.worker_id, decision.adapter)

    async def run(self) -> None:
        """Tell the table what is used, until cancelled."""
        while True:
            await asyncio.sleep(_TELL_S)
            uses, self._uses = self._uses, Counter()
            if uses:
                await self._call(self._table.use(dict(uses)))

    def _is_held(self, name: str, exclude: Collection[WorkerId]) -> bool:
        ready = self._core.ready_workers()
        return any(name in record.adapters and record.report.worker_id not in exclude for record in ready)

    def _is_held_in_vain(self, name: str) -> bool:
        """Whether workers hold it that requests don't go to: those that are suspended, or have failed this one."""
        return any(name in record.adapters for record in self._core.workers.values())

    def _failure(self, name: str) -> str | None:
        """Why the adapter can't be had, where all that hold anything of it have failed; None while there is hope."""
        rows = [
            row for row in self._core.table.holdings if row.name == name and row.state is not AdapterState.UNLOADING
        ]
        if not rows or any(row.state is not AdapterState.FAILED for row in rows):
            return None
        return f"{rows[0].worker_id}: {rows[0].error}"

    def _ask(self, name: str, *, more: bool) -> None:
        now_s = time.monotonic()
        if now_s - self._asked_s.get((name, more), 0.0) < _ASK_S * 0.9:
            return
        self._asked_s = {key: at_s for key, at_s in self._asked_s.items() if now_s - at_s < 2 * _ASK_S}
        self._asked_s[name, more] = now_s
        preferred = self._core.preferences(name, now_s=now_s)
        task = asyncio.ensure_future(
            self._call(self._table.want(name, preferred, max(1, self.waiting[name]), more=more))
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, asking: Any) -> None:
        try:
            await asking
        except Exception as exc:  # noqa: BLE001  # the table is away: asked again while anybody waits
            log.warning("the LoRA table can't be asked: %s", exc)
