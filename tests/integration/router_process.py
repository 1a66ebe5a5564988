"""A router as a process of its own, to be killed. `python -m tests.integration.router_process FILE`.

FILE: msgpack of RouterProcess. The LoRA table is a fixed copy: what it does live is tested elsewhere.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from actors.router import Router, RouterSettings
from router.ids import WorkerId
from router.reports import TableView


class RouterProcess(msgspec.Struct, frozen=True):
    """All that a router needs to know."""

    settings: RouterSettings
    table: TableView
    heartbeats: dict[WorkerId, str]


class FixedTable:
    """A LoRA table that never changes."""

    def __init__(self, view: TableView) -> None:
        self._view = view

    async def wait_view(self, epoch: str, version: int, timeout_s: float) -> bytes:
        if (epoch, version) == (self._view.epoch, self._view.version):
            await asyncio.sleep(timeout_s)
        return msgspec.msgpack.encode(self._view)

    async def use(self, counts: Mapping[str, int]) -> None:
        """Nothing is placed here."""


async def main(made: RouterProcess) -> None:
    """Serve until killed."""

    router = Router(made.settings, FixedTable(made.table))  # type: ignore[arg-type]  # as much of a table as it asks for
    await router.start()
    await router.follow(made.heartbeats)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=RouterProcess)))
