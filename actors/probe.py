"""Attestation at registration: an engine's own hashes of a prompt that we know, before anybody routes by them."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from actors.engine.client import EngineClient, EngineError
from actors.mirror import Mirror
from router.attestation import HashForm

log = logging.getLogger(__name__)

EVENT_S: Final = 10.0
"""Longest wait for the event of a prompt that has been answered."""
_LOOK_S: Final = 0.02
_FIRST_TOKEN: Final = 3
"""Token ids from here on; every vocabulary has them, and what they mean doesn't matter."""


async def attest_engine(client: EngineClient, mirror: Mirror, form: HashForm) -> str:
    """Have each rank compute one block and compare its event; returns what is wrong, or an empty string.

    Leaves the engine's cache as empty as it found it.
    """
    prompt = list(range(_FIRST_TOKEN, _FIRST_TOKEN + form.page_size + 2))
    for local_rank, dp_rank in enumerate(mirror.dp_ranks):
        try:
            await client.prefill(prompt, local_rank=local_rank if len(mirror.dp_ranks) > 1 else None)
        except EngineError as exc:
            log.warning("rank %d can't be attested: %s", dp_rank, exc)
            return ""
        until_s = time.monotonic() + EVENT_S
        while not mirror.is_attested(dp_rank):
            if fault := mirror.fault(dp_rank):
                return f"rank {dp_rank}: {fault}"
            if time.monotonic() > until_s:
                return f"rank {dp_rank}: no event of a prompt of {len(prompt)} tokens came within {EVENT_S:.0f} s"
            await asyncio.sleep(_LOOK_S)
    await client.flush_cache(timeout_s=EVENT_S)
    return ""
