"""An emulated engine as a process: publishers, HTTP server, and an end when its launcher ends."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web

from actors.engine.emulated.engine import EmulatedEngine
from actors.engine.emulated.http import HttpSurface
from actors.engine.emulated.settings import EmulatedSettings
from actors.engine.plugin import PUBLISHER, register_publisher
from router.net.tokenizer import PromptTokenizer

_BACKLOG: Final = 1024


def run(profile: str, arguments: Sequence[str], *, api_key: str, first_dp_rank: int, life: socket.socket) -> None:
    """Serve until killed, or until `life` closes at its other end. Raises ValueError, OSError."""
    asyncio.run(_serve(profile, arguments, api_key=api_key, first_dp_rank=first_dp_rank, life=life))


async def _serve(
    profile: str, arguments: Sequence[str], *, api_key: str, first_dp_rank: int, life: socket.socket
) -> None:
    settings = EmulatedSettings.parse(profile, arguments)
    asyncio.get_running_loop().add_reader(life.fileno(), os._exit, 0)  # nothing is ever sent: it closed
    engine = EmulatedEngine(settings, _publishers(settings, first_dp_rank))
    try:
        tokenizer: PromptTokenizer | None = await asyncio.to_thread(PromptTokenizer, settings.model_path)
    except (OSError, ValueError, ImportError) as exc:
        print(f"no tokenizer ({exc}): token ids only", flush=True)  # noqa: T201  # the engine's output is its log
        tokenizer = None
    runner = web.AppRunner(
        HttpSurface(engine, tokenizer, api_key).app(), handler_cancellation=True, access_log=None, keepalive_timeout=120
    )
    await runner.setup()
    await web.TCPSite(runner, settings.host, settings.port, backlog=_BACKLOG).start()
    await asyncio.Event().wait()


def _publishers(settings: EmulatedSettings, first_dp_rank: int) -> list[Any]:
    from sglang.srt.disaggregation.kv_events import EventPublisherFactory

    register_publisher(first_dp_rank)
    events = {name: value for name, value in settings.events.items() if name not in ("publisher", "format")}
    publisher = EventPublisherFactory._registry[PUBLISHER]
    return [publisher(i, **events) for i in range(settings.dp_size)]
