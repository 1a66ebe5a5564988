"""All engines stand still, then one goes on: it serves what waits at the others, too."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.asking import noise
from tests.integration.background_loop import poll
from tests.integration.crowd import Reply, Wish, crowd
from tests.integration.emulated_fleet import EmulatedFleet
from tests.integration.local_fleet import SERVED
from tests.integration.test_failover_cases import status

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def two(tiny_model: Path) -> Iterator[EmulatedFleet]:
    fleet = EmulatedFleet(tiny_model, num_workers=2)
    fleet.start()
    yield fleet
    fleet.stop()


def test_the_first_to_go_on_serves_what_waits_at_the_others(two: EmulatedFleet) -> None:
    rng = random.Random(1)
    wishes = [Wish({"model": SERVED, "prompt": noise(rng, 40)}) for _ in range(8)]

    def suspended(worker: str) -> bool:
        return bool(status(two, worker)["suspended"])

    async def asking() -> list[Reply]:
        async with crowd(two.url) as clients:
            with two.stopped(*two.workers) as processes:
                first = asyncio.ensure_future(clients.send_all(wishes[:4]))
                await asyncio.to_thread(poll, lambda: all(map(suspended, two.workers)), what="all suspended")
                later = asyncio.ensure_future(clients.send_all(wishes[4:]))
                await asyncio.to_thread(poll, lambda: two.booked() >= 4, what="sent all the same")
                processes["w0"].send_signal(signal.SIGCONT)
                async with asyncio.timeout(60):
                    return [*await first, *await later]

    replies = asyncio.run(asking())
    assert {reply.status for reply in replies} == {200}
    assert {reply.worker for reply in replies} == {"w0"}
    poll(lambda: not suspended("w1"), what="the other is well again")
    two.wait_at_rest()
