"""A router as a process of its own, to be killed. `python -m tests.integration.router_process FILE`.

FILE: msgpack of RouterProcess.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from actors.router import Router, RouterSettings
from router.ids import WorkerId
from tests.integration.table_rpc import TableClient


class RouterProcess(msgspec.Struct, frozen=True):
    """All that a router needs to know."""

    settings: RouterSettings
    table_endpoint: str
    heartbeats: dict[WorkerId, str]


async def main(made: RouterProcess) -> None:
    """Serve until killed."""
    router = Router(made.settings, TableClient(made.table_endpoint))  # type: ignore[arg-type]  # nobody loads through it
    await router.start()
    await router.follow(made.heartbeats)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=RouterProcess)))
