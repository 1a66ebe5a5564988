"""A router as a process of its own, to be killed. `python -m tests.integration.router_process FILE`.

FILE: msgpack of RouterProcess. The LoRA table is a fixed copy: what it does live is tested elsewhere.
"""

from __future__ import annotations

import asyncio
import sys
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


async def main(made: RouterProcess) -> None:
    """Serve until killed."""

    async def poll_table(epoch: str, version: int, timeout_s: float) -> bytes:
        if (epoch, version) == (made.table.epoch, made.table.version):
            await asyncio.sleep(timeout_s)
        return msgspec.msgpack.encode(made.table)

    router = Router(made.settings, poll_table)
    await router.start()
    await router.follow(made.heartbeats)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=RouterProcess)))
