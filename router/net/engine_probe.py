"""Asks one engine how much of a prompt it has cached, by having it compute one token."""

from __future__ import annotations

from array import array
from typing import Any, Final

import aiohttp

from router.decision import RouteRequest

_TIMEOUT_S: Final = 120.0


class ProbeError(Exception):
    """The engine didn't say; the message says why."""


async def ask_cached_tokens(
    session: aiohttp.ClientSession, url: str, request: RouteRequest, *, local_rank: int | None, rid: str
) -> int:
    """`cached_tokens` of the engine at `url` for the prompt, on its rank `local_rank` (None: its only one).

    Raises:
        ProbeError: no answer, or one without the figure.
    """
    body: dict[str, Any] = {
        "input_ids": array("I", request.packed_tokens or b"").tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "rid": rid,
    }
    wanted = {
        "lora_path": request.adapter,
        "extra_key": request.extra_key,
        "cache_salt": request.cache_salt,
        "routed_dp_rank": local_rank,
    }
    body |= {name: value for name, value in wanted.items() if value is not None}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with session.post(f"{url}/generate", json=body, timeout=timeout) as answer:
            if answer.status != 200:
                raise ProbeError(f"HTTP {answer.status}: {(await answer.text())[:200]}")
            return int((await answer.json())["meta_info"]["cached_tokens"])
    except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as exc:
        raise ProbeError(f"{type(exc).__name__}: {exc}") from exc
