"""`indexer`: the block index as a service of its own, for any SGLang servers. No Ray."""

from __future__ import annotations

import argparse
import asyncio
import signal

from router.net.indexer import Indexer
from router.net.indexer_http import IndexerServer


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    asyncio.run(_serve(arguments.host, arguments.port, arguments.max_index_mb * 1024 * 1024))
    return 0


async def _serve(host: str, port: int, max_index_bytes: int) -> None:
    server = IndexerServer(Indexer(max_index_bytes=max_index_bytes), host=host, port=port)
    await server.start()
    print(f"indexer: http://{host}:{port}", flush=True)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        await ended.wait()
    finally:
        await server.stop()
