"""The LoRA table: the deployment's catalogue of adapters, and what every worker's engine calls them.

Plain class; deployment/cluster.py makes it a named actor that Ray restarts. It keeps nothing on disk: a restarted
table waits a moment for the workers to tell it everything again before it shows itself to routers.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from router.ids import Incarnation, WorkerId
from router.reports import Holding, TableVersion, TableView

log = logging.getLogger(__name__)

SETTLE_S: Final = 3.0
"""Workers tell their holdings every 2 s: after this long, a restarted table has heard from all that live."""


class LoraTable:
    """Aggregated LoRANameTable. Lives on one event loop; `version` grows with every change."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: adapters that the deployment offers."""
        self._names = tuple(sorted(names))
        self._epoch = uuid.uuid4().hex[:12]
        self._version = 0
        #: what each worker's current life holds
        self._holdings: dict[WorkerId, tuple[Incarnation, tuple[Holding, ...]]] = {}
        self._changed = asyncio.Event()
        self._settled_s = time.monotonic() + SETTLE_S

    def __repr__(self) -> str:
        return f"LoraTable(version {self._version}, {len(self._names)} adapters)"

    async def tell(self, worker_id: WorkerId, incarnation: Incarnation, holdings: list[Holding]) -> TableVersion:
        """All that one life of a worker holds; replaces what was told of the worker before."""
        told = (incarnation, tuple(holdings))
        if self._holdings.get(worker_id) != told:
            self._holdings[worker_id] = told
            self._bump()
        return TableVersion(epoch=self._epoch, version=self._version)

    async def forget(self, worker_id: WorkerId) -> None:
        """The worker is gone for good."""
        if self._holdings.pop(worker_id, None) is not None:
            self._bump()

    def view(self) -> TableView:
        """The whole table."""
        rows = [row for _, told in sorted(self._holdings.items()) for row in told[1]]
        return TableView(epoch=self._epoch, version=self._version, names=self._names, holdings=tuple(rows))

    async def wait_view(self, epoch: str, version: int, timeout_s: float) -> bytes:
        """The table as msgpack, as soon as it is newer than (epoch, version), or after `timeout_s` anyway."""
        await asyncio.sleep(max(0.0, self._settled_s - time.monotonic()))
        until_s = time.monotonic() + timeout_s
        while (epoch, version) == (self._epoch, self._version) and time.monotonic() < until_s:
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), until_s - time.monotonic())
            except TimeoutError:
                break
        return msgspec.msgpack.encode(self.view())

    async def status(self) -> dict[str, Any]:
        """For `status`: JSON values."""
        view = self.view()
        return {
            "epoch": view.epoch,
            "version": view.version,
            "adapters": list(view.names),
            "holdings": [msgspec.to_builtins(row) for row in view.holdings],
        }

    def _bump(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
